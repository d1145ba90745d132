"""Which rank is slow: the rule for traces and for jobs that run. Times are in any unit."""

from collections.abc import Sequence

# How much longer than the others a rank works by itself before it is called slow, as a part of a
# step.
SLOW = 0.1


def lags(own: Sequence[float]) -> list[float]:
    """How much longer each rank works by itself than the median of the others, by the time that
    each works by itself: in which it does not wait for communication. 0 for one rank."""
    ordered = sorted(own)
    if len(own) < 2:
        return [0.0] * len(own)
    return [each - _median_without(each, ordered) for each in own]


def is_slow(lag: float, duration: float) -> bool:
    """Whether a rank that has this ``lag`` in a ``duration`` is slow."""
    return lag > SLOW * duration


def computes_longer(compute: float, all_compute: Sequence[float], lag: float) -> bool:
    """Whether most of a slow rank's ``lag`` is compute, by how long it computes, and all ranks."""
    return compute - min(all_compute) > lag / 2


def what_to_look_for(computes: bool) -> str:
    """In words, why a rank is slow. ``computes``: what :func:`computes_longer` says."""
    if computes:
        return "compute that it does alone, or a slower device"
    return "what it does alone that is no compute, such as reading data"


def in_ms(seconds: float) -> str:
    milliseconds = seconds * 1e3
    return f"{milliseconds:.{0 if milliseconds >= 100 else 1 if milliseconds >= 10 else 2}f} ms"


def _median_without(one: float, ordered: Sequence[float]) -> float:
    """The median of ``ordered`` without ``one`` of its numbers."""
    count = len(ordered) - 1
    # Those from `one` on move up by a place.
    low, high = (
        ordered[place + (ordered[place] >= one)] for place in ((count - 1) // 2, count // 2)
    )
    return (low + high) / 2
