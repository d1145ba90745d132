"""Operations of random programs: what raises, and what follows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from support.fuzz_run import Run
from support.fuzz_states import Edit
from support.fuzz_training import Backward, Evaluate, Operation
from support.twins import impatient, loss_of
from support.zoo import ROWS

UNFINISHED = "last backward did not finish"
EDITED = "were modified between its forward"
REFUSED = "Fail, and the next call says so"
SEEN = {"Fail in forward", "Fail in backward", REFUSED}
"""What a run notes beside the names of operations."""


class PlannedError(Exception):
    pass


def _fail(*_: Any) -> None:
    raise PlannedError


def _fail_in_backward(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    if output.requires_grad:
        output.register_hook(_fail)


def _fail_when_recomputed(*_: Any) -> None:
    if torch._C._current_graph_task_id() != -1:
        raise PlannedError


PLACES = {
    "before hooks": lambda m: m.register_forward_pre_hook(_fail, prepend=True),
    "pre-hook": lambda m: m.register_forward_pre_hook(_fail),
    "hook": lambda m: m.register_forward_hook(_fail),
    "first hook": lambda m: m.register_forward_hook(_fail, prepend=True),
    "backward": lambda m: m.register_forward_hook(_fail_in_backward),
    "backward, first": lambda m: m.register_forward_hook(_fail_in_backward, prepend=True),
    "backward hook": lambda m: m.register_full_backward_hook(_fail),
    "recomputed": lambda m: m.register_forward_pre_hook(_fail_when_recomputed),
}
"""Where a module raises; and ``"forward"``, in its own forward."""


@contextlib.contextmanager
def failing(module: nn.Module, where: str) -> Iterator[None]:
    if where == "forward":
        module.__dict__["forward"] = _fail
        try:
            yield
        finally:
            del module.__dict__["forward"]
        return
    handle = PLACES[where](module)
    try:
        yield
    finally:
        handle.remove()


@dataclass(frozen=True)
class Reset(Operation):
    """At any time."""

    def run(self, run: Run) -> bool:
        run.ctx.reset()
        run.forget()
        return True


@dataclass(frozen=True)
class Fail(Operation):
    """A microbatch or an evaluation in which a module raises, in the same place on every rank, if
    it gets there. ``then``: what follows at once where backward raised; without a ``"reset"`` it
    must say what happened."""

    module: int
    where: str
    evaluates: bool
    then: str

    def run(self, run: Run) -> bool:
        modules = list(run.model.modules())
        index = self.module % len(modules)
        twin_module = list(run.twin.modules())[index]
        tokens, targets = next(run.data)
        rows = range(0, len(tokens), ROWS)

        def twin_loss() -> Any:
            return sum(
                loss_of(run.twin(tokens[i : i + ROWS]), targets[i : i + ROWS]) for i in rows
            ) / len(rows)

        def loss() -> Any:
            return loss_of(run.model(run.mine(tokens)), run.mine(targets))

        with torch.set_grad_enabled(not self.evaluates):
            with failing(twin_module, self.where):
                twin_failed, gradients = attempt(twin_loss, run.gradients_of)
            with failing(modules[index], self.where):
                failed, _ = attempt(loss, torch.Tensor.backward)
        assert failed == twin_failed
        if failed is not None:
            run.seen[f"Fail in {failed}"] += 1
        if failed == "backward":
            self.recover(run)
            run.zero_grad()
        elif failed == "forward":
            # Of the root's own hooks, ours have run before: all is as after a forward.
            ended = not index and self.where in ("hook", "first hook") and not self.evaluates
            run.at_rest = run.at_rest and not run.keeps and not ended
        else:
            if gradients is not None:
                if all(told.completes for told in run.told.values()):
                    run.by_hand = False
                run.add(gradients)
            awaits = not self.evaluates and gradients is None
            run.at_rest = not (run.open or run.keeps or run.by_hand or awaits)
        return failed is not None

    def recover(self, run: Run) -> None:
        refused = None
        try:
            if self.then == "forward":
                run.forward()
            elif self.then == "evaluation":
                Evaluate("no_grad").run(run)
            elif self.then == "backward" and run.open:
                Backward(newest=True, retain=False).run(run)
        except RuntimeError as error:
            refused = str(error)
        # Where no unit's backward had begun, nothing is unfinished, and all was right.
        assert refused is None or UNFINISHED in refused
        run.seen[REFUSED] += refused is not None
        run.ctx.reset()
        run.forget()


def attempt(loss: Callable[[], Any], backward: Callable[[Any], Any]) -> tuple[str | None, Any]:
    """Return where it raised, and what backward returned."""
    try:
        found = loss()
    except PlannedError:
        return "forward", None
    if not found.requires_grad:
        return None, None
    try:
        return None, backward(found)
    except PlannedError:
        return "backward", None


@dataclass(frozen=True)
class EditTooSoon(Operation):
    """Weights are edited between forward and backward, which must say so."""

    def run(self, run: Run) -> bool:
        loss, _ = run.forward()
        if not loss.requires_grad:
            return False
        Edit(0, "mul_").run(run)
        with pytest.raises(RuntimeError, match=EDITED):
            loss.backward()
        run.ctx.reset()
        run.forget()
        run.zero_grad()
        return True


@dataclass(frozen=True)
class FailAlone(Operation):
    """A microbatch in which a module raises on one rank, whose error ends what others wait for."""

    module: int
    where: str
    rank: int

    def run(self, run: Run) -> bool:
        modules = list(run.model.modules())
        fails = run.rank == self.rank % run.world
        place = failing(modules[self.module % len(modules)], self.where)
        differ(run, place if fails else contextlib.nullcontext(), 2)
        return run.world > 1


@dataclass(frozen=True)
class Stray(Operation):
    """One rank runs another number of microbatches than the others. ``evaluates``: or
    evaluations."""

    rank: int
    microbatches: int
    evaluates: bool

    def run(self, run: Run) -> bool:
        strays = run.rank == self.rank % run.world
        with torch.set_grad_enabled(not (strays and self.evaluates)):
            differ(run, contextlib.nullcontext(), self.microbatches if strays else 1)
        return run.world > 1


def differ(run: Run, place: contextlib.AbstractContextManager[None], microbatches: int) -> None:
    """Run so many in ``place``, which are not the same on every rank. Whatever comes of it, all
    reset, and go on."""
    tokens, targets = next(run.data)
    with impatient(), contextlib.suppress(PlannedError, RuntimeError), place:
        for _ in range(microbatches):
            loss = loss_of(run.model(run.mine(tokens)), run.mine(targets))
            if loss.requires_grad:
                loss.backward()
    run.ctx.reset()
    run.open.clear()
    run.forget()
    run.zero_grad()
