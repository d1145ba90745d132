"""Options of ours for a program that is written for FSDP2, from a TOML file."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed.fsdp

import fsdp_overlap
from fsdp_overlap import optim

_LAYOUTS = ("Flat", "PerTensor", "TensorAtomic")
_OPTIMIZERS = ("AdamW", "Muon")


@dataclass(frozen=True)
class OursOptions:
    """Options of the run with this library.

    Attributes:
        context: keyword arguments of ``FsdpContext``, among them ``layout`` by its name.
        fully_shard: keyword arguments of ``fully_shard()`` that replace the program's.
        optimizers: names in ``torch.optim`` in whose place ours are put.
    """

    context: dict[str, Any] = field(default_factory=dict)
    fully_shard: dict[str, Any] = field(default_factory=dict)
    optimizers: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Path) -> OursOptions:
        """Read a file with the tables ``context`` and ``fully_shard``, and ``optimizers``.

        Raises:
            ValueError: it is no TOML, or has a key or value that is not known.
        """
        try:
            tables = tomllib.loads(path.read_text(encoding="utf-8"))
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{path}: {error}") from None
        if unknown := tables.keys() - {"context", "fully_shard", "optimizers"}:
            raise ValueError(
                f"{path}: {sorted(unknown)[0]!r} is not known; use context, fully_shard, optimizers"
            )
        context = dict(tables.get("context", {}))
        if (layout := context.get("layout")) is not None:
            if layout not in _LAYOUTS:
                raise ValueError(f"{path}: layout = {layout!r}; use one of {', '.join(_LAYOUTS)}")
            context["layout"] = getattr(fsdp_overlap, layout)()
        optimizers = tuple(tables.get("optimizers", ()))
        for name in optimizers:
            if name not in _OPTIMIZERS:
                raise ValueError(f"{path}: {name!r}; optimizers are {', '.join(_OPTIMIZERS)}")
        return cls(context, dict(tables.get("fully_shard", {})), optimizers)

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Put arguments and optimizers in place, within ``patch_fsdp2()``."""
        with ExitStack() as stack:
            if self.fully_shard:
                ours = torch.distributed.fsdp.fully_shard

                def fully_shard(module: Any, **kwargs: Any) -> Any:
                    return ours(module, **kwargs | self.fully_shard)

                update_wrapper(fully_shard, ours)
                fully_shard.state = ours.state  # type: ignore[attr-defined]
                stack.enter_context(
                    patch.object(torch.distributed.fsdp, "fully_shard", fully_shard)
                )
            for name in self.optimizers:
                replacement = getattr(optim, name)
                if name == "AdamW":
                    replacement = partial(_adamw, replacement)
                stack.enter_context(patch.object(torch.optim, name, replacement))
            yield


def _adamw(of: Any, *args: Any, **kwargs: Any) -> Any:
    """Make our AdamW of the arguments of torch's: it is always fused."""
    for name in ("fused", "foreach", "differentiable"):
        kwargs.pop(name, None)
    return of(*args, **kwargs)
