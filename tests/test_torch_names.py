"""Private names of torch: only the package `tightfit._torch` uses them, and torch has them."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tightfit._torch.names import PRIVATE_NAMES, PrivateName

SOURCE = Path(__file__).parent.parent / "src" / "tightfit"
PACKAGE = SOURCE / "_torch"
MODULES = sorted(path for path in PACKAGE.glob("*.py") if path.name != "names.py")
FULL_NAMES = {f"{one.owner}.{one.name}" for one in PRIVATE_NAMES}
ATTRIBUTES = {one.name for one in PRIVATE_NAMES}
# private names of Python's own library and of transformers
NOT_TORCH = {"_attn_implementation", "_current_frames", "_exit", "_fields", "_getframe", "_model_mapping"}
OLDER_NAMES = {"_fsdp_param_groups": "_fsdp_param_group"}  # the name in the table, and what it was in torch 2.11


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


class Uses(ast.NodeVisitor):
    """The private names in a file.

    names       (line, full name), such as (3, "torch._guards.active_fake_mode")
    attributes  (line, attribute, whether it is of `self` or `cls`) of other objects, such as
                (9, "_buffers", False)
    """

    def __init__(self, code: str) -> None:
        self.names: list[tuple[int, str]] = []
        self.attributes: list[tuple[int, str, bool]] = []
        self.defined: set[str] = set()
        self.known = {"torch": "torch"}  # what a name in the file stands for
        self.visit(ast.parse(code))

    def full_name(self, node: ast.AST) -> str | None:
        """The name in torch that an expression stands for; None for any other expression."""
        if isinstance(node, ast.Name):
            return self.known.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.full_name(node.value)
            return f"{owner}.{node.attr}" if owner else None
        return None

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.split(".")[0] == "torch":
                self.note(node, alias.name)
                if alias.asname:
                    self.known[alias.asname] = alias.name

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                self.known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                self.note(node, f"{node.module}.{alias.name}")

    def visit_Assign(self, node: ast.Assign) -> None:
        name = self.full_name(node.value)
        for target in node.targets:
            if isinstance(target, ast.Name) and name:
                self.known[target.id] = name
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self.full_name(node)
        if name is not None:
            self.note(node, name)
            return
        of_itself = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        if of_itself and isinstance(node.ctx, ast.Store):
            self.defined.add(node.attr)
        if is_private(node.attr):
            self.attributes.append((node.lineno, node.attr, of_itself))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        reaches = isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr", "setattr", "delattr")
        if reaches and isinstance(node.args[1], ast.Constant) and is_private(str(node.args[1].value)):
            self.attributes.append((node.lineno, str(node.args[1].value), False))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """The name of a module or of its logger."""
        if isinstance(node.value, str) and re.fullmatch(r"torch(\.\w+)+", node.value):
            self.note(node, node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.defined.add(node.name)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if isinstance(node.target, ast.Name):
            self.defined.add(node.target.id)
        self.generic_visit(node)

    def note(self, node: ast.stmt | ast.expr, name: str) -> None:
        if is_private(name):
            self.names.append((node.lineno, name))

    def forbidden(self, elsewhere: frozenset[str] = frozenset()) -> Iterator[tuple[int, str]]:
        """The private names that only tightfit._torch may use.

        elsewhere  names that other files define: a class may have them from its base class
        """
        yield from self.names
        for line, name, of_itself in self.attributes:
            own = name in self.defined | elsewhere if of_itself else name in self.defined - ATTRIBUTES
            if not own and name not in NOT_TORCH:
                yield line, name


def test_only_one_package_uses_private_names_of_torch() -> None:
    files = {path: Uses(path.read_text()) for path in sorted(SOURCE.rglob("*.py")) if PACKAGE not in path.parents}
    defined = frozenset[str]().union(*(uses.defined for uses in files.values()))
    found = [
        f"{path.relative_to(SOURCE)}:{line}: {name}"
        for path, uses in files.items()
        for line, name in uses.forbidden(defined)
    ]
    assert found == [], "reach them through tightfit._torch"


@pytest.mark.parametrize(
    "code",
    [
        "from torch._guards import active_fake_mode",
        "import torch._dynamo as dynamo",
        "from torch.utils import _pytree",
        "import torch.distributed as dist\ndist.distributed_c10d._set_pg_timeout(1, None)",
        "import torch\naten = torch.ops.aten\naten._scaled_mm.default",
        "def buffers(module): return module.layer._buffers",
        "class Mine:\n def __init__(self, other): self._buffers = other._buffers",
        "class Mine(Module):\n def names(self): return list(self._buffers)",
        "def compiled(module): return getattr(module, '_compiled_call_impl')",
        "import logging\nlogging.getLogger('torch._subclasses.fake_tensor')",
    ],
)
def test_the_search_finds_a_private_name(code: str) -> None:
    assert list(Uses(code).forbidden())


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch.utils.checkpoint.checkpoint(torch.nn.__name__)",
        "class Mine:\n def __init__(self): self._buffers = []\n def count(self): return len(self._buffers)",
        "import os\nos._exit(1)",
    ],
)
def test_the_search_allows_public_names_and_a_class_its_own(code: str) -> None:
    assert not list(Uses(code).forbidden())


def test_the_table_has_each_private_name_in_use() -> None:
    for path in MODULES:
        uses = Uses(path.read_text())
        for line, name in uses.names:
            assert is_listed(name), f"{path.name}:{line}: the table of tightfit._torch.names lacks {name}"
        for line, name, _ in uses.attributes:
            assert name in ATTRIBUTES | set(OLDER_NAMES.values()), f"{path.name}:{line}: the table lacks {name}"


def is_listed(name: str) -> bool:
    """Whether the table has a name, one of its members, or the module that has it."""
    return any(f"{one}.".startswith(f"{name}.") or name.startswith(f"{one}.") for one in FULL_NAMES)


def test_the_table_has_no_name_that_is_not_used() -> None:
    words = {word for path in MODULES for word in re.findall(r"\w+", path.read_text())}
    assert [one for one in PRIVATE_NAMES if one.name not in words] == []


@pytest.mark.parametrize("one", PRIVATE_NAMES, ids=lambda one: f"{one.owner}.{one.name}")
def test_torch_has_each_name(one: PrivateName) -> None:
    assert has(one) or has(one._replace(name=OLDER_NAMES.get(one.name, one.name))), (
        f"torch {torch.__version__} has no {one.owner}.{one.name}, which src/tightfit/_torch uses ({one.purpose}).\n"
        f"What would replace it: {one.instead}"
    )


def has(one: PrivateName) -> bool:
    """Whether torch has a name: a member of a module or class, or an attribute of its instances."""
    try:
        owner = owner_of(one)
        if isinstance(owner, ModuleType):
            return hasattr(owner, one.name) or importlib.util.find_spec(f"{one.owner}.{one.name}") is not None
        return hasattr(owner, one.name) or any(sets(kind, one.name) for kind in getattr(owner, "__mro__", (owner,)))
    except (ImportError, AttributeError):
        return False


def owner_of(one: PrivateName) -> Any:
    """The module or class that has a name."""
    if one.owner.endswith("MulBackward0"):
        return type((torch.ones(1, requires_grad=True) * 2).grad_fn)
    try:
        return importlib.import_module(one.owner)
    except ImportError:
        module, _, name = one.owner.rpartition(".")
        return getattr(owner_of(one._replace(owner=module)), name)


def sets(owner: Any, name: str) -> bool:
    """Whether the code of a class or function declares or sets an attribute of what it makes."""
    try:
        return re.search(rf"^\s+(\w+\.)?{name}\b.*[:=]", inspect.getsource(owner), re.MULTILINE) is not None
    except (OSError, TypeError):  # without Python code
        return False


def test_a_name_that_torch_lacks_is_reported() -> None:
    for owner in ("torch", "torch._C", "torch.nn.Module", "torch._gone", "torch.Gone"):
        assert not has(PrivateName(owner, "_gone", "", ""))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_each_module_has_the_names_that_it_exports(path: Path) -> None:
    module = importlib.import_module(f"tightfit._torch.{path.stem}".removesuffix(".__init__"))
    assert getattr(module, "__all__", []) == sorted(getattr(module, "__all__", []))
    for name in getattr(module, "__all__", []):
        assert hasattr(module, name)


def test_the_names_and_loggers_are_imported_without_torch() -> None:
    code = "import tightfit._torch.names, tightfit._torch.loggers, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
