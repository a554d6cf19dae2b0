"""Names of torch's loggers that tightfit silences for a while, and a quiet import of torchao."""

from __future__ import annotations

import importlib
import logging
import warnings
from typing import Any

FAKE_TENSORS = "torch._subclasses.fake_tensor"
PYTREE = "torch.utils._pytree"
WRAPPED_OPERATIONS = "torch._higher_order_ops.wrap"


def quiet_import(name: str) -> Any:
    """Import and return a module of torchao, without its log messages and warnings. Raises
    ImportError if the module cannot be imported.

    name  such as "torchao.float8"
    """
    loggers = [logging.getLogger(name) for name in ("torchao", PYTREE)]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
