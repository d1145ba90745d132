"""Param groups of parameters with FSDP2's tensor extensions.

Each sharded parameter has a local tensor of its own, of the class that the user gave. There is no
shard buffer and no full buffer: a gather copies in and out. Gradients are plain, and are reduced as
those of other rows are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_overlap.comm.collectives import CollectivePair, Collectives
from fsdp_overlap.comm.comm_streams import HostWorkHandle
from fsdp_overlap.desync.order_check import START
from fsdp_overlap.engine.grads import ParamGroupGradients
from fsdp_overlap.engine.mesh import MeshInfo, ParamGroupEdits
from fsdp_overlap.engine.options import UnitOptions, UnitSettings
from fsdp_overlap.engine.param import ParamInfo, hash_of, parameter_like, tp_local_tensor
from fsdp_overlap.engine.param_group import ParamGroup
from fsdp_overlap.features.extensions.extension import Extension, ExtensionContext, GatheredTensors
from fsdp_overlap.features.extensions.gather import ExtensionGather
from fsdp_overlap.features.rows.param_group import RowsParamGroup, row_shard
from fsdp_overlap.features.rows.plan import RowsPlan
from fsdp_overlap.features.rows.row_tensor import RowTensor, read_full_scalars
from fsdp_overlap.tensor.ragged_dtensor import ShardedParam, users_attributes
from fsdp_overlap.tensor.subclasses import inner_tensors


class ExtensionEdits(ParamGroupEdits):
    """Counts what ops do to sharded parameters, and what is done to the tensors in them."""

    __slots__ = ("_noted", "tensors")

    def __init__(self, mesh_info: MeshInfo) -> None:
        self.tensors: Sequence[torch.Tensor] = ()
        super().__init__(mesh_info)

    @property
    def values(self) -> int:
        return self._noted + sum(tensor._version for tensor in self.tensors)

    @values.setter
    def values(self, value: int) -> None:
        self._noted = value

    def record_values(self) -> None:
        self._noted += 1


class ExtensionGradients(ParamGroupGradients):
    """Gradients that autograd may give as tensors of a class of their own."""

    def copy_in_all(self) -> None:
        self.copy_in(range(self.count))


class ExtensionParamGroup(RowsParamGroup):
    """Parameters in rows whose class says how they are gathered.

    Only a gather can make the unsharded parameters. One is done for that alone, in the lazy
    initialization of the context. Later ones fill what it made.
    """

    is_extension = True
    full: GatheredTensors

    def __init__(
        self,
        plan: RowsPlan,
        owned: Sequence[ParamInfo],
        mesh_info: MeshInfo,
        device: torch.device,
        options: UnitOptions,
    ) -> None:
        self._mp_policy = options.mp_policy
        self._is_made = False
        self._gather: ExtensionGather | None = None
        super().__init__(plan, owned, mesh_info, device, options)

    # At rest

    def allocate(self, device: torch.device, like: Sequence[torch.Tensor]) -> None:
        super().allocate(device, like)
        locals_ = [parameter._local_tensor for parameter in self.sharded_parameters]
        self._edits.tensors = [part for local in locals_ for part in (local, *inner_tensors(local))]

    def _make_buffers(self, device: torch.device) -> Sequence[ShardedParam]:
        self.edits = self._edits = ExtensionEdits(self.mesh_info)
        self.full = GatheredTensors(device)
        dtype = self.plan.specs[0].dtype
        at_rest = device if self.is_meta else self.rest_device
        self.shard = torch.empty(0, dtype=dtype, device=at_rest)
        if self.sharded_parameters:
            locals_ = [
                torch.empty_like(parameter._local_tensor, device=at_rest)
                for parameter in self.sharded_parameters
            ]
        else:
            values = [tp_local_tensor(parameter).detach() for parameter in self.parameters]
            locals_ = [self._room_for(value, at_rest) for value in values]
        rows: list[ShardedParam] = [
            RowTensor.wrap(local, self.mesh_info.spec(item, row_shard(item, 0), dtype), self._edits)
            for local, item in zip(locals_, self.owned, strict=True)
        ]
        for parameter in rows:
            read_full_scalars(parameter.device_mesh)
        return rows

    def _room_for(self, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a tensor like this rank's rows of ``value``. It has memory for as many rows as any
        rank has, as in FSDP2, and is made by the operations that extensions of FSDP2 know."""
        size, ranks = value.size(0), self.plan.world_size
        rows = -(-size // ranks)
        padded = value.new_zeros((rows, *value.shape[1:])).to(device)
        rank = self.mesh_info.plan_rank
        return padded.narrow(0, 0, min((rank + 1) * rows, size) - min(rank * rows, size))

    def init_shard(self, values: Sequence[torch.Tensor]) -> None:
        rank = self.mesh_info.plan_rank
        for sharded, value in zip(self.sharded_parameters, values, strict=True):
            chunks = value.chunk(self.plan.world_size)
            if rank < len(chunks) and chunks[rank].numel():
                sharded._local_tensor.copy_(chunks[rank])

    def give_memory(self) -> None:
        """Let go of the original parameters. Until the first gather others, without memory, stand
        for the unsharded ones."""
        self._is_made = False
        self.use_parameters(
            [
                self._like(
                    item.parameter,
                    torch.empty(spec.shape, dtype=spec.dtype, device="meta"),
                    sharded,
                )
                for item, spec, sharded in zip(
                    self.owned, self.plan.specs, self.sharded_parameters, strict=True
                )
            ]
        )

    def materialize(self, device: torch.device) -> None:
        self.allocate(device, self.sharded_parameters)
        self.give_memory()

    @property
    def dtypes(self) -> str:
        locals_ = (parameter._local_tensor for parameter in self.sharded_parameters)
        kinds = {type(local).__name__ for local in locals_}
        return f"{super().dtypes} ({', '.join(sorted(kinds))})"

    @property
    def nbytes_at_rest(self) -> int:
        return sum(
            inner.nbytes
            for parameter in self.sharded_parameters
            for inner in inner_tensors(parameter._local_tensor)
        )

    def copy_values_of(self, other: ParamGroup) -> None:
        for mine, its in zip(self.sharded_parameters, other.sharded_parameters, strict=True):
            mine._local_tensor.copy_(its._local_tensor)
        self._edits.record_values()

    # Gathered

    def connect(
        self, post_forward_size: int | None, settings: UnitSettings, reduce_dtype: torch.dtype
    ) -> None:
        if self._gather is None or not self._is_made:
            contexts = self._extension_contexts()
            self._gather = ExtensionGather(
                [
                    Extension(f"parameter {spec.fqn!r} of unit {self.label!r}", each, context)
                    for spec, each, context in zip(
                        self.plan.specs, self.sharded_parameters, contexts, strict=True
                    )
                ]
            )
        super().connect(post_forward_size, settings, reduce_dtype)

    def _choose_collectives(self) -> Collectives:
        collectives, gather = super()._choose_collectives(), self._gather
        assert gather is not None
        gather.others = self.carriers
        return CollectivePair(gather.all_gather, collectives.reduce_scatter)

    def _extension_contexts(self) -> list[ExtensionContext]:
        return [
            ExtensionContext(
                self.mesh_info.shard_mesh,
                torch.Size(spec.shape),
                tuple(torch.empty(spec.shape, device="meta").stride()),
                item.module,
                self._mp_policy,
                self.compute_dtype,
                self.device,
            )
            for item, spec in zip(self.owned, self.plan.specs, strict=True)
        ]

    @torch.no_grad()
    def make_unsharded(self) -> bool:
        """Gather once, and make the unsharded parameters of that.

        Raises:
            TypeError: a parameter has not the two methods.
            RuntimeError: ranks would send different sizes.
        """
        if self._is_made or self.is_meta:
            return False
        gather, full = self._gather, self.full
        assert gather is not None
        for extension in gather.extensions:
            extension.check()
        inputs = gather.inputs()
        self._compare(inputs)
        issued = gather.all_gather_first(inputs, full.flat, self.groups.gather)
        HostWorkHandle("all_gather", self.label, issued, None).wait()
        with torch.inference_mode(False):
            made = [
                extension.make(outputs, [tensor.size() for tensor in given])
                for extension, outputs, given in zip(
                    gather.extensions, gather.outputs, inputs, strict=True
                )
            ]
            parameters = [
                self._like(parameter, unsharded, sharded)
                for parameter, (unsharded, _), sharded in zip(
                    self.parameters, made, self.sharded_parameters, strict=True
                )
            ]
        for _, held in made:
            full.add(held)
        for extension, parameter in zip(gather.extensions, parameters, strict=True):
            extension.use(parameter)
        full.allocated = True
        full.free()
        self.use_parameters(parameters)
        self._is_made = True
        self.gathered_nbytes = gather.nbytes * self.mesh_info.shard_size
        self.comm_nbytes = self.gathered_nbytes - gather.nbytes
        return True

    def _compare(self, inputs: Sequence[Sequence[torch.Tensor]]) -> None:
        """Raise RuntimeError, on every rank, if ranks send different sizes. Collective over the
        mesh."""
        facts = repr([[(tensor.shape, tensor.dtype) for tensor in given] for given in inputs])
        mine = [START, hash_of(facts.encode()), 0]
        for group in self.mesh_info.groups_to_check:
            if any(other != mine for other in self.mesh_info.order_check.exchange(mine, group)):
                names = ", ".join(repr(spec.fqn) for spec in self.plan.specs)
                raise RuntimeError(
                    f"fsdp_pre_all_gather gives other sizes or dtypes on other ranks, for one of "
                    f"{names} of unit {self.label!r}; here {facts}. All ranks send as much: where "
                    "the number of rows is no multiple of the number of ranks, the last ones have "
                    "fewer rows or none, and must fill up what they give"
                )

    def _like(self, parameter: torch.Tensor, tile: torch.Tensor, sharded: DTensor) -> nn.Parameter:
        """Return an unsharded parameter that lies as ``parameter`` does, and has its attributes.
        What its class keeps in attributes, as ``sharded`` has it too, may be the tensor at rest."""
        made = parameter_like(parameter, tile, parameter.requires_grad)
        users = users_attributes(parameter, tp_local_tensor(made))
        of_class = vars(sharded._local_tensor)
        vars(made).update({key: value for key, value in users.items() if key not in of_class})
        return made
