"""What changed in weights, bit for bit: receivers have what a full export has, or are told."""

from __future__ import annotations

import copy
import json
import shutil
from functools import partial
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_overlap import CPUOffloadPolicy, FsdpContext, fully_shard
from fsdp_overlap.checkpoint.files import CheckpointError
from fsdp_overlap.optim import AdamW, Muon, OverlapPolicy
from fsdp_overlap.tensor.pending_steps import PENDING
from fsdp_overlap.tools.emulator import EmulatedDevice, fake_ranks, running
from fsdp_overlap.weights import (
    DeltaMessage,
    DeltaTransfer,
    WeightDelta,
    apply_deltas,
    delta_files,
    delta_format,
    delta_transfer,
    deltas,
    export_weights,
    load_deltas,
    write_deltas,
)
from fsdp_overlap.weights.chunks import Chunk, full_chunk, local_chunks
from fsdp_overlap.weights.delta_targets import check_deltas, write
from support import experts
from support import tensor_parallel as tp
from support.defects import Defect
from support.emulated import Program
from support.fake_group import run_on_fake_group
from support.layouts import LAYOUTS, Giant
from support.ranks import run_ranks
from support.twins import COPIES, Twins
from support.zoo import Frozen, Model, Tied, shard_layers, shard_root_only

WeightDeltas = partial(deltas.WeightDeltas, first_version=1)
SMALL = 96
"""Bytes of a delta, so that there are many."""
DENSE = "or a message with all values, which dense=True sends"


def exported(model: nn.Module, **options: Any) -> dict[str, torch.Tensor]:
    return dict(export_weights(model, dtype=torch.bfloat16, **options))


def check_same(targets: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert targets.keys() == wanted.keys()
    for name, weight in wanted.items():
        assert targets[name].dtype == weight.dtype
        one, other = (
            each.contiguous().view(-1).view(torch.uint8) for each in (targets[name], weight)
        )
        assert torch.equal(one, other), name


def others(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Targets like ``weights``, with other values."""
    return {name: torch.full_like(weight, 3) for name, weight in weights.items()}


def from_all(message: DeltaMessage) -> DeltaMessage:
    """What all ranks send, on each rank."""
    each: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(each, (message.version, message.base, list(message)))
    [(version, base)] = {(version, base) for version, base, _ in each}
    return DeltaMessage(version, base, [delta for *_, sent in each for delta in sent])


class Receiver:
    """A receiver of the deltas of all ranks, on each rank."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.model, self.deltas = model, WeightDeltas(model, delta_bytes=SMALL, **options)
        self.targets, self.version = others(exported(model)), 0

    def sync(self, **options: Any) -> list[WeightDelta]:
        """Take what changed, and return it."""
        message = from_all(self.deltas.changes(**options))
        self.version = apply_deltas(self.targets, message, self.version)
        assert self.version == message.version == self.deltas.version
        wanted = [exported(self.model)]  # with buffers of this rank
        dist.broadcast_object_list(wanted, 0)
        check_same(self.targets, wanted[0])
        return list(message)


# ---- training ----


def _fifty_steps(trainers: int, layout: str, optimizer: Any, folder: str) -> None:
    mesh = DeviceMesh("cpu", torch.arange(trainers))
    trains = dist.get_rank() < trainers
    torch.manual_seed(0)
    model = Model(layers=1)
    targets = others({name: weight.bfloat16() for name, weight in model.state_dict().items()})
    on_disk = copy.deepcopy(targets)
    sender = writer = None
    if trains:
        shard_layers(model, FsdpContext(mesh, layout=LAYOUTS[layout]))
        steps = optimizer(model if optimizer is Muon else model.parameters(), lr=0.0)
        sender, writer = WeightDeltas(model, delta_bytes=SMALL), WeightDeltas(model, on_host=True)
    transfer = DeltaTransfer(sender, None if trains else targets, round_bytes=1000)
    loaded = first = few = 0
    for number in range(50):
        transfer.run()
        if writer is not None and number % 2 == 0:
            write_deltas(writer, folder, file_bytes=1500)
        sent: list[Any] = [exported(model) if trains else None]
        dist.broadcast_object_list(sent, 0)  # when all files are there
        if not trains:
            check_same(targets, sent[0])
            assert transfer.version == number + 1
            if number % 6 == 0:
                loaded = load_deltas(on_disk, folder, loaded)
                check_same(on_disk, sent[0])
            continue
        first = first or transfer.sent_bytes
        few += transfer.sent_bytes < first
        for group in steps.param_groups:
            group["lr"] = 10 ** (number / 25 - 6)
        model(torch.randint(13, (2, 5))).square().mean().backward()
        steps.step()
        steps.zero_grad()
    assert loaded == (0 if trains else 25)  # of the last step but one
    assert not trains or few > 5  # of the low rates


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("trainers", "receivers", "layout", "optimizer"),
    [
        (1, 1, "flat", AdamW),
        (2, 1, "rows", Muon),
        (2, 2, "whole", AdamW),
        (4, 1, "flat", Muon),
        (4, 2, "rows", AdamW),
    ],
)
def test_receivers_have_the_weights_after_each_of_fifty_steps(
    trainers: int, receivers: int, layout: str, optimizer: Any, tmp_path: Path
) -> None:
    run_ranks(_fifty_steps, trainers + receivers, trainers, layout, optimizer, str(tmp_path))


def _layout(name: str) -> None:
    for build, shard in ((Model, shard_layers), (Giant, shard_root_only)):
        twins = Twins(build, shard, layout=LAYOUTS[name])
        receiver = Receiver(twins.model)
        receiver.sync()
        twins.train(1)
        assert receiver.sync()
        assert receiver.sync() == []


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout(name: str) -> None:
    run_ranks(_layout, 3, name)


def _copies(divide: bool, folder: str) -> None:
    twins = Twins(Model, shard_layers, shard_optimizer_over_replicas=divide, **COPIES)
    receiver, writer = Receiver(twins.model), WeightDeltas(twins.model)
    loaded, sent_to = others(receiver.targets), others(receiver.targets)
    version, is_last = 0, twins.rank == 3  # which trains and receives
    transfer = DeltaTransfer(WeightDeltas(twins.model), sent_to if is_last else None)
    for _ in range(2):
        sent = receiver.sync()
        write_deltas(writer, folder)
        transfer.run()
        dist.barrier()
        version = load_deltas(loaded, folder, version)
        check_same(loaded, wanted := exported(twins.model))
        check_same(sent_to, wanted if is_last else sent_to)
        assert sum(d.values.numel() for d in sent) <= sum(
            t.numel() for t in twins.twin.parameters()
        )
        assert receiver.deltas.sends == (divide or dist.get_rank() < 2)
        assert bool(receiver.deltas._sent) == receiver.deltas.sends
        twins.train(1)
    receiver.sync()


@pytest.mark.parametrize("divide", [False, True])
def test_of_copies_one_is_sent(divide: bool, tmp_path: Path) -> None:
    run_ranks(_copies, 4, divide, str(tmp_path))
    ranks = {file.name[:10] for file in tmp_path.glob("version-00000002/rank-*")}
    assert len(ranks) == (4 if divide else 2)


def _tensor_parallel(layout: str) -> None:
    mesh = tp.make_mesh()
    model = tp.parallelize(tp.plain(), mesh["tp"])
    model.norm_of_nobody = nn.LayerNorm(4).double()  # the same on all ranks of tensor parallelism
    tp.shard(model, FsdpContext(mesh["dp"], layout=LAYOUTS[layout]))
    receiver = Receiver(model)
    sent = receiver.sync()
    assert sum(delta.values.numel() for delta in sent) == sum(
        target.numel() for target in receiver.targets.values()
    )
    assert any(delta.indices is not None for delta in sent)  # columns
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert receiver.sync()


@pytest.mark.parametrize("layout", ["flat", "rows"])
def test_tiles_and_copies_of_tensor_parallelism(layout: str) -> None:
    run_ranks(_tensor_parallel, 4, layout)


def _experts() -> None:
    whole, shards, ep = experts.meshes()
    model = experts.Moe(ep)
    experts.shard(model, whole, shards, FsdpContext(whole))
    with pytest.raises(ValueError, match=r"'0.experts.weight' has other values on ranks"):
        WeightDeltas(model)
    part = ep.get_local_rank()
    sender = WeightDeltas(model, names=lambda name: name.replace("experts", f"experts.{part}"))
    targets: dict[str, torch.Tensor] = {}
    for delta in (message := from_all(sender.changes())):
        targets.setdefault(delta.name, torch.zeros(delta.shape, dtype=torch.bfloat16))
    apply_deltas(targets, message, 0)
    for number, layer in enumerate(experts.Moe(None)):
        both = torch.cat([targets[f"{number}.experts.{k}.weight"] for k in range(2)])
        assert torch.equal(both, layer.experts.weight.bfloat16())


def test_experts_of_the_same_name_are_refused_and_sent_by_names_of_their_own() -> None:
    run_ranks(_experts, 4)


def _tied_frozen_and_buffers() -> None:
    for build in (Tied, Frozen):
        twins = Twins(build, shard_layers)
        twins.model.register_buffer("steps", torch.arange(3) + dist.get_rank())
        twins.model.register_buffer("is_on", torch.tensor([True, False]))
        receiver = Receiver(twins.model)
        receiver.sync()
        twins.train(1)
        twins.model.steps += 1
        twins.model.is_on[1] = True
        names = {delta.name for delta in receiver.sync()}
        trained = {name for name, p in twins.model.named_parameters() if p.requires_grad}
        assert names == {*trained, "steps", "is_on"}
        assert receiver.targets["steps"].tolist() == [1, 2, 3]  # the first rank's


def test_tied_weights_come_once_and_frozen_ones_never_again() -> None:
    run_ranks(_tied_frozen_and_buffers, 2)


def _edits() -> None:
    model, ctx = Model(), FsdpContext(layout=LAYOUTS["rows"])
    for layer in model.layers:
        fully_shard(layer, ctx, offload_policy=CPUOffloadPolicy(pin_memory=False))
    fully_shard(model, ctx)
    receiver = Receiver(model, on_host=True)
    receiver.sync()
    local = model.layers[1].up.weight.to_local()
    for value in (float("nan"), 0.0, -0.0, 1e-45, float("inf")):  # 1e-45 rounds to 0.0
        local.data[0, 3] = value  # which nobody counts
        assert [delta.positions().tolist() for delta in receiver.sync()] == [[3], [57]]
        assert receiver.sync() == []  # though NaN does not equal itself
    model.load_state_dict({name: weight * 2 for name, weight in model.state_dict().items()})
    assert all(delta.indices is None for delta in receiver.sync() if delta.values.numel() > 8)
    model.load_state_dict(model.state_dict())
    assert receiver.sync() == []


def test_edits_that_nobody_counts_are_sent_bit_for_bit() -> None:
    run_ranks(_edits, 2)


def _overlapped() -> None:
    class Late:
        def wait(self) -> None:
            PENDING.discard(self)
            twins.model.head.weight.to_local().data.add_(1)

    twins = Twins(Model, shard_layers, optimizer=AdamW, overlap=OverlapPolicy())
    receiver = Receiver(twins.model)
    for _ in range(3):
        twins.model(torch.randint(13, (2, 5))).square().mean().backward()
        twins.optimizer.step()
        assert receiver.sync()
    PENDING.add(Late())
    assert {delta.name for delta in receiver.sync()} == {"head.weight"}


def test_steps_under_way_are_waited_for() -> None:
    run_ranks(_overlapped, 2)


# ---- versions ----


def _aborted() -> None:
    model = Model().double()
    shard_layers(model, FsdpContext(layout=LAYOUTS["rows"]))
    receiver = Receiver(model)

    def leave(**options: Any) -> None:
        for _ in receiver.deltas.changes(**options):
            break
        message = iter(receiver.deltas.changes(**options))
        next(message)
        message.close()

    version = receiver.deltas.version
    leave()
    assert receiver.deltas.version == version == 0
    receiver.sync()
    local = model.layers[0].up.weight.to_local()
    for options in ({}, {"dense": True}):
        with torch.no_grad():
            local += 1
        leave(**options)
        with torch.no_grad():
            local -= 1
        assert receiver.sync() == []  # all is as it was sent last
        with torch.no_grad():
            local += 1
        leave(**options)
        assert {delta.name for delta in receiver.sync()} == {"layers.0.up.weight"}
        with torch.no_grad():
            local -= 1
        receiver.sync()
    # A weight that is edited in the loop: what was sent is known, and the rest comes next.
    receiver.sync()
    message, sent = receiver.deltas.changes(dense=True), []
    for delta in message:
        sent.append(delta)
        model.head.weight.to_local().data.mul_(-3)
    message = from_all(DeltaMessage(message.version, message.base, sent))
    receiver.version = apply_deltas(receiver.targets, message, receiver.version)
    assert {delta.name for delta in receiver.sync()} == {"head.weight"}
    # A receiver that got all of a message that was given up is of a version of its own.
    model.head.weight.to_local().data.mul_(-3)
    given_up = receiver.deltas.begin()
    targets = {name: target.clone() for name, target in receiver.targets.items()}
    message = from_all(DeltaMessage(given_up.version, given_up.base, list(given_up)))
    version = apply_deltas(targets, message, receiver.version)
    receiver.sync()
    model.head.weight.to_local().data.mul_(-3)
    message = from_all(receiver.deltas.changes())
    with pytest.raises(ValueError, match=DENSE):
        apply_deltas(targets, message, version)
    receiver.version = apply_deltas(receiver.targets, message, receiver.version)
    incomplete = receiver.deltas.begin(dense=True)
    next(iter(incomplete))
    with pytest.raises(RuntimeError, match="was not iterated to its end"):
        incomplete.commit()
    # An older message ends after another was begun.
    old = iter(receiver.deltas.changes(dense=True))
    next(old)
    receiver.sync()
    with pytest.raises(RuntimeError, match="another message was begun before version"):
        list(old)
    with pytest.raises(ValueError, match="version=2 is not above the last"):
        receiver.deltas.changes(version=2)
    receiver.sync(version=1000)
    receiver.sync()
    assert receiver.version == 1001


def test_the_last_version_stays_where_a_loop_is_left_early() -> None:
    run_ranks(_aborted, 2)


def _missed(folder: str) -> None:
    model, path = Model(), Path(folder)
    shard_layers(model, FsdpContext())
    receiver, writer = Receiver(model), WeightDeltas(model)
    on_disk, version = others(receiver.targets), 0

    def edit() -> None:
        with torch.no_grad():
            model.layers[0].up.weight.mul_(2)
            model.head.bias.add_(1)
        dist.barrier()

    receiver.sync()
    write_deltas(writer, path)
    dist.barrier()
    version = load_deltas(on_disk, path, version)
    edit()
    missed = from_all(receiver.deltas.changes())
    write_deltas(writer, path)
    edit()
    later = from_all(receiver.deltas.changes())
    write_deltas(writer, path)
    before = {name: target.clone() for name, target in receiver.targets.items()}
    said = (
        f"version 3 has what changed since version 2, and these weights are of version 1: .*{DENSE}"
    )
    with pytest.raises(ValueError, match=said):
        apply_deltas(receiver.targets, later, 1)
    check_same(receiver.targets, before)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path / "version-00000002")
    dist.barrier()
    with pytest.raises(ValueError, match=said):
        load_deltas(on_disk, path, version)
    check_same(on_disk, before)
    receiver.sync(dense=True)
    write_deltas(writer, path, dense=True)
    edit()
    write_deltas(writer, path)
    dist.barrier()
    for of in (version, 0, 3):
        assert load_deltas(on_disk, path, of) == 5
        check_same(on_disk, exported(model))
    assert load_deltas(on_disk, path, 5) == 5
    with pytest.raises(ValueError, match="has versions up to 5, and the weights are of 7"):
        load_deltas(on_disk, path, 7)
    assert missed.base == 1


def test_a_receiver_that_missed_a_version_refuses_the_next_and_takes_a_dense_one(
    tmp_path: Path,
) -> None:
    run_ranks(_missed, 2, str(tmp_path))


def _other_weights() -> None:
    model = Model()
    shard_layers(model, FsdpContext())
    sender = WeightDeltas(model)
    list(sender.changes())
    model.register_buffer("later", torch.ones(2))
    with pytest.raises(RuntimeError, match="'later' was added, replaced or moved: make a new"):
        sender.changes()
    del model.later
    assert list(sender.changes()) == []
    with pytest.raises(ValueError, match="names= gives two weights the name 'same'"):
        WeightDeltas(model, names=lambda _: "same")
    dtype = torch.float16 if dist.get_rank() else torch.bfloat16
    with pytest.raises(ValueError, match=r"rank 0 gave dtype=torch.bfloat16.*, and rank 1 dtype="):
        WeightDeltas(model, dtype=dtype)
    model.register_buffer("strange", torch.ones(2, dtype=torch.complex128))
    with pytest.raises(ValueError, match=r"'strange' is of torch.complex128, which safetensors"):
        WeightDeltas(model)


def test_weights_that_would_be_sent_wrongly_are_refused() -> None:
    run_ranks(_other_weights, 2)


def _on_meta() -> None:
    with torch.device("meta"):
        model = Model()
    shard_layers(model, FsdpContext())
    with pytest.raises(RuntimeError, match="is on the meta device: call to_empty"):
        WeightDeltas(model)


def test_weights_without_values_are_refused() -> None:
    run_on_fake_group(_on_meta, 2)


# ---- receivers ----


def test_what_does_not_fit_is_refused_before_anything_is_written() -> None:
    targets = {"a": torch.zeros(2, 3), "b": torch.zeros(4)}
    good = WeightDelta("a", (2, 3), torch.ones(2), torch.tensor([1, 5], dtype=torch.int32))
    cases = [
        (WeightDelta("c", (4,), torch.ones(4)), "'c' is sent, and not among the 2 targets"),
        (WeightDelta("b", (5,), torch.ones(4)), r"'b' is sent as .*\(5,\).* target is \(\(4,\)"),
        (WeightDelta("b", (4,), torch.ones(4).half()), "'b' is sent as .*float16"),
        (WeightDelta("b", (4,), torch.ones(4), None, 1), "'b': positions of 4 values are outside"),
        (WeightDelta("b", (4,), torch.ones(1), None, -1), "'b': positions of 1 values"),
        (good._replace(indices=torch.tensor([1, 6])), "'a': positions of 2 values are outside"),
        (good._replace(indices=torch.tensor([-1, 5])), "'a': positions"),
        (good._replace(indices=torch.tensor([1])), "'a': positions"),
    ]
    for bad, said in cases:
        with pytest.raises(ValueError, match=said):
            apply_deltas(targets, DeltaMessage(2, 1, [good, bad]), 1)
    whole = [WeightDelta("a", (2, 3), torch.ones(6)), WeightDelta("b", (4,), torch.ones(4))]
    for part, said in [
        (whole[:1], "nobody sends 'b'"),
        ([*whole, whole[0]], "of 'a' 12 of 6 values are sent"),
        ([whole[0], whole[1]._replace(values=torch.ones(3))], "of 'b' 3 of 4 values are sent"),
    ]:
        with pytest.raises(ValueError, match=said):
            apply_deltas(targets, DeltaMessage(2, 0, part), 1)
    fused = torch.zeros(8)  # of which b is a part
    with pytest.raises(ValueError, match="nobody sends 'fused'"):
        apply_deltas(targets | {"b": fused[:4], "fused": fused}, DeltaMessage(2, 0, whole), 1)
    assert not any(bool(target.any()) for target in targets.values())
    assert apply_deltas(targets, DeltaMessage(2, 1, [good]), 1) == 2
    assert targets["a"].view(-1).tolist() == [0, 1, 0, 0, 0, 1]


def _targets() -> None:
    twins = Twins(Tied, shard_layers)
    with pytest.raises(TypeError, match=r"is a .*, and deltas are written into full tensors"):
        apply_deltas(twins.model, DeltaMessage(1, 0, []), 0)
    engine = Tied().bfloat16()  # whose state dict has both names
    message = from_all(WeightDeltas(twins.model).changes())
    assert apply_deltas(engine, message, 0) == 1
    assert torch.equal(engine.head.weight, twins.twin.head.weight.bfloat16())
    fused = torch.zeros(5, 30).bfloat16()
    views: dict[str, torch.Tensor] = {}
    for name, weight in exported(twins.model).items():
        views[name] = weight if weight.ndim < 2 else torch.zeros(weight.shape[::-1]).bfloat16().T
    views["head.bias"] = fused[2, ::2][:13]
    apply_deltas(views, message, 0)
    check_same(views, exported(twins.model))


def test_targets_are_modules_and_any_views() -> None:
    run_ranks(_targets, 2)


# ---- files ----


def _write_some(folder: str) -> None:
    model = Model()
    shard_layers(model, FsdpContext())
    sender = WeightDeltas(model, delta_bytes=400)
    for _ in range(2):
        write_deltas(sender, folder, file_bytes=300)
        with torch.no_grad():
            model.layers[1].up.weight.mul_(2)


def test_a_damaged_file_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    run_ranks(_write_some, 2, str(tmp_path))
    shapes = {name: torch.zeros(w.shape).bfloat16() for name, w in Model().state_dict().items()}
    files = sorted((tmp_path / "version-00000001").glob("rank-*.safetensors"))
    assert len(files) > 4
    assert not list(tmp_path.glob("**/*.unfinished"))
    damages: list[Any] = [
        lambda content: content[:-1],
        lambda content: content[:5],
        lambda content: b"",
        lambda content: content + b"\0",
        lambda content: content[:-1] + bytes([content[-1] ^ 4]),
        lambda content: content.replace(b'"base":"0"', b'"base":"1"'),
    ]
    for file, damage in zip(files, damages, strict=False):
        content = file.read_bytes()
        file.write_bytes(damage(content))
        said = f"{file.name} is damaged: its {len(damage(content))} bytes have another checksum"
        with pytest.raises(CheckpointError, match=said):
            load_deltas(shapes, tmp_path)
        file.write_bytes(content)
    file.unlink()
    with pytest.raises(CheckpointError, match=f"{file.name}: No such file"):
        load_deltas(shapes, tmp_path)
    file.write_bytes(content)
    manifest = tmp_path / "version-00000002" / "manifest.json"
    text = manifest.read_text()
    for changed, said in [
        (text[:-5], "damaged"),
        (text.replace('"base": 1', '"base": 2'), "it is of version 2 against 2"),
        (text.replace("rank-00000-", "../rank-"), "outside of its folder"),
        (text.replace('"base"', '"bass"'), "base"),
    ]:
        manifest.write_text(changed)
        with pytest.raises(CheckpointError, match=f"manifest.json.*{said}"):
            load_deltas(shapes, tmp_path)
    assert not any(bool(target.any()) for target in shapes.values())
    manifest.unlink()  # a version without it is not complete
    assert load_deltas(shapes, tmp_path) == 1
    manifest.write_text(text)
    assert load_deltas(shapes, tmp_path, 1) == 2
    assert json.loads(text)["version"] == 2


def _cannot_write(folder: str) -> None:
    model, path = Model(), Path(folder)
    shard_layers(model, FsdpContext())
    sender = WeightDeltas(model, delta_bytes=SMALL)
    targets = others(exported(model))
    write = delta_files._write
    written: list[int] = []

    def full(file: Path, parts: Any) -> int:
        written.append(1)
        if dist.get_rank() and len(written) == 3:
            raise OSError(28, "No space left on device")
        return write(file, parts)

    version = 0
    for number in (1, 3):
        with (
            patch.object(delta_files, "_write", full),
            pytest.raises(RuntimeError, match=r"write_deltas: rank 1 could not write: .*No space"),
        ):
            write_deltas(sender, path, file_bytes=200)
        dist.barrier()
        assert not list((path / f"version-{number:08d}").iterdir())
        assert sender.version == number - 1
        write_deltas(sender, path)
        dist.barrier()
        version = load_deltas(targets, path, version)
        assert version == number + 1
        check_same(targets, exported(model))
        written.clear()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
    for _ in sender.changes() if dist.get_rank() else ():
        pass  # on one rank alone
    said = r"ranks would write versions \[5, 6\]: give them all dense=True and version=7"
    with pytest.raises(ValueError, match=said):
        write_deltas(sender, path)
    again = WeightDeltas(model)
    with pytest.raises(
        RuntimeError, match=r"rank 0 could not begin: .*has version 4, and 4 is to be written: name"
    ):
        write_deltas(again, path, version=4)
    assert load_deltas(targets, path) == 4  # which is still there
    write_deltas(again, path, version=5)
    dist.barrier()
    assert load_deltas(targets, path, 4) == 5
    check_same(targets, exported(model))


def test_a_rank_that_cannot_write_is_named_and_the_version_stays(tmp_path: Path) -> None:
    run_ranks(_cannot_write, 2, str(tmp_path))


# ---- a process group ----


def _transfer() -> None:
    trains = dist.get_rank() < 2
    model = Model()
    targets = others({name: w.bfloat16() for name, w in model.state_dict().items()})
    sender = None
    if trains:
        mesh = DeviceMesh("cpu", [0, 1])
        shard_layers(model, FsdpContext(mesh, layout=LAYOUTS["rows"]))
        sender = WeightDeltas(model, delta_bytes=SMALL)
    else:
        DeviceMesh("cpu", [0, 1])
    for bad, said in [
        (
            {**targets, "more": torch.ones(2)},
            "nobody sends 'more'",
        ),
        ({n: t for n, t in targets.items() if n != "head.bias"}, "'head.bias' is sent, and not"),
        ({**targets, "head.bias": torch.ones(13)}, "'head.bias' is sent as"),
    ]:
        prefix = "rank 2 could not receive them: .*" if trains else ""
        with pytest.raises(RuntimeError if trains else ValueError, match=prefix + said):
            DeltaTransfer(sender, None if trains else bad)
    transfer = DeltaTransfer(sender, None if trains else targets, round_bytes=200)

    def sync() -> int:
        transfer.run()
        sent: list[Any] = [exported(model) if trains else None]
        dist.broadcast_object_list(sent, 0)
        if trains:
            with torch.no_grad():
                model.layers[1].up.weight.mul_(2)
        else:
            check_same(targets, sent[0])
        return transfer.sent_bytes

    everything, few = sync(), sync()
    assert not trains or 0 < few < everything
    # A receiver fails when some has been written: it is neither the one version nor the next.
    write, written = delta_transfer.write, []

    def failing(*given: Any) -> None:
        written.append(1)
        if dist.get_rank() == 2 and len(written) == 2:
            raise ArithmeticError("planned")
        write(*given)

    with (
        patch.object(delta_transfer, "write", failing),
        pytest.raises(
            RuntimeError if trains else ArithmeticError,
            match="rank 2 could not send or receive: Arith.*planned" if trains else "planned",
        ),
    ):
        transfer.run()
    assert sender is None or sender.version == 2
    if trains:
        with torch.no_grad():
            model.layers[1].up.weight.mul_(0.25)  # as the receiver had it two versions before
    assert sync() == everything
    assert sync() == few
    # One that starts anew gets all, and others too.
    transfer = DeltaTransfer(sender, None if trains else targets)
    assert sync() > few or not trains
    with (
        patch.object(delta_transfer, "crc32", lambda content: dist.get_rank() + 1),
        pytest.raises(
            RuntimeError if trains else ValueError, match="has another checksum than what was sent"
        ),
    ):
        transfer.run()
    sync()


def test_a_transfer_that_failed_is_followed_by_one_of_all_values() -> None:
    run_ranks(_transfer, 3)


# ---- parts ----

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def chunks_of(draw: Any) -> tuple[tuple[int, ...], Chunk]:
    shape = draw(shapes)
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(
        draw(st.integers(1, size - offset)) for size, offset in zip(shape, offsets, strict=True)
    )
    return shape, Chunk(offsets, sizes)


@given(chunks_of())
def test_positions_in_a_chunk_are_those_in_the_full_tensor(
    drawn: tuple[tuple[int, ...], Chunk],
) -> None:
    shape, chunk = drawn
    expected = chunk.of(full_chunk(shape), torch.arange(prod(shape)).view(shape)).reshape(-1)
    positions = deltas._Positions(shape, chunk)
    assert positions(torch.arange(chunk.numel)).tolist() == expected.tolist()
    assert positions.dtype == torch.int32
    are_adjacent = bool((expected.diff() == 1).all())
    assert positions.first == (int(expected[0]) if are_adjacent else None)


@given(st.sampled_from([1, 2, 4, 8]), st.lists(st.booleans(), max_size=40), st.integers(0, 3))
def test_changes_are_found_in_words_and_beside_them(
    itemsize: int, changes: list[bool], offset: int
) -> None:
    dtype = delta_format._BITS[itemsize]
    before = torch.arange(len(changes) + offset).to(dtype)[offset:]
    current = before ^ torch.tensor(changes, dtype=dtype)
    expected = [place for place, is_changed in enumerate(changes) if is_changed]
    assert deltas._changed_places(current, before).tolist() == expected


def test_large_tensors_have_large_positions() -> None:
    shape = (1 << 20, 1 << 12)
    for size, first in ((1 << 12, True), (1 << 11, False)):
        positions = deltas._Positions(shape, Chunk(((1 << 20) - 2, 0), (2, size)))
        assert positions(torch.tensor([size])).tolist() == [(1 << 32) - (1 << 12)]
        assert positions.dtype == torch.int64
        assert (positions.first is not None) == first
    assert delta_format.index_dtype(((1 << 31) - 1,)) == torch.int32
    assert delta_format.index_dtype((1 << 31,)) == torch.int64


DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool]


@settings(max_examples=60)
@given(
    shapes,
    st.sampled_from(DTYPES),
    st.sampled_from([torch.bfloat16, torch.float32, torch.float8_e5m2]),
    st.integers(1, 60),
    st.lists(st.tuples(st.integers(0, 624), st.booleans()), max_size=5),
    st.booleans(),
)
def test_deltas_are_small_and_say_what_changed_and_nothing_else(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    sent_dtype: torch.dtype,
    delta_bytes: int,
    edits: list[tuple[int, bool]],
    dense: bool,
) -> None:
    model = nn.Module()
    model.register_buffer("w", (torch.arange(prod(shape)) % 7).to(dtype).view(shape))
    sent_as = sent_dtype if dtype.is_floating_point else dtype
    sender = WeightDeltas(model, dtype=sent_dtype, delta_bytes=delta_bytes)
    target = {"w": model.w.to(sent_as)}
    apply_deltas(target, sender.changes(), 0)
    before = target["w"].clone().view(-1)
    for place, is_changed in edits:
        flat = model.w.view(-1)
        flat[place % flat.numel()] = flat[place % flat.numel()].float() * (0 if is_changed else 1)
    wanted = model.w.to(sent_as).view(-1)
    message = sender.changes(dense=dense)
    found = list(message)
    assert (message.version, message.base) == (2, 0 if dense else 1)
    places: list[int] = []
    for delta in found:
        positions = delta.positions()
        assert positions.dtype == torch.int32
        places += positions.tolist()
        extra = 0 if delta.indices is None else delta.indices.nbytes
        both = sent_as.itemsize + 4
        assert delta.values.nbytes + extra <= max(delta_bytes, both)
        bits = delta_format.bits_of(delta.values)
        assert torch.equal(bits, delta_format.bits_of(wanted)[positions.long()])
        if delta.indices is not None and not dense:
            assert bool((bits != delta_format.bits_of(before)[positions.long()]).all())
    assert places == sorted(set(places))
    changed = (
        (delta_format.bits_of(before) != delta_format.bits_of(wanted)).nonzero().view(-1).tolist()
    )
    assert set(changed) <= set(places)
    assert not dense or places == list(range(prod(shape)))
    assert dense or bool(changed) == bool(places)
    assert apply_deltas(target, DeltaMessage(2, message.base, found), 1) == 2
    assert torch.equal(delta_format.bits_of(target["w"].view(-1)), delta_format.bits_of(wanted))


# ---- an accelerator ----


def on_the_device(options: dict[str, Any], **how: Any) -> None:
    """The host takes what changed when the device has not begun the step."""
    program = Program(**how)
    sender = WeightDeltas(program.model, delta_bytes=SMALL, **options)
    shapes = {name: tensor.shape for name, tensor in program.model.named_parameters()}
    targets = {name: torch.zeros(shape).bfloat16() for name, shape in shapes.items()}
    for number in range(4):
        if number:
            program.backward()
            program.step()
        message = sender.changes()
        sent = [(delta, delta.values.cpu(), delta.positions().cpu()) for delta in message]
        own = [delta._replace(values=v, indices=i) for delta, v, i in sent]
        check_deltas(targets, own, is_dense=False)
        for delta in own:
            write(targets, delta)
        for name, weight in program.model.named_parameters():
            for chunk, values in local_chunks(weight):
                there = chunk.of(full_chunk(weight.shape), targets[name])
                assert torch.equal(there, values.bfloat16().cpu()), (number, name)
        assert sender.version == message.version == number + 1


ON_THE_DEVICE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "beside the shards": ({}, {}),
    "on the host": ({"on_host": True}, {}),
    "overlapped": (
        {},
        {
            "shard_options": {"offload_policy": CPUOffloadPolicy()},
            "optimizer_options": {"overlap": OverlapPolicy()},
        },
    ),
}
ASIDE = "with (m := torch.get_device_module(values.device)).stream(m.Stream()): "
CAST = "current = bits_of(values[at : at + step].to(dtype, copy=True))"
COMPARED = "places = _changed_places(current, before.to(current.device, non_blocking=True))"
FOUND = {
    "a cast waits for nobody": (
        "beside the shards",
        Defect(deltas.OutgoingDeltas, "_compared", CAST, "", new=ASIDE + CAST),
    ),
    "a copy waits for nobody": (
        "on the host",
        Defect(deltas.OutgoingDeltas, "_compared", COMPARED, "", new=ASIDE + COMPARED),
    ),
}


@pytest.mark.parametrize("name", ON_THE_DEVICE)
def test_a_device_with_streams_has_no_races(name: str) -> None:
    options, how = ON_THE_DEVICE[name]
    with running(EmulatedDevice()) as device, fake_ranks(4):
        on_the_device(options, **how)
    assert not device.findings, device.findings


@pytest.mark.parametrize("name", FOUND)
def test_a_comparison_that_does_not_wait_is_found(name: str) -> None:
    mode, defect = FOUND[name]
    options, how = ON_THE_DEVICE[mode]
    with running(EmulatedDevice()) as device, fake_ranks(4), defect.plant():
        on_the_device(options, **how)
    assert device.findings


def test_a_job_that_starts_again_has_other_versions(tmp_path: Path) -> None:
    model = nn.Linear(3, 2).bfloat16()
    targets = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    version = 0
    with patch.object(deltas, "time", lambda: 1000.5):
        sender = deltas.WeightDeltas(model)
    for _ in range(2):
        write_deltas(sender, tmp_path / "old")
    version = load_deltas(targets, tmp_path / "old", version)
    assert version == 1000500001
    with patch.object(deltas, "time", lambda: 1060.5):
        sender = deltas.WeightDeltas(model)
    for _ in range(2):
        with torch.no_grad():
            model.weight.mul_(2)
        message = sender.changes()
        sent = list(message)
    with pytest.raises(
        ValueError, match=r"since version 1060500000, and these weights are of version 1000500001"
    ):
        apply_deltas(targets, DeltaMessage(message.version, message.base, sent), version)


# ---- what must not pass in silence ----


def one_model(size: int = 2) -> tuple[nn.Module, Any, dict[str, torch.Tensor]]:
    model = nn.Linear(3, size).bfloat16()
    return model, WeightDeltas(model), others(dict(model.named_parameters()))


def test_after_a_commit_that_failed_all_values_are_sent() -> None:
    model, sender, targets = one_model(8)
    version = apply_deltas(targets, sender.changes(), 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1)[0] += 1
    message = sender.begin()
    list(message)
    real, calls = torch.Tensor.index_copy_, []

    def fails(self: torch.Tensor, *given: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("planned")
        return real(self, *given)

    with (
        patch.object(torch.Tensor, "index_copy_", fails),
        pytest.raises(torch.OutOfMemoryError, match="planned"),
    ):
        message.commit()
    message = sender.changes()
    assert message.base == 0
    apply_deltas(targets, message, version)
    check_same(targets, dict(model.named_parameters()))


def test_a_message_is_iterated_once() -> None:
    _, sender, targets = one_model()
    message = sender.changes()
    assert sum(delta.nbytes for delta in message)
    with pytest.raises(RuntimeError, match="version 1 was iterated before: keep its deltas in a l"):
        apply_deltas(targets, message, 0)


def test_messages_of_ranks_are_merged_if_they_are_of_one_version() -> None:
    delta = WeightDelta("w", (2,), torch.ones(1), None, 0)
    other = delta._replace(start=1)
    merged = DeltaMessage.merged([DeltaMessage(3, 2, [delta]), DeltaMessage(3, 2, [other])])
    assert (merged.version, merged.base, list(merged)) == (3, 2, [delta, other])
    with pytest.raises(ValueError, match=r"ranks send \(version, base\) \[\(3, 1\), \(3, 2\)\]"):
        DeltaMessage.merged([DeltaMessage(3, 2, [delta]), DeltaMessage(3, 1, [other])])


def test_of_a_dense_message_no_part_may_come_twice() -> None:
    half = WeightDelta("w", (4,), torch.ones(2), None, 0)
    targets = {"w": torch.zeros(4)}
    with pytest.raises(ValueError, match="of 'w' some values are not sent, and others twice"):
        apply_deltas(targets, DeltaMessage(1, 0, [half, half]), 0)
    assert not targets["w"].any()
    apply_deltas(targets, DeltaMessage(1, 0, [half, half._replace(start=2)]), 0)


@pytest.mark.parametrize(
    ("targets", "error", "says"),
    [
        ({"w": torch.zeros(2, device="meta")}, TypeError, "'w' is on the meta device"),
        ({"w": torch.zeros(1).expand(2)}, TypeError, "'w' is expanded"),
    ],
)
def test_targets_without_memory_are_refused(
    targets: dict[str, torch.Tensor], error: type[Exception], says: str
) -> None:
    delta = WeightDelta("w", (2,), torch.ones(2), None, 0)
    with pytest.raises(error, match=says):
        apply_deltas(targets, DeltaMessage(1, 0, [delta]), 0)


def test_tied_targets_of_weights_that_are_not_tied_are_refused() -> None:
    tied = torch.zeros(2)
    sent = [WeightDelta(name, (2,), torch.ones(2), None, 0) for name in "ab"]
    with pytest.raises(ValueError, match="'a' and 'b' are sent apart, and their targets are tied"):
        apply_deltas({"a": tied, "b": tied}, DeltaMessage(1, 0, sent), 0)


def test_modules_get_values_whatever_their_state_dict_is(tmp_path: Path) -> None:
    model, sender, _ = one_model()
    target = nn.Linear(3, 2).bfloat16()
    target._register_state_dict_hook(
        lambda module, state, *_: state.update({name: t.clone() for name, t in state.items()})
    )
    write_deltas(sender, tmp_path)
    (tmp_path / "version-00000002_1").mkdir()
    (tmp_path / "version-00000002_1" / "manifest.json").write_text("")
    load_deltas(target, tmp_path)
    assert torch.equal(target.weight, model.weight)


def test_a_folder_with_later_versions_is_refused(tmp_path: Path) -> None:
    model, sender, _ = one_model()
    write_deltas(sender, tmp_path, version=7)
    with pytest.raises(RuntimeError, match="has version 7, and 1 is to be written: name another"):
        write_deltas(WeightDeltas(model), tmp_path)
    with pytest.raises(ValueError, match="first_version=0: give 1 or more"):
        deltas.WeightDeltas(model, first_version=0)


def test_the_first_message_may_be_sent_without_autograd() -> None:
    model, sender, targets = one_model()
    with torch.inference_mode():
        version = apply_deltas(targets, sender.changes(), 0)
    with torch.no_grad():
        model.weight.mul_(2)
    apply_deltas(targets, sender.changes(), version)
    check_same(targets, dict(model.named_parameters()))


def _apart(folder: str) -> None:
    rank = dist.get_rank()
    model = nn.Linear(3, 2).bfloat16()
    targets = others(dict(model.named_parameters())) if rank == 0 else None
    # A model without units is sent by the first rank alone.
    sender = deltas.WeightDeltas(model) if rank == 1 else None
    kind: Any = RuntimeError if rank else ValueError
    with pytest.raises(kind, match="nobody sends 'weight'"):
        DeltaTransfer(sender, targets)
    plain = deltas.WeightDeltas(model)
    write_deltas(plain, Path(folder) / str(rank))  # as of DDP
    assert (Path(folder) / str(rank)).exists() == (rank == 0)
    # Two models that have the same names.
    meshes = [DeviceMesh("cpu", [each]) for each in (0, 1)]
    fully_shard(model, FsdpContext(meshes[rank]))
    with pytest.raises(
        (ValueError, RuntimeError), match=r"'weight' is sent by ranks \(0,\) and by"
    ):
        DeltaTransfer(deltas.WeightDeltas(model), targets)


def test_weights_that_nobody_sends_or_two_models_are_refused(tmp_path: Path) -> None:
    run_ranks(_apart, 2, str(tmp_path))


def _replica_fails(folder: str) -> None:
    twins = Twins(Model, shard_layers, **COPIES)
    with patch.object(deltas, "time", lambda: 1000.0 + dist.get_rank()):
        sender = deltas.WeightDeltas(twins.model)
    assert sender.next_version == 1_000_000_000
    with pytest.raises(RuntimeError, match="rank 0 could not begin: "):
        write_deltas(sender, Path(folder) / "file")
    assert sender.version == 0
    write_deltas(sender, Path(folder) / "folder")
    assert sender.version == 1_000_000_001


def test_replicas_fail_together(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run_ranks(_replica_fails, 4, str(tmp_path))
