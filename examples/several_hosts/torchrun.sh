#!/usr/bin/env bash
# Run this on each of the hosts, with the name of the first:
#   HEAD=node1 bash examples/several_hosts/torchrun.sh
# NODES is the number of hosts, GPUS that of each host's GPUs. The plan must have as many devices.
# Further arguments go to `tightfit train`: --set train.steps=100, or --interface NAME where hosts
# have several networks.
set -euo pipefail
out=${OUT:-runs/several_hosts}
resume=()
if [[ -d $out/checkpoints ]]; then resume=(--resume); fi
exec torchrun --nnodes "${NODES:-2}" --nproc-per-node "${GPUS:-8}" \
  --rdzv-backend c10d --rdzv-id several_hosts \
  --rdzv-endpoint "${HEAD:?name the first host}:${PORT:-29500}" \
  -m tightfit train examples/several_hosts/job.yaml --plan examples/several_hosts/plan.yaml \
  --out "$out" "${resume[@]}" "$@"
