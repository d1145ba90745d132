"""What a prediction shows beside its seconds: memory by kind, links, the host, and the cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from fsdp_overlap import PerTensor
from fsdp_overlap.layout import Flat
from fsdp_overlap.tools.emulator import running
from fsdp_overlap.tools.profiling import read_report
from fsdp_overlap.tools.simulator import (
    Clock,
    Device,
    Fabric,
    Prediction,
    Step,
    Training,
    simulate,
)
from fsdp_overlap.tools.simulator.observed import KINDS, ObservedCollective, ObservedDevice, traffic
from support.cli_runs import run_main
from support.timed_program import LAYER_BYTES, UNITS, WIDTH, Seconds, predict, program

GIB = 2**30
SHARDS = UNITS * LAYER_BYTES // 8
ACTIVATION = 16 * 4 * WIDTH
FABRIC = Fabric.read("nvlink4_400g")
functional = torch.ops._c10d_functional
MODEL = "test_simulate_command:Tiny"


def test_memory_is_told_by_what_it_is_for() -> None:
    found = predict(1.0, 0.25, 0.5)
    assert sum(found.peak.values()) == found.memory
    at_rest = found.usage[-1].nbytes
    assert at_rest["parameters"] == SHARDS + ACTIVATION  # the batch is made with them
    assert 2 * SHARDS <= at_rest["optimizer"] <= 2 * SHARDS + 512 * 2 * UNITS
    assert at_rest["full buffers"] == at_rest["gradients"] == at_rest["activations"] == 0
    most = {kind: max(usage.nbytes[kind] for usage in found.usage) for kind in KINDS}
    assert 2 * LAYER_BYTES <= most["full buffers"] <= 3 * LAYER_BYTES
    assert 2 * LAYER_BYTES <= most["gradients"] <= 4 * LAYER_BYTES + SHARDS
    assert most["gradients"] > SHARDS
    assert (UNITS - 1) * ACTIVATION <= most["activations"] <= (UNITS + 3) * ACTIVATION
    assert most["other"] == 0


def test_a_step_that_takes_no_memory_has_a_peak_all_the_same() -> None:
    def made_once() -> Step:
        total = torch.zeros(128, device="emulated")
        return lambda: total.add_(1)

    found = simulate(made_once, 8, AnySeconds())
    assert found.peak["parameters"] == found.memory == 512
    assert [usage.nbytes for usage in found.usage] == [found.peak]


def test_what_the_program_gathers_by_itself_is_activations() -> None:
    def gathers() -> Step:
        part = torch.zeros(1024, device="emulated")

        def step() -> None:
            whole = functional.all_gather_into_tensor(part, 8, dist.group.WORLD.group_name)
            functional.wait_tensor(whole)

        return step

    peak = simulate(gathers, 8, AnySeconds()).peak
    assert {kind: nbytes for kind, nbytes in peak.items() if nbytes} == {
        "parameters": 4 * 1024,
        "activations": 8 * 4 * 1024,
    }


def test_kept_weights_are_full_buffers_and_more_batch_is_activations() -> None:
    def peak(**options: object) -> dict[str, int]:
        training = Training(**{"model": MODEL, "gpus": 8, **options})  # type: ignore[arg-type]
        found = simulate(training.program, 8, AnySeconds())
        return {kind: max(each.nbytes[kind] for each in found.usage) for kind in KINDS}

    few, kept, more = peak(sequence=512), peak(sequence=512, stage=2), peak(sequence=1024)
    changed = {kind for kind in KINDS if kept[kind] != few[kind]}
    assert changed == {"full buffers"}
    assert more["activations"] > 1.9 * few["activations"]
    assert {kind for kind in KINDS if more[kind] != few[kind]} == {"activations"}


class AnySeconds(Seconds):
    """Costs of any program."""

    def __init__(self) -> None:
        super().__init__(1e-3)

    def collective(self, operation: object, ranks: object) -> float:
        return 1e-3


def test_memory_over_the_step_is_drawn_and_the_report_stays_the_same() -> None:
    found = predict(1.0, 0.25, 0.5)
    counters = [event for event in found.trace["traceEvents"] if event["ph"] == "C"]
    assert len(counters) == len(found.usage)
    times = [event["ts"] for event in counters]
    assert times == sorted(times)
    highest = max(sum(event["args"].values()) for event in counters)
    assert highest * 2**20 == pytest.approx(found.memory)
    spans = [event for event in found.trace["traceEvents"] if event["ph"] == "X"]
    assert times[-1] <= max(event["ts"] + event["dur"] for event in spans) + 1
    without = read_report({**found.trace, "traceEvents": spans}, steps=1)
    assert without.ranks[0] == found.report


def test_compute_waits_for_a_slow_host_and_not_for_a_fast_one() -> None:
    slow, fast = predict(0.0, 0.0, 0.0, host=1e-3), predict(1.0, 0.25, 0.5, host=1e-6)
    # Two operations wait for a gather instead, which waits for the host.
    assert slow.host_bound == pytest.approx(slow.seconds - 2e-3)
    assert fast.host_bound == 0
    assert not fast.stretches


def test_a_stretch_is_a_row_of_operations_that_waited() -> None:
    device = ObservedDevice(Clock(Seconds(1.0)))
    with running(device):
        for ready, enqueued in ((0.0, 1.0), (1.5, 2.0), (3.0, 2.5), (3.0, 4.0)):
            device._record_wait(ready, enqueued)
    assert [tuple(each) for each in device.stretches] == [(0.0, 2.0, 1.5), (3.0, 4.0, 1.0)]


def test_bytes_go_over_the_links_that_rings_take() -> None:
    within = traffic(FABRIC, [ObservedCollective("all_gather", range(8), 800)])
    assert within == {"within nodes": 700, "between nodes": 0}
    across = traffic(FABRIC, [ObservedCollective("reduce_scatter", range(64), 6400)])
    assert across == pytest.approx({"within nodes": 6300 * 7 / 8, "between nodes": 6300 / 8})
    copies = traffic(FABRIC, [ObservedCollective("all_reduce", range(0, 64, 8), 800)])
    assert copies == {"within nodes": 0, "between nodes": 1400}
    tokens = traffic(FABRIC, [ObservedCollective("all_to_all", range(16), 1600)])
    assert tokens == {"within nodes": 700, "between nodes": 800}


def test_traffic_is_that_of_the_steps_gathers_and_reductions() -> None:
    found = predict(1.0, 0.25, 0.5).traffic(FABRIC)
    large = (3 * UNITS - 1) * LAYER_BYTES * 7 / 8
    assert large <= found["within nodes"] < large + 0.1 * LAYER_BYTES
    assert found["between nodes"] == 0


def test_rows_travel_in_one_launch_as_they_do_on_nccl() -> None:
    flat, rows = (
        simulate(Training(MODEL, gpus=8, sequence=512, layout=layout).program, 8, AnySeconds())
        for layout in (Flat(), PerTensor())
    )
    assert [each.kind for each in rows.collectives] == [each.kind for each in flat.collectives]
    assert rows.seconds == pytest.approx(flat.seconds, rel=0.01)


def test_compute_is_what_it_takes_alone() -> None:
    alone = simulate(program, 8, Seconds(1.0, 0.25, 0.5))
    disturbed = simulate(program, 8, Seconds(1.0, 0.25, 0.5, slowdown=0.5))
    assert alone.compute == disturbed.compute == 3 * UNITS - 1
    assert disturbed.seconds > alone.seconds


def made(**options: float) -> Prediction:
    return replace(predict(1.0, 0.25, 0.5), **options)  # type: ignore[arg-type]


def test_a_step_costs_what_its_devices_cost() -> None:
    assert made(seconds=1.8).cost(2.0) == pytest.approx(8 * 1.8 / 3600 * 2.0)


def test_a_step_fits_where_all_that_is_reserved_fits() -> None:
    device = Device.read("h100_sxm")
    assert made(reserved=device.memory_size).fits(device)
    assert not made(reserved=device.memory_size + 1).fits(device)


def test_the_command_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--gpus 64 --sequence 512 --price 2.5".split()
    assert run_main("simulate", MODEL, *options) == 0
    shown = capsys.readouterr().out
    for line in ("at the peak, GiB", "arrives at a GPU", "waits for the host", "a billion tokens"):
        assert line in shown


@pytest.mark.slow
def test_what_does_not_fit_is_shown_and_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--gpus 8 --sequence 65536 --memory 0.2 --micro-batch-size 4".split()
    assert run_main("simulate", MODEL, *options) == 2
    shown = capsys.readouterr()
    assert "tokens a second and GPU" in shown.out
    assert "it does not fit: it needs" in shown.err
    assert "has 0.2 GiB" in shown.err
    assert "no single change mends that; --best tries several" in shown.err
    first, *_ = shown.out.splitlines()
    assert shown.err == f"error: {first}\n"


def test_a_change_that_cannot_run_is_not_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise ArithmeticError("planned")

    monkeypatch.setattr("fsdp_overlap.tools.cli.simulate.estimate", fails)
    options = "--gpus 8 --sequence 65536 --micro-batch-size 4 --memory 1.5".split()
    assert run_main("simulate", MODEL, *options) == 2
    assert "no single change mends that; --best" in capsys.readouterr().err
    # Of which --best has no code.
    options += "--checkpointing selective --selective-ac-option 2 --memory 0.2".split()
    assert run_main("simulate", MODEL, *options) == 2
    assert "no single change mends that; use more GPUs" in capsys.readouterr().err


def test_sequences_are_shared_by_torchs_attention_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("simulate", MODEL, "--context-parallel", "2", "--sequence", "64") == 2
    said = "context_parallel=2: the model does not call F.scaled_dot_product_attention"
    assert said in capsys.readouterr().err


def test_the_smallest_change_that_would_fit_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--gpus 8 --sequence 65536 --micro-batch-size 4".split()
    assert run_main("simulate", MODEL, *options, "--memory", "1.5") == 2
    first, *_ = capsys.readouterr().out.splitlines()
    change = first.partition("; with ")[2].partition(" it does, in ")[0]
    assert change.startswith("--")
    assert run_main("simulate", MODEL, *options, "--memory", "1.5", *change.split()) == 0


@pytest.mark.parametrize("option", ["--memory", "--price"])
def test_memory_and_price_are_more_than_nothing(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main("simulate", "llama3-8b", option, "0") == 2
    assert f"{option} 0: must be more than 0" in capsys.readouterr().err


def test_optimizers_are_watched_only_within() -> None:
    device = ObservedDevice(Clock(Seconds(1.0)))
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight])
    with device.watching_optimizers():
        optimizer.step()
        assert device.allocator.phase == "training"
        device.allocator.phase = "building"
    optimizer.step()
    assert device.allocator.phase == "building"
