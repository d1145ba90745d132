"""Programs that are written for GPUs run as they are on a machine without one: of the right ones
nothing is reported, and of those with a fault it is."""

from __future__ import annotations

import io
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp_overlap.tools.emulator import EmulatedDevice
from fsdp_overlap.tools.emulator.cuda import NotEmulated, as_cuda
from fsdp_overlap.tools.emulator.process_groups import real_nccl
from fsdp_overlap.tools.emulator.works import WorkFuture
from fsdp_overlap.tools.races import assert_no_races, find_races
from fsdp_overlap.tools.races.__main__ import main
from fsdp_overlap.tools.races.runner import CLEAN, FAILED, FOUND, Program, report, run
from support.pages import TESTS

PROGRAMS = TESTS / "support" / "gpu_programs"


def kinds(name: str, *args: str, ranks: int | None = None) -> set[str]:
    """Return the kinds of what a program of ours leaves unordered."""
    status, result = run(Program(str(PROGRAMS / f"{name}.py"), args), ranks)
    assert not result.error
    assert status == (FOUND if result.found.findings else CLEAN), result.found.findings
    return {finding.kind for finding in result.found.findings}


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("side_stream", ()),
        ("prefetcher", ()),
        ("ema", ()),
        ("save_on_cpu", ()),
        ("async_checkpoint", ()),
        ("async_checkpoint", ("dcp",)),
        ("amp", ()),
        ("cuda_graph", ()),
        ("operators", ()),
    ],
)
def test_a_right_program_runs_quietly(name: str, args: tuple[str, ...]) -> None:
    assert not kinds(name, *args)


@pytest.mark.parametrize("args", [(), ("hook",), ("view", "accumulate"), ("unused",)])
def test_ddp_as_one_of_several_ranks(args: tuple[str, ...]) -> None:
    assert not kinds("ddp", *args, ranks=4)


def test_a_program_that_starts_its_ranks_by_itself() -> None:
    assert not kinds("spawned", ranks=4)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("args", [(), ("mixed",), ("offload",), ("hsdp", "mixed")])
def test_fsdp2_as_one_of_several_ranks(args: tuple[str, ...]) -> None:
    assert not kinds("fsdp2", *args, ranks=4)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("side_stream", "race"),
        ("prefetcher", "reuse"),
        ("ema", "race"),
        ("async_checkpoint", "race"),
        ("cuda_graph", "race"),
    ],
)
def test_what_a_wrong_program_leaves_unordered_is_found(name: str, kind: str) -> None:
    assert kinds(name, "wrong") == {kind}


def test_the_reducer_of_ddp_that_does_not_wait_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkFuture, "wait", torch.futures.Future.wait)
    assert "race" in kinds("ddp", ranks=4)


@pytest.mark.slow
def test_real_ranks_have_real_values(capfd: pytest.CaptureFixture[str]) -> None:
    program = Program(str(PROGRAMS / "ddp.py"), steps=2)
    assert run(program, 2, is_real=True)[0] == CLEAN
    assert capfd.readouterr().out.count("loss") == 1  # ended within the second step


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "import torch\n"
        "x = torch.ones(8, device='cuda')\n"
        "with torch.cuda.stream(torch.cuda.Stream()):\n"
        "    x.add_(1)\n"
    )
    command = [sys.executable, "-m", "fsdp_overlap", "races", str(wrong)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == FOUND
    assert "wrong.py:4" in done.stdout
    assert "wrong.py:2" in done.stdout


def test_a_missing_call_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "program.py"
    path.write_text("import torch\n\ntorch.cuda.utilization()\n")
    assert report(*run(Program(str(path)))) == FAILED
    said = capsys.readouterr().err
    assert "error: torch.cuda.utilization is not emulated; called at " in said
    assert "program.py:3" in said


def test_a_program_that_torchrun_should_have_started_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    path = tmp_path / "program.py"
    path.write_text("import os\n\nos.environ['LOCAL_RANK']\n")
    status, result = run(Program(str(path)))
    assert status == FAILED
    assert "--ranks" in result.error
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(RuntimeError, match="RANK is set, but not LOCAL_RANK"):
        run(Program(str(path)), is_real=True)


def test_a_program_runs_as_python_runs_it(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("NAME = 'beside'\n")
    path = tmp_path / "program.py"
    path.write_text(
        "import sys\nfrom beside import NAME\n"
        "assert __name__ == '__main__'\n"
        "assert sys.argv[1:] == ['--lr', '1'], sys.argv\n"
        "sys.exit(0)\n"
    )
    assert run(Program(str(path), ["--lr", "1"]))[0] == CLEAN
    path.write_text("import sys\nsys.exit('no data')\n")
    assert "no data" in run(Program(str(path)))[1].error


# ---- what torch says on the device ----


def test_tensors_say_that_they_are_on_the_gpu() -> None:
    with as_cuda(EmulatedDevice(device_type="cuda")):
        for tensor in (
            torch.ones(2).cuda(),
            torch.ones(2).to("cuda", non_blocking=True),
            torch.ones(2).to(0),
            torch.ones(2, device="cuda:0"),
            nn.Linear(2, 2).cuda().weight,
            torch.ones(2, device="cuda").new_tensor([1.0]),
        ):
            assert tensor.is_cuda
            assert tensor.device == torch.device("cuda", 0)
            assert tensor.type() == "torch.cuda.FloatTensor"
            assert "device='cuda:0'" in repr(tensor)
            assert not tensor.cpu().is_cuda
        torch.set_default_device("cuda")
        assert torch.zeros(2).is_cuda
        assert torch.accelerator.current_accelerator() == torch.device("cuda")
        assert torch.get_device_module() is torch.cuda
        assert torch.Generator("cuda").device.type == "cuda"
        assert isinstance(torch.default_generator, torch.Generator)
    assert not torch.zeros(2).is_cuda
    assert not torch.cuda.is_available()


def test_saved_tensors_come_back_where_they_were() -> None:
    with as_cuda(EmulatedDevice(device_type="cuda")):
        file = io.BytesIO()
        torch.save({"here": torch.ones(2, device="cuda"), "host": torch.ones(2)}, file)
        for location, sides in ((None, [True, False]), ("cpu", [False] * 2), ("cuda", [True] * 2)):
            file.seek(0)
            loaded = torch.load(file, map_location=location)
            assert [tensor.is_cuda for tensor in loaded.values()] == sides


def moves_a_tensor_that_lies_over_a_mesh() -> None:
    dist.init_process_group("cpu:gloo,cuda:nccl")
    tensor = DTensor.from_local(torch.ones(3), dist.init_device_mesh("cuda", (2,)), [Shard(0)])
    assert tensor.cuda().to_local().is_cuda
    assert not tensor.cuda().cpu().to_local().is_cuda


def test_tensors_that_lie_over_a_mesh_can_be_moved() -> None:
    assert_no_races(moves_a_tensor_that_lies_over_a_mesh, ranks=2)


def test_a_gradient_of_which_parts_are_missing_lies_where_the_others_do() -> None:
    with as_cuda(EmulatedDevice(device_type="cuda")) as device:
        whole = torch.ones(4, 2, device="cuda", requires_grad=True)
        for part in whole.chunk(2):
            part.square().mean().backward()
        assert whole.grad is not None
        assert whole.grad.is_cuda
    assert not device.findings


def test_autocast_casts_as_for_a_gpu() -> None:
    with as_cuda(EmulatedDevice(device_type="cuda")):
        x, weight = torch.ones(2, 2, device="cuda"), torch.ones(2, 2, device="cuda")
        with torch.autocast("cuda"):
            assert torch.is_autocast_enabled("cuda")
            assert (x @ weight).dtype is torch.float16
            with torch.autocast("cuda", enabled=False):
                assert (x @ weight).dtype is torch.float32
        with torch.autocast("cuda", torch.bfloat16):
            assert (x @ weight).dtype is torch.bfloat16
        assert torch.get_autocast_dtype("cuda") is torch.float16


def test_the_state_of_the_generator_comes_back() -> None:
    with as_cuda(EmulatedDevice(device_type="cuda")):
        state = torch.cuda.get_rng_state()
        first = torch.rand(4, device="cuda")
        torch.cuda.set_rng_state(state)
        assert torch.equal(first, torch.rand(4, device="cuda"))
        assert state.numel() == 16


OF_DTENSORS = """
import torch
from fsdp_overlap.tools.emulator import EmulatedDevice
from fsdp_overlap.tools.emulator.cuda import as_cuda

torch.manual_seed(0)
with as_cuda(EmulatedDevice(device_type="cuda")):
    state = torch.cuda.get_rng_state()
    state.view(torch.int64)[1] += 16  # as DTensor's random operations set it
    torch.cuda.set_rng_state(state)
    print(state.tolist(), torch.rand(2, device="cuda").tolist())
"""


@pytest.mark.slow
def test_ranks_that_share_a_state_of_the_generator_draw_the_same() -> None:
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", OF_DTENSORS],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    first, second = (program.communicate()[0] for program in programs)
    assert first
    assert first == second


def test_meta_tensors_stay_where_they_are() -> None:
    with as_cuda(EmulatedDevice(device_type="cuda")):
        with torch.device("meta"):
            table = torch.arange(4).to(device=None, dtype=torch.float32)
        assert table.dtype == torch.float32
        assert table.is_meta
        assert table.new_empty(2).is_meta


def test_a_tensor_follows_the_one_whose_type_it_takes() -> None:
    with as_cuda(EmulatedDevice(device_type="cuda")):
        host, there = torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, device="cuda")
        assert there.type_as(host).device.type == "cpu"
        assert there.type_as(host).dtype == torch.bfloat16
        assert host.type_as(there).is_cuda
        assert there.type_as(there) is there


def test_products_may_be_wider_than_their_factors() -> None:
    with as_cuda(EmulatedDevice(device_type="cuda")):
        factor = torch.randn(4, 4, device="cuda", dtype=torch.bfloat16)
        expected = factor.float() @ factor.float()
        product = torch.mm(factor, factor, out_dtype=torch.float32)
        total = torch.ones(4, 4, device="cuda")
        torch.addmm(total, factor, factor, out_dtype=torch.float32, out=total)
        assert torch.equal(product, expected)
        torch.testing.assert_close(total, 1 + expected)


def test_a_group_of_real_ranks_says_where_its_tensors_lie() -> None:
    with as_cuda(EmulatedDevice(device_type="cuda")), real_nccl():
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        model = nn.Linear(2, 2, device="cuda")
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        given = {"weight": torch.ones(2, 2), "bias": torch.ones(2)}
        set_model_state_dict(model, given, options=options)
        assert model.weight.sum().item() == 4.0
        dist.destroy_process_group()


def test_what_is_not_emulated_raises_and_the_rest_is_as_before() -> None:
    before = torch.cuda.Stream, torch.cuda.utilization, torch.compile, torch.save
    with as_cuda(EmulatedDevice(device_type="cuda")), pytest.raises(NotEmulated):
        torch.cuda.utilization()
    assert before == (torch.cuda.Stream, torch.cuda.utilization, torch.compile, torch.save)


def test_other_devices_cannot_be_called_cuda() -> None:
    with pytest.raises(ValueError, match="device_type='cuda'"), as_cuda(EmulatedDevice()):
        pass


def test_a_number_alone_is_a_gpu() -> None:
    real = torch.device
    with as_cuda(EmulatedDevice(device_type="cuda"), 2):
        assert torch.device(1) == real("cuda", 1)
        assert torch.device("cpu") == real("cpu")
        assert isinstance(torch.device("cuda"), torch.device)
        assert not isinstance("cuda", torch.device)
        assert pickle.loads(pickle.dumps(torch.device(0))) == real("cuda", 0)
        with torch.device("meta"):
            assert torch.ones(2).is_meta
    assert torch.device is real


def dtensors() -> None:
    dist.init_process_group("cpu:gloo,cuda:nccl")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    weight = nn.Parameter(distribute_tensor(torch.zeros(8, 8, device="cuda"), mesh, [Shard(0)]))
    nn.init.normal_(weight)  # moves the state of the generator, from where no mode is on
    nn.init.kaiming_uniform_(weight)
    assert weight.to_local().abs().max() > 0
    heads = distribute_tensor(torch.randn(1, 4, 3, 2, device="cuda"), mesh, [Shard(1)])
    heads.requires_grad_()
    attended = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    assert attended.placements == (Shard(1),)
    attended.to_local().sum().backward()
    assert heads.grad is not None
    backend = dist.group.WORLD._get_backend(torch.device("cuda"))
    assert isinstance(backend.options, dist.ProcessGroupNCCL.Options)


def test_dtensors_are_initialized_in_place_and_attend() -> None:
    assert_no_races(dtensors, ranks=4)


def test_a_mesh_finds_the_other_ranks() -> None:
    assert_no_races(lambda: init_device_mesh("cuda", (4,)), ranks=4)


# ---- for tests ----


def gathers(waits: bool) -> None:
    dist.init_process_group()
    x = torch.ones(8, device="cuda")
    parts = torch.empty(8 * dist.get_world_size(), device="cuda")
    work = dist.all_gather_into_tensor(parts, x, async_op=True)
    if waits:
        work.wait()
    parts.sum()


def test_functions_can_be_asked_about() -> None:
    assert_no_races(lambda: gathers(True), ranks=4, rank=2)
    found = find_races(lambda: gathers(False), ranks=4)
    assert [finding.kind for finding in found] == ["race"]
    with pytest.raises(AssertionError, match="race: "):
        assert_no_races(lambda: gathers(False), ranks=4)
    assert not dist.is_initialized()


def test_what_was_found_is_written_without_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    assert main([f"--json={path}", str(PROGRAMS / "side_stream.py")]) == CLEAN
    told = json.loads(path.read_text())
    assert not told["findings"] + told["waits"]
    assert not told["error"]
