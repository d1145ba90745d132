"""``print(ctx)`` shows the units of a context, their sizes and what is kept of them, as a table."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_overlap import FsdpContext, TensorAtomic, fully_shard
from support.fake_group import run_on_fake_group
from support.ranks import run_ranks
from support.zoo import Model, shard_layers


def table() -> str:
    ctx = FsdpContext()
    assert repr(ctx).splitlines() == [
        "FsdpContext of 0 units",
        "mesh all ranks; layout Flat(); prefetch 1",
    ]
    model = Model()
    shard_layers(model, ctx)
    before = repr(ctx)
    assert not any("groups" in vars(mesh_info) for mesh_info in ctx.mesh_infos)  # asks nobody
    model(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()
    assert repr(ctx) == str(ctx) == before
    return before


def test_a_context_shows_its_units_as_a_table() -> None:
    shown, other = run_ranks(table, 2)
    assert shown == other
    assert shown.splitlines() == [
        "FsdpContext of 4 units: 21 parameters of 925 elements, 3.6 KiB whole, 1.9 KiB on this "
        "rank",
        "mesh all ranks; layout Flat(); prefetch 1",
        "unit                       parameters  elements  dtype     whole   here  mesh   shards"
        "  kept whole",
        "layers.0 ... layers.2 (3)           6       252  float32  1008 B  544 B  cpu 2  equal "
        "  no",
        "Model                               3       169  float32   676 B  352 B  cpu 2  equal "
        "  until backward",
    ]


def settings() -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shard"))

    def layout(fqn: str, spec: object) -> TensorAtomic:
        return TensorAtomic()

    ctx = FsdpContext(
        mesh,
        layout=layout,
        prefetch=2,
        shard_optimizer_over_replicas=True,
        separate_reduce_scatter_group=False,
    )
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    bf16 = MixedPrecisionPolicy(torch.bfloat16)
    fully_shard(model[0], ctx, reshard_after_forward=False, mp_policy=bf16)
    fully_shard(model[1], ctx).set_zero_stage(2)
    fully_shard(model[2], ctx).set_zero_stage(1)
    fully_shard([model[3], model[4]], ctx, mesh=mesh._flatten("all"), reshard_after_forward=2)
    with torch.device("meta"):
        model[5] = nn.Linear(4, 4)
    fully_shard(model[5], ctx)
    fully_shard(model, ctx).set_reshard_after_backward(False, recurse=False)
    assert dist.get_world_size() == 4
    return repr(ctx).splitlines()


def test_the_table_says_what_was_chosen() -> None:
    _, options, _, *rows = run_on_fake_group(settings, 4)
    end = [row.split()[0] for row in rows].index("dtypes")
    rows, dtypes = rows[:end], rows[end:]
    assert options == (
        "mesh cpu 2 x 2 (copies x shard); layout layout; prefetch 2; "
        "one group for gathers and reductions; shard optimizer over replicas"
    )
    ends = {row.split("  ")[0]: row.rstrip() for row in rows}
    assert "float32 as bfloat16" in ends["0"]
    assert ends["0"].endswith("cpu 2 x 2 (copies x shard)  ragged  until backward")
    assert ends["1"].endswith("always (stage 2)")
    assert ends["2"].endswith("always (stage 1)")
    assert ends["3, 4"].endswith("cpu 4 (all)                 ragged  1/2 until backward")
    assert "  meta  " in ends["5"]
    assert ends["5"].endswith("  no")
    assert ends["Sequential"].endswith("  until backward and after it")
    assert [row.split() for row in dtypes] == [
        "dtypes at rest gathered computed accumulated reduced stepped".split(),
        "0 float32 bfloat16 bfloat16 float32 float32".split(),
        "1 ... 5 (4) float32 float32 float32 float32 float32".split(),
    ]
