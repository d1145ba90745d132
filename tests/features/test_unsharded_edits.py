"""What is done to unsharded parameters is refused by name, never lost; and so is reading them after
their memory was freed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from fsdp_overlap import FsdpContext, fully_shard
from fsdp_overlap.debug import check_parameters
from fsdp_overlap.tensor import flat_buffer
from support import zoo
from support.fake_group import run_on_fake_group
from support.ranks import run_ranks
from support.twins import Twins
from support.zoo import VOCABULARY, WIDTH, shard_layers

Edit = Callable[[nn.Module], Any]


class Layer(nn.Module):
    """Does something to its weight before it uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.edit: Edit | None = None
        self.kept: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.edit is not None:
            self.edit(self.linear)
        return x + torch.tanh(self.linear(x))


class Model(zoo.Model):
    def __init__(self, layers: int = 2) -> None:
        super().__init__(0)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))


def clamp(linear: Any) -> None:
    with torch.no_grad():
        linear.weight.clamp_(-0.01, 0.01)


def clamp_data(linear: Any) -> None:
    linear.weight.data.clamp_(-0.01, 0.01)


def clamp_in_inference_mode(linear: Any) -> None:
    with torch.inference_mode():
        linear.weight.clamp_(-0.01, 0.01)


def clamp_a_view(linear: Any) -> None:
    linear.weight.detach()[1:].clamp_(-0.01, 0.01)


def average(linear: Any) -> None:
    """As a vector quantizer's codebook."""
    with torch.no_grad():
        linear.weight.mul_(0.9).add_(torch.rand(WIDTH, WIDTH), alpha=0.1)


def assign_data(linear: Any) -> None:
    linear.weight.data = torch.renorm(linear.weight.data, 2, 0, 0.1)


def replace(linear: Any) -> None:
    linear.weight = nn.Parameter(linear.weight.detach() * 0.5)


def register_again(linear: Any) -> None:
    linear.last_weight = linear.weight


EDITED = "parameter 'linear.weight' of unit 'layers.1' was edited in place"
IN_FORWARD: dict[Edit, str] = {
    clamp: EDITED,
    clamp_data: EDITED,
    clamp_in_inference_mode: EDITED,
    clamp_a_view: EDITED,
    average: EDITED,
    assign_data: "parameter 'linear.weight' of unit 'layers.1' was given other memory",
    replace: "parameter 'weight' of unit 'layers.1' was replaced",
    register_again: "parameter 'linear.weight' of unit 'layers.1' was registered again .* "
    "'last_weight'",
}


def edits_in_forward() -> None:
    for edit, message in IN_FORWARD.items():
        twins = Twins(Model, shard_layers)
        before = [parameter.full_tensor() for parameter in twins.model.parameters()]
        layer = twins.model.layers[1]
        tokens, targets = next(twins.batches(1))
        layer.edit = edit
        with pytest.raises(RuntimeError, match=message):
            twins.losses(tokens, targets)
        layer.edit = None
        if edit is register_again:
            del layer.linear.last_weight
        for parameter, value in zip(twins.model.parameters(), before, strict=True):
            assert torch.equal(parameter.full_tensor(), value), edit
        twins.train(2)


def test_edits_in_forward_are_refused_by_name_and_leave_nothing_behind() -> None:
    run_ranks(edits_in_forward, 2)


def edits_elsewhere() -> None:
    # Of the second mode, and of a forward that is not the first.
    twins = Twins(Model, shard_layers)
    twins.train(2)
    layer = twins.model.layers[1]
    tokens, _ = next(twins.batches(1))
    layer.edit = clamp_data
    twins.model.eval()
    with pytest.raises(RuntimeError, match=EDITED), torch.no_grad():
        twins.model(twins.mine(tokens))
    layer.edit = clamp
    twins.model.train()
    with pytest.raises(RuntimeError, match=EDITED):
        twins.model(twins.mine(tokens))

    # Of a unit that is kept whole, which then has the values of the shards again.
    twins = Twins(Model, lambda m, ctx: shard_layers(m, ctx, reshard_after_forward=False))
    twins.model.layers[1].edit = clamp
    with pytest.raises(RuntimeError, match=EDITED):
        twins.model(twins.mine(tokens))
    twins.model.layers[1].edit = None
    twins.train(1)

    # Between unshard() and reshard().
    twins = Twins(Model, shard_layers)
    layer = twins.model.layers[1]
    layer.unshard()
    clamp(layer.linear)
    with pytest.raises(RuntimeError, match=EDITED):
        layer.reshard()
    twins.train(1)

    # In a recomputed forward, and compiled.
    twins = Twins(Model, shard_layers)
    layer = twins.model.layers[1]
    layer.compile(backend="aot_eager")
    twins.train(2)
    layer.edit = clamp
    with pytest.raises(RuntimeError, match=EDITED):
        twins.model(twins.mine(tokens))


def test_edits_are_refused_in_every_mode() -> None:
    run_ranks(edits_elsewhere, 2)


def edits_in_backward() -> None:
    def by_hook(model: Any) -> None:
        model.layers[1].register_full_backward_hook(lambda module, *_: clamp(module.linear))

    def by_step_in_backward(model: Any) -> None:
        def step(parameter: nn.Parameter) -> None:
            with torch.no_grad():
                parameter.add_(parameter.grad, alpha=-0.1)

        model.layers[1].linear.weight.register_post_accumulate_grad_hook(step)

    for add in (by_hook, by_step_in_backward):

        def shard(model: Any, ctx: FsdpContext, add: Callable[[Any], None] = add) -> None:
            add(model)
            shard_layers(model, ctx)

        twins = Twins(Model, shard)
        losses = twins.losses(*next(twins.batches(1)))
        with pytest.raises(RuntimeError, match=EDITED):
            losses[0].backward()
        # It ends as any other: gradients are right, and nothing is left.
        losses[1].backward()
        twins.check_gradients()
        twins.check_rest()


def test_edits_in_backward_are_refused_once_it_is_done() -> None:
    run_ranks(edits_in_backward, 2)


def edit_in_a_backward(of: int) -> None:
    """Backwards look for edits at some times, and forwards always."""
    twins = Twins(Model, shard_layers)
    batch = next(twins.batches(1))
    for _ in range(1, of):
        twins.losses(*batch)[0].backward()
    linear = twins.model.layers[1].linear
    handle = linear.register_full_backward_hook(lambda module, *_: clamp(module))
    loss, _ = twins.losses(*batch)
    handle.remove()
    loss.backward()
    with pytest.raises(RuntimeError, match=EDITED):
        twins.losses(*batch)


@pytest.mark.parametrize("of", [3, 5, 6, 7])
def test_an_edit_in_a_backward_that_does_not_look_is_found_in_the_next_forward(of: int) -> None:
    run_ranks(edit_in_a_backward, 2, of)


def edits_of_a_dtensor() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    for edit in (
        lambda linear: linear.weight.detach().clamp_(-0.01, 0.01),
        lambda linear: linear.weight.to_local().detach().clamp_(-0.01, 0.01),
    ):
        layer = Layer()
        weight = distribute_tensor(layer.linear.weight.detach(), mesh["tp"], [Shard(0)])
        layer.linear.weight = nn.Parameter(weight)
        layer.linear.bias = None
        fully_shard(layer, FsdpContext(mesh["dp"]))
        x = DTensor.from_local(torch.ones(2, WIDTH), mesh["tp"])
        assert layer(x).shape == (2, WIDTH)
        layer.edit = edit
        with pytest.raises(RuntimeError, match=r"'linear.weight' of unit 'Layer' was edited"):
            layer(x)


def test_edits_of_tensor_parallel_parameters_are_refused() -> None:
    run_on_fake_group(edits_of_a_dtensor, 2)


class Quantizer(nn.Module):
    """Averages its codebook, a buffer, in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("codebook", torch.rand(4, WIDTH))
        self.codebook: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        best = torch.cdist(x.detach(), self.codebook).argmin(-1)
        if self.training:
            self.codebook[best] = 0.9 * self.codebook[best] + 0.1 * x.detach()
        return x + (self.codebook[best] - x).detach()


class Recomputed(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return y


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


HARMLESS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.Sequential(linear(), nn.BatchNorm1d(WIDTH)),
    "batch norm, recomputed": lambda: Recomputed(linear(), nn.BatchNorm1d(WIDTH)),
    "old spectral norm": lambda: nn.utils.spectral_norm(linear()),
    "spectral norm": lambda: parametrizations.spectral_norm(linear()),
    "old weight norm": lambda: nn.utils.weight_norm(linear()),
    "weight norm": lambda: parametrizations.weight_norm(linear()),
    "vector quantizer": Quantizer,
    "lstm": lambda: nn.LSTM(WIDTH, WIDTH),
}


def seeded(build: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(linear(), build())


def what_edits_no_parameter() -> None:
    rows = torch.rand(5, WIDTH, generator=torch.Generator().manual_seed(1))
    for name, build in HARMLESS.items():
        model, twin = (seeded(build) for _ in range(2))
        ctx = FsdpContext()
        fully_shard(model[1], ctx)
        fully_shard(model, ctx)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin)]
        for _ in range(3):
            for each, optimizer in zip((model, twin), optimizers, strict=True):
                out = each(rows)  # the same on every rank, so that buffers are too
                (out if isinstance(out, torch.Tensor) else out[0]).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        with check_parameters(model):
            model(rows)
        twin(rows)
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours.full_tensor(), theirs.detach(), msg=name)
        for ours, theirs in zip(model.buffers(), twin.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs, msg=name)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
def test_norms_and_quantizers_that_edit_buffers_train_as_unsharded() -> None:
    run_ranks(what_edits_no_parameter, 2)


class Normed(zoo.Model):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, max_norm=1.0)


def renormalize(weight: torch.Tensor, rows: torch.Tensor) -> None:
    """What ``max_norm`` does, on a sharded weight, to the rows that any rank will look up."""
    with torch.no_grad():
        norms = weight.square().sum(dim=1, keepdim=True).sqrt()
        scale = torch.where(norms > 1.0, 1.0 / (norms + 1e-7), 1.0)
        wanted = torch.zeros_like(scale, dtype=torch.bool)
        wanted[rows] = True
        weight.mul_(torch.where(wanted, scale, 1.0))


def embedding_with_a_norm() -> None:
    twins = Twins(Normed, shard_layers)
    tokens, targets = next(twins.batches(1))
    with pytest.raises(RuntimeError, match=r"'embedding.weight' of unit 'Normed' was edited"):
        twins.losses(tokens, targets)
    twins.model.embedding.max_norm = None
    for tokens, targets in twins.batches(3):
        renormalize(twins.model.embedding.weight, tokens)
        loss, twin_loss = losses_of(twins, tokens, targets)
        loss.backward()
        twin_loss.backward()
        twins.step()
        twins.check_parameters()


def losses_of(
    twins: Twins, tokens: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The twin sees the rows of all ranks at once, and so renormalizes before it looks up any."""
    losses = []
    for model, own in ((twins.model, twins.mine), (twins.twin, lambda whole: whole)):
        scores = model(own(tokens))
        losses.append(nn.functional.cross_entropy(scores.flatten(0, 1), own(targets).flatten()))
    return losses[0], losses[1]


def test_renormalizing_the_sharded_weight_trains_as_max_norm_does_unsharded() -> None:
    run_ranks(embedding_with_a_norm, 2)


def keep(linear: Any, kept: list[torch.Tensor]) -> None:
    kept[:] = [linear.weight, linear.weight[:2], linear.weight.data]


def reads_of_freed_memory() -> None:
    kept: list[torch.Tensor] = []
    twins = Twins(Model, shard_layers)
    layer = twins.model.layers[0]
    layer.edit = lambda linear: keep(linear, kept)
    with check_parameters(twins.model):
        twins.train(2)  # which is nothing to complain of
    where = "aten.* uses parameter 'linear.weight' of unit 'layers.0'"
    for tensor in kept:
        with check_parameters(twins.model):
            assert torch.zeros_like(tensor).shape == tensor.shape
            with pytest.raises(RuntimeError, match=where):
                tensor.sum()
            with pytest.raises(RuntimeError, match=where):
                torch._foreach_mul([tensor], 2)
    layer.edit = clamp_data
    with (
        check_parameters(twins.model),
        pytest.raises(RuntimeError, match=r"aten.clamp_.* edits parameter 'linear.weight' of unit"),
    ):
        twins.model(torch.zeros(1, 1, dtype=torch.long))
    with pytest.raises(ValueError, match="a Linear without units"):
        check_parameters(nn.Linear(1, 1))


def test_a_debug_mode_finds_reads_of_freed_memory_and_every_edit() -> None:
    run_ranks(reads_of_freed_memory, 2)


def guarded_memory() -> None:
    """A stand-in for what torch has in its builds for GPUs."""
    messages: dict[int, str] = {}
    sizes = []
    with pytest.MonkeyPatch.context() as patch:

        def refuse(storage: int, message: str) -> None:
            messages[storage] = message

        patch.setattr(flat_buffer, "refuse_access", refuse)
        patch.setattr(flat_buffer, "allow_access", messages.pop)
        twins = Twins(Model, shard_layers)
        storage = twins.model.layers[1]._fsdp_unit.param_groups[0].full.flat.untyped_storage()

        def look(linear: Any) -> None:
            assert storage._cdata not in messages
            sizes.append(storage.nbytes())

        twins.model.layers[1].edit = look
        twins.train(2)
    assert all(sizes)
    assert storage.nbytes() == 0
    assert re.search("unit 'layers.1'.* after its memory was freed", messages[storage._cdata])


def test_memory_is_guarded_while_it_is_freed_where_torch_can() -> None:
    run_ranks(guarded_memory, 2)


def freed_memory(device: str) -> None:
    kept: list[torch.Tensor] = []
    model = Model().to(device)
    shard_layers(model, FsdpContext(init_device_mesh(device, (1,))))
    model.layers[0].edit = lambda linear: keep(linear, kept)
    for _ in range(2):
        model(torch.zeros(1, 2, dtype=torch.long, device=device)).sum().backward()
        for tensor in kept:
            with pytest.raises(RuntimeError, match=r"unit 'layers.0'.* after its memory was freed"):
                tensor.sum()


@pytest.mark.skipif(flat_buffer.allow_access is None, reason="this build of torch cannot refuse")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_reading_freed_memory_is_an_error(device: str) -> None:
    run_ranks(freed_memory, 1, device, backend="nccl" if device == "cuda" else "gloo")
