"""A plan as code: what to write into a training program to have it. Needs jinja2."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from fsdp_overlap.tools.simulator.training import Training

_OPTIMIZERS = {
    "adamw": "AdamW(model.parameters())",
    "torch-adamw": "torch.optim.AdamW(model.parameters(), fused=True)",
    "muon": "Muon(model)",
}
_TEMPLATE = Path(__file__).parent / "plan.py.jinja"
# What the template says by other names than those of the fields.
_IN_OTHER_WORDS = {"model", "gpus", "replicas", "gather_dtype", "optimizer"}


def code_of(training: Training, compiles: bool = False, expandable_segments: bool = False) -> str:
    """Return a module with two functions: ``shard(model)`` returns an optimizer, and ``train_step``
    makes a step. ``compiles``: whether blocks are compiled; ``expandable_segments``: whether the
    allocator is set to have these.

    Raises:
        ValueError: an option is set that the code does not speak of.
    """
    from jinja2 import Template

    source = _TEMPLATE.read_text()
    said = {*re.findall(r"plan\.(\w+)", source), *_IN_OTHER_WORDS}
    for each in fields(training):
        value = getattr(training, each.name)
        # An eager loss is what is there without code.
        if each.name not in said and value not in (each.default, "eager"):
            raise ValueError(f"{each.name}={value!r}: no code for that")
    replicas, ranks = (
        training.replicas,
        training.gpus // training.replicas // training.tensor_parallel,
    )
    template = Template(source, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    return template.render(
        plan=training,
        compiles=compiles,
        compiles_loss=compiles and training.loss == "standard",
        expandable_segments=expandable_segments,
        optimizer=_OPTIMIZERS[training.optimizer],
        sizes=f"({replicas}, {ranks})" if replicas > 1 else f"({ranks},)",
        names='("replicate", "shard")' if replicas > 1 else '("shard",)',
    )
