#!/usr/bin/env bash
# sbatch examples/several_hosts/slurm.sh
# One process for each GPU. Two minutes before the time is up, Slurm sends SIGTERM: the training
# saves and ends with the code 85, the script queues the job again, and the next start resumes.
# Further arguments of the script go to `tightfit train`.
#SBATCH --job-name=several_hosts
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
out=${OUT:-runs/several_hosts}
resume=()
if [[ -d $out/checkpoints ]]; then resume=(--resume); fi
code=0
srun --kill-on-bad-exit=1 \
  tightfit train examples/several_hosts/job.yaml --plan examples/several_hosts/plan.yaml \
  --out "$out" --requeue-code 85 "${resume[@]}" "$@" || code=$?
if [[ $code == 85 ]]; then
  scontrol requeue "$SLURM_JOB_ID"
else
  exit "$code"
fi
