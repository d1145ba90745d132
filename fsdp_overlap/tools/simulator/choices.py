"""Choices of the search for a plan, and their effect on memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fsdp_overlap.features.rows.layout import PerTensor
from fsdp_overlap.layout import Flat, LayoutRule, TensorAtomic
from fsdp_overlap.tools.simulator.training import CHECKPOINTING, Training

PREFETCH = (0, 1, 2, 3)
BLOCKS_PER_UNIT = (1, 2, 3, 4, 6, 8)
LAYOUTS: tuple[LayoutRule, ...] = (Flat(), PerTensor(), TensorAtomic())
LEANEST_FIRST = tuple(reversed(CHECKPOINTING))


def with_defaults(training: Training) -> Training:
    """Return the same work as the library does it if nothing is chosen."""
    return replace(
        training,
        blocks_per_unit=1,
        prefetch=1,
        implicit_units=False,
        stage=3,
        layout=Flat(),
        reshard_after_forward=None,
        reduce_each=False,
    )


def leanest(training: Training) -> Training:
    """Return the same work in the least memory."""
    return replace(with_defaults(training), prefetch=0, reduce_each=training.microbatches > 1)


def like(plan: Training, work: Training) -> Training:
    """Return ``plan`` with the microbatches and the checkpointing of ``work``."""
    return replace(
        plan,
        micro_batch_size=work.micro_batch_size,
        microbatches=work.microbatches,
        checkpointing=work.checkpointing,
        reduce_each=work.microbatches > 1 and plan.reduce_each,
    )


def works(training: Training) -> list[list[Training]]:
    """Return the ways to do the same step, by how much memory their activations take: for each kind
    of checkpointing, the microbatches that its sequences may be cut into, smallest first."""
    sequences = training.micro_batch_size * training.microbatches
    batches = [size for size in range(1, sequences + 1) if sequences % size == 0]
    return [
        [
            replace(
                training,
                checkpointing=kind,
                micro_batch_size=batch,
                microbatches=sequences // batch,
            )
            for batch in batches
        ]
        for kind in LEANEST_FIRST
    ]


def changes(training: Training, ranks_a_node: int, equal_blocks: int) -> Iterator[list[Training]]:
    """Yield for each choice, the plans that differ from this one in it alone."""
    yield [replace(training, prefetch=each) for each in PREFETCH]
    ranks = training.gpus // training.replicas
    kept: list[tuple[int, int | None]] = [(3, None), (2, None)]
    if 1 < ranks_a_node < ranks and ranks % ranks_a_node == 0:
        kept.insert(1, (3, ranks_a_node))
    yield [replace(training, stage=stage, reshard_after_forward=part) for stage, part in kept]
    most = max(1, equal_blocks // 2)
    yield [replace(training, blocks_per_unit=each) for each in BLOCKS_PER_UNIT if each <= most]
    if training.microbatches > 1:
        yield [replace(training, reduce_each=each) for each in (True, False)]


def needs_no_less(one: Training, other: Training) -> bool:
    """Return whether ``one`` surely takes at least the memory of ``other``."""
    if (one.microbatches > 1) < (other.microbatches > 1):
        return False  # several microbatches take memory for what they add up
    return all(mine >= its for mine, its in zip(_hunger(one), _hunger(other), strict=True))


def _hunger(training: Training) -> tuple[int, ...]:
    """Return numbers that memory grows with, each by itself."""
    keeps_post_forward_shard, keeps_all = (
        training.reshard_after_forward is not None,
        training.stage != 3,
    )
    return (
        training.micro_batch_size,
        LEANEST_FIRST.index(training.checkpointing),
        training.prefetch,
        max(keeps_post_forward_shard, 2 * keeps_all),
        training.blocks_per_unit,
        0 if training.reduce_each or training.microbatches == 1 else 1,
    )


def ways_to_save(training: Training) -> dict[str, Training]:
    """Return what would take less memory, by the options of the command that say it, in the order
    of what they change."""
    at = LEANEST_FIRST.index(training.checkpointing)
    found = {}
    if training.prefetch > 0:
        less = training.prefetch - 1
        found[f"--prefetch {less}"] = replace(training, prefetch=less)
    if training.blocks_per_unit > 1:
        found["--blocks-per-unit 1"] = replace(training, blocks_per_unit=1)
    if training.stage != 3:
        found["--stage 3"] = replace(training, stage=3)
    elif training.reshard_after_forward is not None:
        found["no --reshard-after-forward"] = replace(training, reshard_after_forward=None)
    if training.microbatches > 1 and not training.reduce_each:
        found["--reduce-each"] = replace(training, reduce_each=True)
    for kind in reversed(LEANEST_FIRST[:at]):
        found[f"--checkpointing {kind}"] = replace(training, checkpointing=kind)
    size = training.micro_batch_size
    for smaller in (each for each in range(size - 1, 0, -1) if size % each == 0):
        more = training.microbatches * size // smaller
        text = f"--micro-batch-size {smaller} --microbatches {more} --reduce-each"
        found[text] = replace(
            training, micro_batch_size=smaller, microbatches=more, reduce_each=True
        )
    return found
