"""The names of ranges in a trace: this library's, which `comm/comm_streams.py` writes, and
FSDP2's."""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Kind = Literal["all_gather", "reduce_scatter", "other"]
Pass = Literal["forward", "backward"]
Role = Literal["issue", "wait", "begin forward", "end forward", "begin backward", "end backward"]

CHECK = "order_check"
CONFIRMATION = "confirmation of "
"""Begins the name of a confirmation; the unit that it is for follows."""
OWN_ENGINE = "fsdp_overlap"
PREFIXES = ("fsdp_overlap::", "FSDP::")
END_OF_BACKWARD = "root_post_backward_callback"
"""Encloses, as FSDP2 names it, what an engine does when autograd has run a backward."""
OPTIMIZER_STEP = "Optimizer.step#"
PROFILER_STEP = "ProfilerStep#"
# FSDP2's marks do not name the root.
ROOT = "(root)"

_NAME = re.compile(r"(fsdp_overlap|FSDP)::(wait_)?(\w+)(?: ?\((.*)\))?(?: (\d+) B)?")
_ROLES: dict[str, Role] = {
    "pre_forward": "begin forward",
    "post_forward": "end forward",
    "pre_backward": "begin backward",
    "post_backward": "end backward",
    "post_backward_reshard": "end backward",
}
_KINDS: dict[str, Kind] = {
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "post_backward_reduce": "reduce_scatter",
}


@dataclass(frozen=True, slots=True)
class EngineMark:
    """What a range's name says.

    role: "issue" and "wait" enclose what an engine does for a collective; the others stand before
    and after a unit's part of a pass.
    engine: "fsdp_overlap" or "FSDP". operation: the collective, as the engine calls it.
    nbytes: what travels to or from this rank; None if the name does not say.
    """

    engine: str
    role: Role
    unit: str
    kind: Kind = "other"
    operation: str = ""
    nbytes: int | None = None


@lru_cache(maxsize=1 << 16)
def read_mark(name: str) -> EngineMark | None:
    """Return the mark that a range's name stands for; None if it is not a mark."""
    if (match := _NAME.fullmatch(name)) is None:
        return None
    engine, wait, operation, unit, nbytes = match.groups()
    unit = ROOT if unit is None else unit
    if role := _ROLES.get(operation):
        return EngineMark(engine, role, unit)
    if operation == END_OF_BACKWARD or (engine == "FSDP" and operation not in _KINDS):
        return None
    kind = _KINDS.get(operation, "other")
    size = None if nbytes is None else int(nbytes)
    return EngineMark(engine, "wait" if wait else "issue", unit, kind, operation, size)
