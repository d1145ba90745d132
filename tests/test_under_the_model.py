"""Everything runs on the modelled device, and nothing that it does is left unordered."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from modelled import fake_ranks, run
from modelled_modes import MODES

from fsdp_overlap.comm.lanes import StreamLane, StreamTicket


@pytest.fixture(autouse=True)
def ranks() -> Iterator[None]:
    with fake_ranks(4):
        yield


@pytest.mark.parametrize("name", MODES)
def test_nothing_is_left_unordered(name: str) -> None:
    device = run(MODES[name])
    assert not device.findings, "\n".join(map(str, dict.fromkeys(device.findings)))
    assert device.operations > 100


# What orders something, the line that is left out, and a mode that shows it.
DEFECTS: list[tuple[type, str, str, str, str]] = [
    (
        StreamTicket,
        "wait",
        "self._streams.current_stream().wait_event(self._event)",
        "pass",
        "prefetch 1, flat",
    ),
    (StreamTicket, "wait_on_host", "self._event.synchronize()", "pass", "offloaded"),
    (StreamTicket, "abandon", "self.wait()", "pass", "the model of branches"),
    (
        StreamLane,
        "after_compute",
        "self.stream.wait_stream(self._streams.current_stream())",
        "pass",
        "prefetch 1, flat",
    ),
    (
        StreamLane,
        "after_event",
        "self.stream.wait_event(event)",
        "pass",
        "the optimizer on a stream of its own",
    ),
    (
        StreamLane,
        "after_ticket",
        "with self._streams.stream(self.stream):",
        "if True:",
        "copies, low",
    ),
]
