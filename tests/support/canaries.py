"""Tests of private names of torch: whether torch has them, and who else uses any."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (the backend)
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_overlap

PACKAGE = Path(fsdp_overlap.__file__).parent
TOOLS = PACKAGE / "tools"
FILE = "torch_internals.py"

Check = Callable[[], None]


class Canaries:
    """The tests of names, each a function whose docstring says what breaks without them."""

    def __init__(self) -> None:
        self.checks: dict[str, Check] = {}

    def of(self, *names: str) -> Callable[[Check], Check]:
        def add(check: Check) -> Check:
            self.checks.update(dict.fromkeys(names, check))
            return check

        return add

    def run(self, name: str) -> None:
        try:
            self.checks[name]()
        except Exception as error:
            what = f"{type(error).__name__}: {error}".split("\n")[0]
            pytest.fail(
                f"torch {torch.__version__} changed {name}. {self.checks[name].__doc__} ({what})",
                pytrace=False,
            )


def names_of(internals: ModuleType) -> set[str]:
    """What a file of private names defines and lists."""
    names = set(internals.ATTRIBUTES)
    assert internals.__file__ is not None
    for node in ast.parse(Path(internals.__file__).read_text()).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names - {"ATTRIBUTES"}


def unused(names: Iterable[str], files: Iterable[Path]) -> list[str]:
    """Those of ``names`` that none of ``files`` uses."""
    used = {name for path in files for name in names_in(ast.parse(path.read_text()))}
    return [name for name in names if name.split(".")[-1] not in used]


def internals_in(files: Sequence[Path], attributes: Mapping[str, str]) -> list[str]:
    """Uses of private names of torch, but for ``attributes``, as ``file:line: name``."""
    trees = {path: ast.parse(path.read_text()) for path in files}
    own = own_names([ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")])
    return [
        f"{path.relative_to(PACKAGE)}:{line}: {name}"
        for path, tree in trees.items()
        for line, name in private_names(tree, own, attributes)
    ]


# ---- What is private ----

# Attributes that neither torch nor a class of ours has.
OTHERS = {
    "_fields",  # of named tuples
    "_asdict",  # of named tuples
    "_fsdp_owner",  # hung by us on parameters
    "_no_split_modules",  # of models of transformers
    "_is_stateful",  # of models of transformers
    "_apply_gate",  # of experts of transformers
    "_is_owned",  # of locks, which threading.Condition asks too
}
LOOKUPS = ("getattr", "setattr", "hasattr", "delattr", "attrgetter", "methodcaller", "object")


def is_private(name: str) -> bool:
    if name == "distributed_c10d":
        return True
    # The family of _foreach_copy_() is documented.
    is_documented = name.startswith("_foreach_") and name != "_foreach_utils"
    return name.startswith("_") and not name.endswith("__") and not is_documented


def own_names(trees: list[ast.Module]) -> set[str]:
    """The private names that classes and modules of ours have."""
    names = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls"):
            names |= {node.attr} if isinstance(node.ctx, ast.Store) else set()
    return names


def dotted(node: ast.expr) -> list[str]:
    """``a.b.c`` as its names; empty if it is anything else."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return [*before, node.attr]
    return []


def imported(tree: ast.Module) -> dict[str, str]:
    """Which module each imported name comes from."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {(a.asname or a.name.split(".")[0]): a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {(a.asname or a.name): f"{node.module}.{a.name}" for a in node.names}
    return found


def private_names(
    tree: ast.Module, own: set[str], attributes: Mapping[str, str]
) -> Iterator[tuple[int, str]]:
    """Private names of torch in a file, and the lines that they are in."""
    known = own | OTHERS | {name.split(".")[1] for name in attributes}
    sources = imported(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            base = getattr(node, "module", None)
            for alias in node.names:
                path = f"{base}.{alias.name}" if base else alias.name
                if path.split(".")[0] == "torch" and any(map(is_private, path.split("."))):
                    yield node.lineno, path
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            path = dotted(node)
            source = sources.get(path[0], "") if path else ""
            top = source.split(".")[0]
            is_listed = ".".join(path[-2:]) in attributes
            is_an_object = not source or top == "fsdp_overlap"
            if (top == "torch" and not is_listed) or (is_an_object and node.attr not in known):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call) and dotted(node.func)[-1:] in [[name] for name in LOOKUPS]:
            for argument in node.args:
                name = argument.value if isinstance(argument, ast.Constant) else None
                if isinstance(name, str) and is_private(name) and name not in known:
                    yield node.lineno, name


def names_in(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, (ast.alias, ast.FunctionDef)):
            yield node.name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


# ---- What canaries look with ----


@contextmanager
def one_rank(backend: str = "fake") -> Iterator[None]:
    """With gloo, what a collective works on must outlive it: a thread of gloo that frees a tensor
    needs Python, which waits here for the thread to end."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def in_a_hook(look: Callable[[torch.Tensor], Any]) -> Any:
    """What ``look`` sees of a leaf in a hook of the backward that comes to it."""
    seen = []
    leaf = torch.ones(1, requires_grad=True)
    output = leaf * 2
    output.register_hook(lambda _: seen.append(look(leaf)))
    (output * 3).sum().backward()
    return seen[0]


class Asked(torch.Tensor):
    """A tensor whose class is asked about calls."""

    calls = 0

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        Asked.calls += 1
        return super().__torch_function__(func, types, args, kwargs)


class Mode(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.is_on_its_own_stack = True

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.calls += 1
        self.is_on_its_own_stack = self in _get_current_function_mode_stack()
        return func(*args, **(kwargs or {}))


def calls_within(context: Any) -> tuple[int, int]:
    """How often a subclass, and a mode around it, see a call within ``context``."""
    tensor, before, mode = torch.ones(1).as_subclass(Asked), Asked.calls, Mode()
    with mode, context:
        torch.sin(tensor)
    return Asked.calls - before, mode.calls


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen.append((func, args))
        return func(*args, **(kwargs or {}))
