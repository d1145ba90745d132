"""Does what was decided: memory, collectives and compute that waits for them, unit by unit."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

from fsdp_overlap.comm.lanes import Lane, Mark, Ticket
from fsdp_overlap.comm.spans import span
from fsdp_overlap.engine.bucket_state import BucketState
from fsdp_overlap.engine.copies_reduction import CopiesReduction
from fsdp_overlap.engine.domain import Domain
from fsdp_overlap.engine.gathering import gather, gathers_of
from fsdp_overlap.engine.gradients import BucketGradients
from fsdp_overlap.engine.unit import Unit
from fsdp_overlap.schedule.stats import Stats
from fsdp_overlap.torch_internals import profiler_enabled

# If the host runs ahead: how many reductions across copies may be under way, beside those of reduce
# inputs that still travel.
MAX_SUMS = 2


class Transfers:
    """Owns the lanes of one context and does on them what its schedule decides.

    It counts in ``stats``, and notes for the other ranks what it issues. ``make_lane`` makes the
    lane of a name. ``domains`` and ``units`` list those of the context.
    """

    def __init__(
        self,
        make_lane: Callable[[str], Lane],
        stats: Stats,
        domains: Callable[[], Sequence[Domain]],
        units: Callable[[], Sequence[Unit]],
    ) -> None:
        self._make_lane = make_lane
        self._stats = stats
        self._domains = domains
        self._units = units
        self._use_lanes(make_lane("all_gather"), make_lane("reduce_scatter"))
        self._copies_lane: Lane | None = None
        self._across: deque[CopiesReduction] = deque()
        """The buckets' reductions across copies that are under way, oldest first."""

    @property
    def copies_lane(self) -> Lane:
        """The lane of what travels between ranks with copies, on a mesh ``(replicate, shard)``."""
        if self._copies_lane is None:
            self._copies_lane = self._make_lane("all_reduce")
        return self._copies_lane

    @property
    def lanes(self) -> list[Lane]:
        """The lanes that were made."""
        lanes = [self.gather_lane, self.reduce_lane]
        return lanes if self._copies_lane is None else [*lanes, self._copies_lane]

    def use_lanes_of(self, other: Transfers) -> None:
        """Communicates on the lanes of ``other``."""
        self._use_lanes(other.gather_lane, other.reduce_lane)
        self._copies_lane = other.copies_lane

    def _use_lanes(self, gather: Lane, reduce: Lane) -> None:
        self.gather_lane = gather
        self.reduce_lane = reduce
        self.after_compute = gather.after_compute
        self.after_event = gather.after_event
        self.mark_compute = gather.mark_compute

    is_profiled = staticmethod(profiler_enabled)

    def span(self, kind: str, name: str) -> AbstractContextManager[Any]:
        return span(kind, name)

    # Full buffers

    def gather(self, unit: Unit) -> None:
        stats = self._stats
        for label, buckets in unit.as_one or gathers_of(unit):
            for bucket in buckets:
                bucket.domain.note_gather(bucket)
                stats.all_gather_bytes += bucket.gathered_nbytes
                if not bucket.full.allocated:
                    stats.count_full_buffer()
                if bucket.divided is not None:
                    bucket.divided.gather(self.copies_lane)
            stats.all_gathers += 1
            gather(buckets, self.gather_lane, label)

    def put_together(self, unit: Unit) -> None:
        for bucket in unit.buckets:
            if bucket.divided is not None:
                bucket.divided.gather(self.copies_lane)

    def finish_putting_together(self, raised: bool) -> None:
        for unit in self._units():
            for bucket in unit.buckets:
                if bucket.divided is not None:
                    with suppress(RuntimeError) if raised else nullcontext():
                        bucket.divided.wait()

    def wait(self, unit: Unit) -> None:
        for bucket in unit.buckets:
            bucket.wait()

    def free(self, unit: Unit, after: Mark, waits: bool = True) -> None:
        for bucket in unit.buckets:
            if bucket.state is not BucketState.SHARDED:
                if not bucket.full.keeps_storage:
                    self._stats.current_full_buffers -= 1
                bucket.free(self.gather_lane, after, waits)

    def drop_parts(self, unit: Unit) -> None:
        for bucket in unit.buckets:
            bucket.drop_part()

    def forbid_old_graphs(self, unit: Unit) -> None:
        # Graphs of modules that ran gather again.
        inner = (m for each in unit.modules if id(each) in unit.left_out for m in each.modules())
        tables = {id(module._parameters) for module in inner}
        for edits in unit.edits:
            edits.forbid_old_graphs(tables)

    def use_unsharded(self, unit: Unit) -> None:
        for bucket in unit.buckets:
            bucket.places.use_unsharded(bucket.label)

    def use_sharded(self, unit: Unit) -> None:
        unit.shows_unsharded = False
        for bucket in unit.buckets:
            bucket.places.use_sharded()

    def hook_gradients(self, unit: Unit) -> None:
        unit.hook_gradients()

    def keep_storage(self, unit: Unit, keep: bool) -> None:
        """Says whether full buffers of ``unit`` keep their memory while it is sharded."""
        for bucket in unit.buckets:
            bucket.full.keeps_storage = keep
            if not keep and bucket.full.allocated and not bucket.is_gathered:
                self._stats.current_full_buffers -= 1
                self.gather_lane.free(bucket.label, bucket.full, self.gather_lane.mark_compute())

    # Gradients

    def allocate_input(self, gradients: BucketGradients) -> None:
        self._stats.count_reduce_input()
        gradients.input.allocate()

    def absorb(self, gradients: BucketGradients, index: int) -> None:
        gradients.absorb([index])

    def absorb_all(self, gradients: BucketGradients) -> None:
        gradients.absorb_all()

    def reduce(self, gradients: BucketGradients) -> Ticket:
        if self._across:
            self._bound_sums()
        self._stats.reduce_scatters += 1
        self._stats.reduce_scatter_bytes += gradients.reduced_nbytes
        bucket, across = gradients.bucket, gradients.goes_across
        bucket.domain.note_reduction(bucket, gradients.input.flat.dtype, across)
        return gradients.reduce(self.reduce_lane, self.copies_lane if across else None)

    def finish(self, gradients: BucketGradients, ticket: Ticket) -> None:
        ticket.wait()
        if gradients.copies is not None:
            self._across.append(gradients.copies)
            while self._across and self._across[0].is_done():
                self._across.popleft().finish()  # lets go of what was sent
        self._stats.current_reduce_inputs -= 1
        gradients.input.free()

    def finish_sums(self) -> None:
        for copies in self._across:
            copies.finish()
        self._across.clear()

    def abandon(self, reductions: Iterable[tuple[BucketGradients, Ticket]]) -> None:
        for gradients, ticket in reductions:
            with suppress(RuntimeError):  # a collective failed
                if gradients.copies is None:
                    ticket.abandon()
                ticket.wait()  # what the lane reads is about to be freed
            if gradients.copies is not None:
                # The reduction across copies is under way too, or began with the wait above, as it
                # may have on another rank.
                self._across.append(gradients.copies)
        for copies in self._across:
            copies.abandon()
        self._across.clear()

    def finish_backward(self) -> None:
        agreed = {}
        failure: RuntimeError | None = None
        # Small meshes first: a failure there is an error on all ranks of the meshes that follow,
        # also on ranks that would otherwise wait for those that failed.
        for domain in sorted(self._domains(), key=lambda domain: domain.mesh.size()):
            if domain.has_reduced:
                is_checked = domain.groups.of_all and not self.reduce_lane.is_captured
                self._stats.order_checks += bool(is_checked)
                try:
                    agreed[domain] = domain.agree(self.reduce_lane, failed=failure is not None)
                except RuntimeError as error:
                    failure = failure or error
            domain.finish_reading()
        if failure is not None:
            raise failure
        if not agreed:
            return
        for unit in self._units():
            for gradients in unit.gradients:
                if gradients.landing:
                    gradients.land()
                if gradients.doubtful:
                    gradients.settle_doubts(agreed[gradients.bucket.domain])

    def finish_reading(self) -> None:
        """Blocks the host until offloaded shards may be edited."""
        for domain in self._domains():
            domain.finish_reading()

    def wait_for_lanes(self) -> None:
        """Makes compute wait for all that lanes still read and write. After an error nobody else
        waits for it."""
        for lane in self._lanes():
            lane.before_compute()

    def let_lanes_wait(self) -> None:
        """Makes all lanes wait for the compute enqueued so far."""
        for lane in self._lanes():
            lane.after_compute()

    def note_replay(self) -> None:
        """Makes all lanes wait for the graph that was just enqueued, and counts it."""
        for lane in self._lanes():
            lane.after_replay()

    def begin_capture(self) -> None:
        """Takes all lanes into the capture of a graph that compute is in. Their memory then comes
        from the graph's pool."""
        self.let_lanes_wait()
        for lane in self._lanes():
            lane.set_captured(True)

    def end_capture(self) -> None:
        """Takes all lanes out of the capture, which waits for all that was enqueued there."""
        for lane in self._lanes():
            lane.set_captured(False)
        self.wait_for_lanes()

    def _lanes(self) -> list[Lane]:
        lanes = self.gather_lane, self.reduce_lane, self._copies_lane
        return [lane for lane in lanes if lane is not None]

    def rest(self) -> None:
        """Brings every unit to rest, from any state. The schedule must have dropped everything."""
        for unit in self._units():
            unit.reset(self.gather_lane)
        self._stats.current_full_buffers = sum(
            bucket.full.allocated for unit in self._units() for bucket in unit.buckets
        )
        self._stats.current_reduce_inputs = 0

    def _bound_sums(self) -> None:
        """Limits the reductions across copies that are under way, before one more is issued. A host
        that runs ahead may see none of them end. What each of them reads would then be kept until
        the end of backward."""
        while self.reduce_lane.runs_ahead and len(self._across) > MAX_SUMS:
            self._across.popleft().finish_before(self.reduce_lane)
