"""No op on a sharded tensor returns a wrong value: each is right, or raises on every rank.

Walks torch's own op database with its sample inputs, every form of an op that it lists (function,
method, operator, in place, alias and ``out=``), and every attribute of ``torch.Tensor`` that takes
no arguments. Each call runs on whole tensors and again with some of them sharded; results,
arguments, aliasing and errors must agree.
"""

from __future__ import annotations

import contextlib
import random
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves, tree_map_only

from fsdp_overlap import RaggedDTensor
from fsdp_overlap.tensor.ragged_dtensor import RaggedShard, contiguous_spec
from support.ranks import run_ranks

pytest.importorskip("expecttest")  # torch's op database needs it

FIRST, SECOND = 2, 1  # samples of each op in its first and in a second dtype
MAX_ELEMENTS = 1000

SKIPPED = {
    "__iter__": "iterators are not compared; what they yield is, as that of unbind",
    "__ipow__": "calls itself without an exponent",
    "__annotations__": "of the class",
    "__slotnames__": "of the class, which has it once a tensor was copied",
    "data_ptr": "0, as of every tensor that has no memory itself",
    "_python_dispatch": "of the class",
    "lu": "writes some outputs before it meets the sharded one",
}

UNINITIALISED = frozenset(
    "empty_like new_empty new_empty_strided empty empty_strided empty_permuted".split()
)

ERRORS = (RuntimeError, TypeError, ValueError, IndexError)  # NotImplementedError is one

Bounds = Callable[[int, int], list[int]]


def cut(numel: int, world_size: int) -> list[int]:
    """Equal ranges, cut within rows; with fewer elements than ranks, some are empty."""
    return [numel * rank // world_size for rank in range(world_size + 1)]


def last(numel: int, world_size: int) -> list[int]:
    """All on the last rank."""
    return [0] * world_size + [numel]


LAYOUTS = (cut, last)


def shard(whole: torch.Tensor, mesh: DeviceMesh, bounds: Bounds | None) -> RaggedDTensor | None:
    """``whole`` as a sharded tensor. The only place that knows how one is made."""
    if bounds is None:
        return None
    ends = bounds(whole.numel(), mesh.size())
    pieces = [(rank, ends[rank], ends[rank + 1]) for rank in range(mesh.size())]
    placement = RaggedShard(tuple(piece for piece in pieces if piece[1] < piece[2]))
    start, stop = placement.local_range(mesh.get_local_rank())
    spec = contiguous_spec(mesh, (placement,), whole.shape, whole.dtype)
    return RaggedDTensor.wrap(whole.reshape(-1)[start:stop].clone(), spec)


@dataclass
class Call:
    """One form of an op with one sample, whose tensors are whole."""

    number: int
    op: str
    label: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self, tree: Any) -> Any:
        """The result or the error."""
        args, kwargs = tree
        seed()
        try:
            return self.func(*args, **kwargs)
        except Exception as error:
            return error


def seed() -> None:
    # torch.manual_seed would note the stack for every CUDA device to come, which takes longer than
    # most of the ops.
    torch.default_generator.manual_seed(0)
    random.seed(0)


FOREACH = ("unary", "binary", "pointwise", "reduce", "other")


def calls(part: int, parts: int) -> Iterator[Call]:
    from torch.testing._internal import common_methods_invocations as database

    lists = [getattr(database, f"foreach_{kind}_op_db") for kind in FOREACH]
    ops = [op for ops in [database.op_db, *lists] for op in ops if op.name not in SKIPPED]
    for op in ops[part::parts]:
        for number, (label, args, kwargs) in enumerate(samples(op)):
            for form, func in forms(op).items():
                yield Call(number, op.name, f"{form} {label}", func, args, kwargs)
            if getattr(op, "supports_out", False):
                result = Call(0, "", "", op.op, args, kwargs).run(fresh((args, kwargs)))
                if not isinstance(result, Exception):
                    out = {"out": tree_map_only(torch.Tensor, torch.zeros_like, result)}
                    yield Call(number, op.name, f"out= {label}", op.op, args, kwargs | out)
    # What every object has is about the object.
    names = [
        name for name in dir(torch.Tensor) if name not in SKIPPED and not hasattr(object, name)
    ]
    for name in names[part::parts]:
        seed()
        for number, tensor in enumerate((torch.randn(5, 3), torch.ones(1), torch.arange(9))):
            yield Call(number, name, "as an attribute", attribute(name), (tensor,), {})


def samples(op: Any) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    supported = op.supported_dtypes("cpu")
    usual = [d for d in (torch.float32, torch.int64, torch.complex64) if d in supported]
    for dtype, count in zip(usual, (FIRST, SECOND), strict=False):
        seed()
        numpy.random.seed(0)
        # op.sample_inputs() would search the stack for a unittest and seed every device for each of
        # them, which takes longer than all the rest.
        found = list(islice(op.sample_inputs_func(op, "cpu", dtype, False), 40))
        for index in range(0, len(found), -(-len(found) // count)):
            args, kwargs = (found[index].input, *found[index].args), found[index].kwargs
            if op.name.startswith("_foreach"):  # lists of twenty tensors and more
                args = tuple(arg[:3] if isinstance(arg, (list, tuple)) else arg for arg in args)
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if is_strided(leaf)]
            if tensors and all(tensor.numel() <= MAX_ELEMENTS for tensor in tensors):
                yield f"#{index} {dtype}", args, kwargs


FORMS = ("op", "method_variant", "inplace_variant", "operator_variant", "inplace_operator_variant")


def forms(op: Any) -> dict[str, Callable[..., Any]]:
    """Every callable that is the op or an alias of it, each once."""
    found: dict[Callable[..., Any], str] = {}
    for alias in [op, *getattr(op, "aliases", ())]:
        for form in FORMS:
            if (func := getattr(alias, form, None)) is not None:
                found.setdefault(func, f"{alias.name} {form}")
    return {form: func for func, form in found.items()}


def attribute(name: str) -> Callable[[Any], Any]:
    def read(tensor: Any) -> Any:
        value = getattr(tensor, name)
        return value() if callable(value) else value

    return read


def is_strided(value: Any) -> bool:
    return type(value) is torch.Tensor and value.layout is torch.strided


def fresh(tree: Any, shard: Callable[[torch.Tensor], Any] = lambda whole: None) -> Any:
    """A copy of ``tree``, in which what was one tensor still is. ``shard`` may replace tensors."""
    made: dict[int, Any] = {}

    def copy(value: torch.Tensor) -> Any:
        if id(value) not in made:
            contiguous = {"memory_format": torch.contiguous_format} if is_strided(value) else {}
            replaced = shard(value)
            made[id(value)] = value.clone(**contiguous) if replaced is None else replaced
        return made[id(value)]

    return tree_map_only(torch.Tensor, copy, tree)


def substitutions(call: Call) -> Iterator[dict[int, Bounds]]:
    """Which tensors to shard, and how, by their place among the leaves of the arguments."""
    leaves = tree_leaves((call.args, call.kwargs))
    places = [place for place, leaf in enumerate(leaves) if is_strided(leaf)]
    alike = [place for place in places if leaves[place].shape == leaves[places[0]].shape]
    chosen = [places[:1], places[1:2], places[-1:], alike, places]
    for n, some in enumerate(chosen):
        if some and some not in chosen[:n]:
            yield dict.fromkeys(some, LAYOUTS[(n + call.number) % 2])
    yield dict.fromkeys(places[:1], LAYOUTS[(call.number + 1) % 2])
    if len(alike) > 1:
        yield {place: LAYOUTS[n % 2] for n, place in enumerate(alike)}


def check(call: Call, mesh: DeviceMesh, group: dist.ProcessGroup) -> tuple[set[str], list[str]]:
    """How the call ended with each substitution, and what was wrong with that."""
    whole = (call.args, call.kwargs)
    if isinstance(call.run(fresh(whole)), Exception):
        return set(), []
    leaves = tree_leaves(whole)
    attempts = []
    for swap in substitutions(call):
        bounds = {id(leaves[place]): bounds for place, bounds in swap.items()}
        given = fresh(whole, lambda x, bounds=bounds: shard(x, mesh, bounds.get(id(x))))
        result = call.run(given)
        if isinstance(result, RuntimeError) and "gloo" in str(result):
            raise result  # a collective that not every rank has joined
        attempts.append((swap, given, result))
    endings = [describe(result) for _, _, result in attempts]
    if not agree(endings, group):
        everyones = [None] * group.size()
        dist.all_gather_object(everyones, endings, group)
        return set(), [f"ranks ended differently: {everyones}"]
    ended, wrong = set(), []
    for swap, given, result in attempts:
        if isinstance(result, Exception):
            problem = "" if isinstance(result, ERRORS) else f"raised {result!r}"
            problem = problem or changed(given, whole)
        else:
            problem = wrong_value(call, given, result)
        if problem:
            how = {place: bounds.__name__ for place, bounds in swap.items()}
            wrong.append(f"{how}: {problem}")
        else:
            ended.add("refused" if isinstance(result, Exception) else "right")
    return ended, wrong


def lost_gradients(call: Call, mesh: DeviceMesh) -> list[str]:
    """What is wrong with how the results of a call stand in autograd's graph. None may lead to a
    sharded tensor without a word."""
    leaves = tree_leaves((call.args, call.kwargs))
    if "out=" in call.label or not any(map(is_trainable, leaves)):
        return []
    swap = {id(leaves[place]): bounds for place, bounds in next(substitutions(call)).items()}

    def trainable(tree: Any) -> Any:
        return tree_map_only(
            torch.Tensor, lambda x: x.requires_grad_() if is_trainable(x) else x, tree
        )

    whole = trainable(fresh((call.args, call.kwargs)))
    wanted = call.run(whole)
    given = trainable(fresh((call.args, call.kwargs), lambda x: shard(x, mesh, swap.get(id(x)))))
    got = call.run(given)
    if isinstance(got, Exception) or isinstance(wanted, Exception):
        edited = isinstance(wanted, Exception) and not isinstance(got, Exception)
        is_leaf_edit = edited and "a leaf Variable that requires grad" in str(wanted)
        return ["edited a leaf"] if is_leaf_edit else []
    problems = []
    for value, want in zip(tree_leaves(got), tree_leaves(wanted), strict=True):
        if not isinstance(want, torch.Tensor) or any(value is x for x in tree_leaves(given)):
            continue
        if value.requires_grad != want.requires_grad:
            problems.append(f"requires_grad is {value.requires_grad}")
        elif value.requires_grad and not isinstance(value, RaggedDTensor):
            backward = Call(0, "", "", value.backward, (), {})
            ending = str(backward.run(((torch.ones_like(value), True), {})))
            if "gradients do not flow" in ending:
                continue
            try:
                want.backward(torch.ones_like(want), True)  # of a plain tensor in a list alone
            except RuntimeError as error:
                if "is not implemented" not in str(error):
                    raise
                continue  # by torch 2.11, of aminmax
            pairs = zip(tree_leaves(given), tree_leaves(whole), strict=True)
            if any(isinstance(x, RaggedDTensor) and y.grad is not None for x, y in pairs):
                problems.append(f"backward ended with {ending}")
    return problems


def is_trainable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def wrong_value(call: Call, given: Any, result: Any) -> str:
    """What is wrong with the arguments and the result of a call. Collective."""
    plain = fresh((call.args, call.kwargs))
    wanted, got = tree_leaves(call.run(plain)), tree_leaves(result)
    if len(wanted) != len(got):
        return f"{len(got)} results instead of {len(wanted)}"
    if not all(map(is_sound, got)):
        return "holds another range than its placement says"
    # All collectives first: below, a rank may find something that another does not.
    values = [x.full_tensor() if isinstance(x, RaggedDTensor) else x for x in got]
    pairs = list(zip(tree_leaves(plain), tree_leaves(given), strict=True))
    for x, value, want in zip(got, values, wanted, strict=True):
        if not isinstance(want, torch.Tensor):
            if type(value) is not type(want) or value != want:
                return f"{value!r} instead of {want!r}"
        elif not isinstance(value, torch.Tensor):
            return f"{value!r} instead of a tensor"
        elif (x.dtype, x.shape) != (want.dtype, want.shape):
            return f"{x.dtype} {x.shape} instead of {want.dtype} {want.shape}"
        elif call.op not in UNINITIALISED and (problem := different(value, want)):
            return problem
        elif any(want is whole and x is not other for whole, other in pairs):
            return "a new tensor instead of the argument"
    if problem := changed(given, plain):
        return problem
    # An edit of the result must edit the arguments that share its memory, and no others.
    for x, want in zip(got, wanted, strict=True):
        if isinstance(want, torch.Tensor):
            with contextlib.suppress(RuntimeError):  # expanded: elements share memory
                want.fill_(7)
                (x.to_local() if isinstance(x, RaggedDTensor) else x).fill_(7)
    problem = changed(given, plain)
    return problem and f"after an edit of the result, {problem}"


def describe(result: Any) -> str:
    """What all ranks must agree on before anyone gathers a result."""
    if isinstance(result, Exception):
        return type(result).__name__
    return " ".join(
        type(leaf).__name__ if is_sound(leaf) else "unsound" for leaf in tree_leaves(result)
    )


def is_sound(value: Any) -> bool:
    """Whether what this rank holds is what the placement says."""
    if not isinstance(value, RaggedDTensor):
        return True
    start, stop = value.local_range
    local = value.to_local()
    return (local.dtype, local.shape) == (value.dtype, (stop - start,))


def agree(endings: list[str], group: dist.ProcessGroup) -> bool:
    mine = torch.tensor([zlib.crc32(repr(endings).encode())])
    everyones = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everyones, mine, group)
    return all(torch.equal(mine, other) for other in everyones)


def different(value: torch.Tensor, wanted: torch.Tensor) -> str:
    try:
        assert_close(value, wanted, equal_nan=True)
    except AssertionError as error:
        return str(error)
    return ""


def changed(given: Any, wanted: Any) -> str:
    """What differs between arguments as they are and as they should be, without collectives."""
    for n, (value, want) in enumerate(zip(tree_leaves(given), tree_leaves(wanted), strict=True)):
        if not isinstance(want, torch.Tensor):
            continue
        if value.shape != want.shape or value.dtype != want.dtype:
            return f"argument {n} became {value.dtype} {value.shape}"
        if isinstance(value, RaggedDTensor):
            start, stop = value.local_range
            value, want = value.to_local(), want.reshape(-1)[start:stop]
        if not (is_strided(value) and is_strided(want) and torch.equal(value, want)) and (
            problem := different(value, want)
        ):
            return f"argument {n}: {problem}"
    return ""


def walk(part: int, parts: int) -> tuple[set[str], set[str], list[str]]:
    """The ops that were right at least once, those refused, and what was wrong."""
    # Apart from the mesh's, so that a rank alone in a collective waits, and the others say where.
    group = dist.new_group(timeout=timedelta(seconds=30))
    own = dist.new_group(timeout=timedelta(seconds=30))
    mesh = DeviceMesh.from_group(own, "cpu")
    ended: dict[str, set[str]] = {"right": set(), "refused": set()}
    wrong: list[str] = []
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in calls(part, parts):
            try:
                endings, problems = check(call, mesh, group)
            except Exception as error:
                raise RuntimeError(f"in {call.op}: {call.label}") from error
            for ending in endings:
                ended[ending].add(call.op)
            if call.number == 0 and "right" in endings:
                with torch.enable_grad():
                    problems += lost_gradients(call, mesh)
            wrong.extend(f"{call.op}: {call.label} {problem}" for problem in problems)
    return ended["right"], ended["refused"], wrong


# In parts, so that each test stays short. A third rank is no new case for most ops.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "part", "parts"), [(2, 0, 3), (2, 1, 3), (2, 2, 3), (3, 0, 12)]
)
def test_every_op_is_right_or_refused(world_size: int, part: int, parts: int) -> None:
    right, refused, wrong = run_ranks(walk, world_size, part, parts, timeout=250)[0]
    assert not wrong, "\n".join(wrong)
    # So that the walk cannot become an empty one.
    assert len(right) > 120 / parts
    assert len(refused) > 450 / parts
