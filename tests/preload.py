"""Modules that the fork server of tests imports once. The processes that it starts have them at once;
importing them takes longer than most of their work."""

import gc
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of packages that others import

    import torch
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor.parallel
    import transformers
    import transformers.models.bert.modeling_bert
    import transformers.models.llama.modeling_llama

    import tests.contract.cases
    import tests.tiny
    import tightfit.engine
    import tightfit.planner.dry_run

torch.set_num_threads(1)
gc.collect()
gc.freeze()
__all__ = ["tests", "tightfit", "transformers"]
