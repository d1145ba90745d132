"""The layouts: where a parameter may be cut."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

from fsdp_overlap.layout.plan import Layout, LayoutRule, ParamSpec


@dataclass(frozen=True)
class BlockAtomic(Layout):
    """Parameters are cut only at multiples of ``rows`` of their first dimension. A parameter's last
    block may be short. For states and kernels with a scale for each block; ``BlockAtomic(rows=1)``
    is row sharding.

    Raises:
        ValueError: ``rows`` is not positive.
    """

    rows: int

    def __post_init__(self) -> None:
        if type(self.rows) is not int or self.rows < 1:
            raise ValueError(f"BlockAtomic(rows={self.rows!r}): rows must be an int of at least 1")

    def block_size(self, spec: ParamSpec) -> int:
        return max(1, self.rows * prod(spec.shape[1:]))


@dataclass(frozen=True)
class TensorAtomic(Layout):
    """No matrix is cut: each has one owner. For optimizers of matrices, such as Muon.

    Three kinds of parameters are cut anywhere: those of less than two dimensions, embeddings, and
    those whose name matches one of ``split`` (shell patterns, such as ``"output.weight"`` or
    ``"*.bias"``). A parameter of more than two dimensions is a stack of matrices, and is cut
    between them.

    Owners are balanced over all units that are planned together, by bytes and by the cost of
    Newton-Schulz iterations, ``max(m, n) * min(m, n) ** 2`` for a matrix ``[m, n]``.

    Shards are ragged: each as large as what its rank owns. With ``max_padding`` they are equal in
    every param group where that takes at most so much padding, as a fraction of the param group;
    ``math.inf`` makes them equal everywhere. Equal shards travel by plain all-gathers and
    reduce-scatters, and padding travels and takes memory as parameters do.

    Raises:
        TypeError: ``split`` is not a tuple of strings.
        ValueError: ``max_padding`` is no number of at least 0.
    """

    split: tuple[str, ...] = ()
    max_padding: float = 0.0

    def __post_init__(self) -> None:
        if type(self.max_padding) not in (int, float) or not self.max_padding >= 0:
            raise ValueError(
                f"TensorAtomic(max_padding={self.max_padding!r}): max_padding must be a fraction "
                "of at least 0, such as 0.25; math.inf makes shards equal at any cost"
            )
        if type(self.split) is not tuple or any(type(pattern) is not str for pattern in self.split):
            raise TypeError(
                f"TensorAtomic(split={self.split!r}): split must be a tuple of names or patterns"
            )

    def block_size(self, spec: ParamSpec) -> int:
        return max(1, prod(spec.shape[-2:])) if self._has_matrices(spec) else 1

    def work(self, spec: ParamSpec) -> int:
        if not self._has_matrices(spec):
            return 0
        m, n = spec.shape[-2:]
        return prod(spec.shape[:-2]) * max(m, n) * min(m, n) ** 2

    def _has_matrices(self, spec: ParamSpec) -> bool:
        return (
            len(spec.shape) >= 2
            and not spec.is_embedding
            and not any(fnmatchcase(spec.fqn, pattern) for pattern in self.split)
        )


def layout_for(rule: LayoutRule, spec: ParamSpec) -> Layout:
    """Return the layout that ``rule`` gives a parameter.

    Raises:
        TypeError: ``rule`` gives something that is no layout.
    """
    layout = rule(spec.fqn, spec) if callable(rule) else rule
    if not hasattr(layout, "block_size"):
        raise TypeError(
            f"the layout of parameter {spec.fqn!r} is {layout!r}; use Flat(), PerTensor(), "
            "BlockAtomic(rows=...) or TensorAtomic()"
        )
    return layout
