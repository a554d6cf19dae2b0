"""Packages that only some jobs need. pip installs them with an extra of tightfit, such as
"tightfit[figures]"."""

from __future__ import annotations

import importlib
from typing import Any

from tightfit.errors import InputError

EXTRA_OF = {  # module -> the extra that installs it
    "datasets": "datasets",
    "pyarrow": "datasets",
    "pyarrow.parquet": "datasets",
    "matplotlib": "figures",
    "sklearn.datasets": "digits",
    "peft": "lora",
}
_PACKAGE_OF = {"sklearn.datasets": "scikit-learn"}


def import_optional(module: str, asked: str) -> Any:
    """Import and return a module that an extra of tightfit installs.

    module  one of the keys of EXTRA_OF
    asked   what the user asked for, for the message: such as "job: model.lora"

    Raises InputError, which names the extra, if the module's package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        package = _PACKAGE_OF.get(module, module.partition(".")[0])
        raise InputError(
            asked,
            f"needs the package {package}, which is not installed",
            f'install it: pip install "tightfit[{EXTRA_OF[module]}]"',
        ) from None


__all__ = ["EXTRA_OF", "import_optional"]
