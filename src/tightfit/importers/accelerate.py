"""Imports Accelerate's configuration file: YAML, as `accelerate config` writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tightfit.importers import deepspeed
from tightfit.importers.conversions import chosen, count, flag, number, positive, text, whole
from tightfit.importers.mapping import Draft, Importer, Key, Lacks, lacks, needless, under
from tightfit.importers.reading import read_settings
from tightfit.importers.training_arguments import FSDP_KEYS


def _stage(value: Any) -> tuple[int, bool]:
    """Return (ZeRO stage, False). The stage is the value, 0, 1, 2 or 3. False says that the model
    is not also replicated over nodes."""
    found = whole(value)
    if found not in (0, 1, 2, 3):
        raise ValueError("a stage: 0, 1, 2 or 3")
    return found, False


def _place(*words: str) -> Any:
    def convert(value: Any) -> tuple[str, ...]:
        if str(value).lower() not in ("none", "cpu", "nvme"):
            raise ValueError("none, cpu or nvme")
        return () if str(value).lower() == "none" else words

    convert.__doc__ = f"cpu and nvme add {' and '.join(words)}. nvme also sets plan.offload_to: disk."
    return convert


def _accumulation(value: Any) -> int:
    """Return the number of accumulation steps. It is a factor of train.batch, which is micro-batch
    x accumulation steps x data ranks."""
    return whole(value)


_START = "tightfit starts and connects its processes (--nproc, --interface), or torchrun and srun do"
_DYNAMO = "tightfit compiles blocks or the model with torch's default backend"
KEYS: tuple[Key, ...] = (
    Key(
        "distributed_type",
        "plan.zero",
        chosen(
            {
                "no": "no",
                "multi_gpu": "multi_gpu",
                "multi_cpu": "multi_gpu",
                "multi_xpu": "multi_gpu",
                "multi_npu": "multi_gpu",
                "fsdp": "fsdp",
                "deepspeed": "deepspeed",
                "megatron_lm": "megatron_lm",
                False: "no",
            },
            "tightfit trains on CPUs and CUDA devices",
        ),
        "distributed_type",
        "MULTI_GPU is zero 0 with dp_replicate; FSDP and DEEPSPEED have their own sections",
    ),
    Key("num_processes", "plan.dp_shard", count, "devices", "all devices; with ZeRO dp_shard, else dp_replicate"),
    Key("num_machines", "plan.dp_replicate", whole, "nodes", "for hybrid sharding, the replicas"),
    Key(
        "mixed_precision",
        "plan.precision",
        chosen({"no": "no", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8", False: "no"}),
        "mixed",
        "no is fp32; bf16 is bf16-mixed, fp16 is fp16-mixed, and -true with plan.master_weights under DeepSpeed and "
        "Megatron-LM; fp8 is bf16-mixed with plan.float8: tensorwise",
    ),
    Key("downcast_bf16", "", None, "", "for TPUs, on which tightfit does not train", False),
    *needless("tightfit scales float8 by tensorwise or rowwise recipes (plan.float8)", "fp8_config.*"),
    *needless(
        "tightfit takes the devices of the machine", "use_cpu", "gpu_ids", "ipex_config.*", "tpu_*", "xpu_config"
    ),
    *needless(
        _START,
        "compute_environment",
        "machine_rank",
        "main_process_ip",
        "main_process_port",
        "main_training_function",
        "rdzv_backend",
        "same_network",
        "enable_cpu_affinity",
        "mpirun_config.*",
        "command_file",
        "commands",
        "debug",
        "fsdp_config",
        "deepspeed_config",
        "megatron_lm_config",
        "dynamo_config",
        "mpirun_config",
        "fp8_config",
        "parallelism_config",
    ),
    *lacks(
        "tightfit does not start jobs on SageMaker",
        "ec2_instance_type",
        "iam_role_name",
        "image_uri",
        "profile",
        "region",
        "base_job_name",
        "pytorch_version",
        "transformers_version",
        "py_version",
        "sagemaker_*",
        "additional_args",
    ),
    *under("fsdp_config", FSDP_KEYS),
    Key("deepspeed_config.zero_stage", "plan.zero", _stage, "zero"),
    Key("deepspeed_config.gradient_accumulation_steps", "train.batch", _accumulation, "accumulation"),
    Key("deepspeed_config.gradient_clipping", "train.clip", positive),
    Key("deepspeed_config.offload_optimizer_device", "plan.offload", _place("states"), "offload_states"),
    Key(
        "deepspeed_config.offload_param_device", "plan.offload", _place("gradients", "parameters"), "offload_parameters"
    ),
    Key("deepspeed_config.offload_optimizer_nvme_path", "plan.offload_folder", text, "states_folder"),
    Key("deepspeed_config.offload_param_nvme_path", "plan.offload_folder", text, "parameters_folder"),
    *needless("tightfit creates a sharded model by itself", "deepspeed_config.zero3_init_flag"),
    *needless("tightfit's checkpoints contain full tensors", "deepspeed_config.zero3_save_16bit_model"),
    *needless(
        _START,
        "deepspeed_config.deepspeed_hostfile",
        "deepspeed_config.deepspeed_inclusion_filter",
        "deepspeed_config.deepspeed_exclusion_filter",
        "deepspeed_config.deepspeed_multinode_launcher",
        "deepspeed_hostfile",
    ),
    *needless("tightfit finds a model's blocks by itself", "deepspeed_config.deepspeed_moe_layer_cls_names"),
    *under("deepspeed_config.deepspeed_config_file", deepspeed.KEYS),
    Key(
        "deepspeed_config.deepspeed_config_file",
        reason="the file was not found; put it in the folder of this file, or import it separately",
    ),
    Key("parallelism_config.parallelism_config_dp_shard_size", "plan.dp_shard", whole, "dp_shard"),
    Key("parallelism_config.parallelism_config_dp_replicate_size", "plan.dp_replicate", whole, "dp_replicate"),
    Key("parallelism_config.parallelism_config_tp_size", "plan.tp", whole, "tp"),
    Key("parallelism_config.parallelism_config_cp_size", "plan.cp", whole, "cp"),
    *needless(
        "tightfit's context parallelism always uses ring attention", "parallelism_config.parallelism_config_cp_*"
    ),
    Key("megatron_lm_config.megatron_lm_tp_degree", "plan.tp", whole, "tp"),
    Key("megatron_lm_config.megatron_lm_pp_degree", "plan.pp", whole, "pp"),
    Key("megatron_lm_config.megatron_lm_sequence_parallelism", "plan.sequence_parallel", flag),
    Key(
        "megatron_lm_config.megatron_lm_recompute_activations",
        "plan.recompute",
        lambda value: "attention" if flag(value) else "none",
        reason="true is attention, Megatron-LM's selective recomputation",
    ),
    Key(
        "megatron_lm_config.megatron_lm_use_distributed_optimizer",
        "plan.zero",
        lambda value: (1, False) if flag(value) else (0, False),
        "zero",
        "true is zero 1",
    ),
    Key("megatron_lm_config.megatron_lm_gradient_clipping", "train.clip", positive),
    Key(
        "megatron_lm_config.megatron_lm_num_micro_batches",
        "train.batch",
        whole,
        "accumulation",
        "a factor of train.batch",
    ),
    Key("gradient_accumulation_steps", "train.batch", whole, "accumulation", "a factor of train.batch"),
    Key("gradient_clipping", "train.clip", lambda value: positive(number(value)), reason="the same norm"),
    Key(
        "dynamo_config.dynamo_backend",
        "plan.compile",
        chosen({"no": "none", "inductor": "block"}, _DYNAMO),
    ),
    Key(
        "dynamo_config.dynamo_mode",
        "plan.compile_mode",
        chosen(
            {
                "default": Lacks("as in tightfit", False),
                "reduce-overhead": "reduce-overhead",
                "max-autotune-no-cudagraphs": "max-autotune-no-cudagraphs",
            },
            _DYNAMO,
        ),
    ),
    *needless(_DYNAMO, "dynamo_config.dynamo_*", "dynamo_backend"),
)


def _prepare(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the content of the imported file. If it names a DeepSpeed file that exists, the
    content of that file replaces the name.

    folder  the folder of the imported file
    """
    section = content.get("deepspeed_config")
    if not isinstance(section, dict):
        return content
    named = section.get("deepspeed_config_file")
    if isinstance(named, str):
        for start in (folder, Path.cwd()):
            if (start / named).is_file():
                return {
                    **content,
                    "deepspeed_config": {**section, "deepspeed_config_file": read_settings(start / named)},
                }
    return content


def _combine(draft: Draft) -> None:
    deepspeed.combine_deepspeed(draft)
    parts = draft.parts
    mixed, kind = parts.get("mixed"), parts.get("distributed_type")
    if mixed in ("bf16", "fp16"):
        draft.imply(mixed, True, "mixed")
        if kind in ("deepspeed", "megatron_lm"):
            draft.parts.setdefault("masters", True)
    elif mixed == "fp8":
        draft.imply("bf16", True, "mixed")
        draft.fields["plan.float8"] = "tensorwise"
        draft.remark("mixed", "plan.float8: tensorwise")
    elif mixed == "no":
        draft.imply("bf16", False, "mixed")
    if kind in ("no", "multi_gpu") and "zero" in parts and parts["zero"][0]:
        draft.contradict(
            f"{draft.giver('zero')} shards the model, but distributed_type is {kind.upper()}, which does not"
        )
        draft.drop("plan.zero")
        del parts["zero"]
        return
    if kind == "no" and parts.get("devices", 1) > 1:
        draft.contradict(f"num_processes is {parts['devices']}, but distributed_type is NO: one process")
        draft.drop("plan.dp_shard")
        parts["devices"] = 1
    draft.imply("zero", ({"fsdp": 3, "deepspeed": 2}.get(str(kind), 0), False), "distributed_type")
    for row in draft.rows:
        if row.key == "deepspeed_config.deepspeed_config_file" and isinstance(row.value, str):
            draft.to_do.append(f"{row.key} names {row.value}, which was not found; import it separately")
            if parts["zero"] == (2, False) and draft.giver("zero") == "distributed_type":
                del parts["zero"]  # the other file says the stage
    if parts.get("tp", 1) > 1 and "plan.sequence_parallel" not in draft.fields:
        draft.fields["plan.sequence_parallel"] = False


IMPORTER = Importer(
    name="accelerate",
    title="Accelerate's config",
    marks=("compute_environment", "distributed_type", "num_machines", "main_training_function", "num_processes"),
    keys=KEYS,
    auto="auto is filled in when the training starts, from what Accelerator() gets there",
    prepare=_prepare,
    combine=_combine,
)
