"""FSDP2's tensor extensions: tensors whose class defines their all-gather.

``fsdp_pre_all_gather`` gives what a rank sends of a sharded parameter, and ``fsdp_post_all_gather``
makes the unsharded parameter of what all ranks have sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from inspect import signature
from operator import add
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_overlap.tensor.flat_buffer import Buffer
from fsdp_overlap.tensor.subclasses import POST, PRE, inner_tensors, missing_methods
from fsdp_overlap.torch_internals import keep_version

# Says whether what was gathered can be freed when the unsharded parameter was made of it.
RELEASES = "fsdp_should_release_all_gather_outputs_after_post_all_gather"


class GatheredTensors(Buffer):
    """The storages behind a param group's unsharded parameters, if tensor extensions made these.

    ``flat`` is empty, and tells the device. Storages are known once the first gather is done.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.flat = torch.empty(0, device=device)
        self._of_each: list[list[torch.Tensor]] = []
        self.allocated = False

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take in what holds the next parameter. Some may share their memory."""
        held = []
        for tensor in tensors:
            if tensor.untyped_storage().nbytes() and not self.holds(tensor):
                held.append(tensor.detach())
                self._add(held[-1])
        self._of_each.append(held)

    def digests(self) -> torch.Tensor:
        zero = torch.zeros((), dtype=torch.int64, device=self.flat.device)
        return torch.stack([reduce(add, map(_digest, each), zero) for each in self._of_each])

    def index_of(self, tensor: torch.Tensor) -> int | None:
        mine = tensor.untyped_storage()._cdata
        for index, each in enumerate(self._of_each):
            if any(held.untyped_storage()._cdata == mine for held in each):
                return index
        return None

    def give_back(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Do nothing: whether a tensor of another class has other memory is not known."""
        return []


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8).sum()


@dataclass
class ExtensionContext:
    """What ``fsdp_pre_all_gather`` is given beside the sharded parameter."""

    mesh: DeviceMesh
    size: torch.Size
    stride: tuple[int, ...]
    module: Any
    """A weak reference to the module that has the parameter."""
    mp_policy: Any
    dtype: torch.dtype
    """What compute wants, if the extension can give it."""
    device: torch.device


class Extension:
    """Gathers one parameter by the two methods of its sharded form's local tensor."""

    def __init__(self, name: str, sharded: DTensor, context: ExtensionContext) -> None:
        self.name = name
        self._sharded = sharded
        self._context = context
        self._metadata: Any = None
        self._outputs: tuple[torch.Tensor, ...] = ()
        self._parameter: nn.Parameter | None = None
        self._released: list[tuple[torch.UntypedStorage, int]] = []
        """The storages, with their sizes, that are needed only while the parameter is filled."""
        self._takes_module = False
        """Whether the first method takes the module and more, not the mesh alone."""

    def check(self) -> None:
        """Check that the local tensor has both methods, which it may have got after it was made.

        Raises:
            TypeError: it has not, or they take something else.
        """
        local = self._sharded._local_tensor
        if missing := missing_methods(local):
            raise TypeError(
                f"{self.name} is a {type(local).__name__} without {' and '.join(missing)}, so "
                "nobody knows how to gather it: give its class both methods"
            )
        takes = signature(getattr(local, PRE))
        if len(takes.parameters) not in (1, 5):
            raise TypeError(
                f"{type(local).__name__}.{PRE}{takes}, of {self.name}: it takes either mesh, or "
                "mesh, outer_size, outer_stride, module and mp_policy"
            )
        self._takes_module = len(takes.parameters) == 5

    def inputs(self) -> list[torch.Tensor]:
        """Return what this rank sends."""
        local, context = self._sharded._local_tensor, self._context
        if local.device != context.device:
            local = local.to(context.device, non_blocking=True)
        pre: Any = getattr(local, PRE)
        arguments: tuple[Any, ...] = (context.mesh,)
        if self._takes_module:
            arguments += context.size, context.stride, context.module(), context.mp_policy
        given, self._metadata = pre(*arguments)
        return list(given)

    def make(
        self, outputs: Sequence[torch.Tensor], sizes: Sequence[torch.Size]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the unsharded tensor of what all ranks have sent, and whose storages it needs
        while it is used. ``outputs`` are flat, and are written by each later gather. ``sizes`` are
        those of what this rank sends."""
        local, context = self._sharded._local_tensor, self._context
        shaped = tuple(
            output.data.view(-1, *size[1:])  # .data: writing them counts as no edit
            for output, size in zip(outputs, sizes, strict=True)
        )
        self._outputs = tuple(map(self._without_padding, shaped, sizes))
        post: Any = getattr(local, POST)
        whole, inner = post(shaped, self._metadata, context.dtype)
        self._metadata = None
        whole = torch.as_strided(whole, context.size, context.stride, storage_offset=0)
        releases = getattr(local, RELEASES, None)
        if releases is None or not releases():
            return whole, [*outputs, *inner]
        self._released = [(each.untyped_storage(), each.nbytes) for each in outputs]
        released = {storage._cdata for storage, _ in self._released}
        return whole, [each for each in inner if each.untyped_storage()._cdata not in released]

    def use(self, parameter: nn.Parameter) -> None:
        """Fill ``parameter``, which was made of what :meth:`make` gave, in later gathers."""
        self._parameter = parameter
        self.release_outputs()

    def fill(self) -> None:
        """Fill the unsharded parameter of what all ranks have sent.

        Raises:
            TypeError: the extension made another tensor instead.
        """
        parameter, post = self._parameter, getattr(self._sharded._local_tensor, POST)
        assert parameter is not None
        edited: tuple[torch.Tensor, ...] = (parameter,)
        if isinstance(parameter, DTensor):
            edited = parameter, parameter._local_tensor
        with keep_version(edited):  # autograd need not know
            given = post(self._outputs, self._metadata, self._context.dtype, out=parameter)
        self._metadata = None
        if given is not None:
            self._check_is_filled(parameter, given[0] if isinstance(given, tuple) else given)

    def _check_is_filled(self, parameter: nn.Parameter, given: Any) -> None:
        """Check that what the extension gave back has no memory of its own. An extension may ignore
        ``out=`` only if the unsharded parameter lies in what is gathered.

        Raises:
            TypeError: it has, so nobody filled ``parameter``.
        """
        if given is parameter or not isinstance(given, torch.Tensor):
            return
        filled = {each.untyped_storage()._cdata for each in inner_tensors(parameter)}
        filled.update(each.untyped_storage()._cdata for each in self._outputs)
        if any(each.untyped_storage()._cdata not in filled for each in inner_tensors(given)):
            raise TypeError(
                f"{POST} of {self.name} was given out=, and returned another tensor, which is not "
                "used: write the values into out, and return None"
            )

    def _without_padding(self, output: torch.Tensor, sent: torch.Size) -> torch.Tensor:
        """Return the rows of ``output`` that belong to the parameter, if it has rows of that.
        ``sent`` is the size of what each rank sent. An extension can copy them into the parameter
        then, while FSDP2 hands it the padding, too."""
        rows, ranks = self._context.size[0], self._context.mesh.size()
        padded = torch.Size((-(-rows // ranks), *self._context.size[1:]))
        return output[:rows] if sent == padded else output

    def allocate_outputs(self) -> None:
        """Give memory to what is needed only while the parameter is filled."""
        for storage, nbytes in self._released:
            storage.resize_(nbytes)

    def release_outputs(self) -> None:
        """Free what :meth:`allocate_outputs` gave memory."""
        for storage, _ in self._released:
            storage.resize_(0)
