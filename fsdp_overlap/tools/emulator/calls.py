"""Intercept Python calls that dispatch does not show: where tensors lie, what the host reads, and
which stream a node of autograd's graph belongs to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fsdp_overlap.tools.emulator.backwards import Backwards
from fsdp_overlap.tools.emulator.device import EmulatedDevice, Operation
from fsdp_overlap.tools.emulator.dispatch import (
    NAME,
    PLAIN,
    Dispatch,
    depends_on_value,
    has_values,
    inner_of,
    tensors_in,
)
from fsdp_overlap.tools.emulator.sites import call_site
from fsdp_overlap.tools.torch_internals import (
    DisableTorchFunction,
    OpOverload,
    default_device,
    disable_current_modes,
    disabled_torch_function,
    flash_attention,
    is_torch_function_enabled,
    masked_attention,
    parse_to,
    swap_tensor_impl,
    takes_default_device,
)

ATTENTION = torch.nn.functional.scaled_dot_product_attention  # programs may patch the module's


class Calls(TorchFunctionMode):
    """Lets tensors say that they are on the emulated device, moves tensors to it and back, and
    tells ``backwards`` which stream a node of autograd's graph belongs to."""

    def __init__(self, device: EmulatedDevice, dispatch: Dispatch, backwards: Backwards) -> None:
        super().__init__()
        self.device = device
        self.dispatch = dispatch
        self.backwards = backwards
        self._here = torch.device(device.device_type, device.index)
        # A number alone is for C++ one of a device that a library adds to torch.
        self._types = (device.device_type, NAME)
        tensor: Any = torch.Tensor  # torch's stubs declare the properties as bool
        self._getters: dict[Any, Callable[..., Any]] = {
            tensor.device.__get__: self._device_of,
            tensor.is_cpu.__get__: self._is_on_host,
            tensor.is_meta.__get__: self._is_meta,
            tensor.is_cuda.__get__: self._is_cuda,
            tensor.get_device: self._index_of,
        }
        self._moves: dict[Any, Callable[..., Any]] = {
            tensor.to: self._to,
            tensor.type_as: self._to_like,
            tensor.cpu: self._to_host,
            tensor.cuda: self._to_cuda,
        }
        self._instead: dict[Any, Callable[..., Any]] = {
            **self._getters,
            **self._moves,
            tensor.type: self._type,
            tensor.new_tensor: self._new_tensor,
            tensor.__deepcopy__: self._copy_deeply,
            tensor.pin_memory: self._pin,
            tensor.is_pinned: self._is_pinned,
            tensor.tolist: self._read,
            tensor.__repr__: self._show,
            tensor.numpy: self._read,
        }
        if not device.values:
            for read in (tensor.item, tensor.__float__, tensor.__int__, tensor.__format__):
                self._instead[read] = self._read_one
            self._instead[tensor.__bool__] = self._decide
            self._instead[tensor.data.__set__] = self._set_data
            if device.keeps_integers:
                for asks in _ASK_FOR_NUMBERS:
                    self._instead[asks] = self._are_numbers
            # Which of torch's kernels it runs depends on the device that C++ knows.
            self._instead[ATTENTION] = self._attend
            for drop in (torch.nn.functional.dropout, torch.dropout):
                self._instead[drop] = self._drop

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for each in types if is_torch_function_enabled() else ():
            if each.__torch_function__ is not disabled_torch_function and each not in PLAIN:
                # Also sees what the class does to its inner tensors.
                with self:
                    return each.__torch_function__(func, types, args, kwargs)
        instead = self._instead.get(func)
        if instead is not None:
            first = (args or tensors_in(list(kwargs.values())))[0]
            if type(first) in PLAIN:
                return instead(func, *args, **kwargs)
            if func in self._getters and (inner := inner_of(first)) is not None:
                return instead(func, inner)
            if func in _ASK_FOR_NUMBERS and inner_of(first) is not None:
                return instead(func, first)
            if func in self._moves and inner_of(first) is not None:
                return instead(func, *args, **kwargs)
            if func == torch.Tensor.__deepcopy__:
                self._copy_held(*args)
        default = default_device.CURRENT_DEVICE
        if (
            default is not None
            and default.type in self._types
            and kwargs.get("device") is None
            and func in takes_default_device()
        ):
            kwargs["device"] = default  # torch would add it where this mode is off
        # What C++ calls by way of a class of tensors names the device that C++ knows.
        is_of_program = not isinstance(func, OpOverload) or not tensors_in(args)
        if is_of_program and (kwargs.get("device") is not None or kwargs.get("pin_memory")):
            return self._make(func, args, kwargs)
        thread = self.device.of_thread
        before, thread.given = thread.given, (args, kwargs)
        try:
            output = func(*args, **kwargs)
        finally:
            thread.given = before
        if torch.is_grad_enabled():
            self.backwards.follow(output)
        return output

    # Sides

    def _device_of(self, func: Any, tensor: torch.Tensor) -> torch.device:
        return self._here if self.device.is_here(tensor) else func(tensor)

    def _is_on_host(self, func: Any, tensor: torch.Tensor) -> bool:
        return func(tensor) and not self.device.is_here(tensor)

    def _is_meta(self, func: Any, tensor: torch.Tensor) -> bool:
        return func(tensor) and not self.device.is_here(tensor)

    def _is_cuda(self, func: Any, tensor: torch.Tensor) -> bool:
        return self.device.device_type == "cuda" and self.device.is_here(tensor)

    def _index_of(self, func: Any, tensor: torch.Tensor) -> int:
        return self.device.index if self.device.is_here(tensor) else func(tensor)

    def _make(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a call that says where its output is to lie."""
        device = kwargs.get("device")
        if isinstance(device, int):  # torch takes the accelerator that C++ knows
            device = torch.device(self._here.type, device)
        target = None if device is None else torch.device(device)
        is_ours = False
        if target is not None and target.type in self._types:
            is_ours = True
            self.device.use(target.index)
        pinned = bool(kwargs.pop("pin_memory", False))
        if is_ours:
            kwargs["device"] = "cpu"
            if not (self.device.values or self._keeps(func, args, kwargs)):
                kwargs["device"] = "meta"
        elif target is not None and target.type != "cpu":
            return func(*args, **kwargs)
        return self._with_memory(is_ours, pinned, lambda: func(*args, **kwargs))

    def _keeps(self, make: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        """Return whether what ``make`` returns has values on a device whose tensors have none."""
        if not self.device.keeps_integers:
            return make in _KEPT and not make(*args, **kwargs).is_floating_point()
        with disable_current_modes():
            made = make(*args, **{**kwargs, "device": "meta"})
        return _is_small_integer(made)

    def _with_memory(self, on_device: bool, pinned: bool, make: Callable[[], Any]) -> Any:
        with self.device.of_thread.making(on_device, pinned):
            output = make()
        if torch.is_grad_enabled():
            self.backwards.follow(output)
        return output

    def _to(self, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], torch.Tensor):
            args = (
                args[0].device if not self.device.is_here(args[0]) else self._here,
                args[0].dtype,
            )
        copy = kwargs.pop("copy", False)
        target, dtype, non_blocking, memory_format = parse_to(*args, **kwargs)
        held = tensor if type(tensor) in PLAIN else inner_of(tensor)
        is_here = held is not None and self.device.is_here(held)
        goes_here = is_here if target is None else target.type in self._types
        goes_to = tensor.device.type if target is None else target.type
        if not goes_here and goes_to not in (*self._types, "cpu"):
            return func(tensor, *args, **kwargs, copy=copy)
        if goes_here and target is not None:
            self.device.use(target.index)
        options = {"non_blocking": non_blocking, "copy": copy or goes_here != is_here}
        if dtype is not None:
            options["dtype"] = dtype
        if memory_format is not None:
            options["memory_format"] = memory_format
        has_none = held is not None and not (has_values(held) and self._stays(held, dtype))
        below = "meta" if has_none and goes_here else "cpu"
        pinned = non_blocking and is_here and not goes_here  # as torch: such a copy does not wait
        output = self._with_memory(goes_here, pinned, lambda: func(tensor, below, **options))
        if goes_here != is_here and self.device.values and output.grad_fn is not None:
            back = self._here if is_here else torch.device("cpu")
            output.grad_fn.register_prehook(partial(_move_gradients, back))
        return output

    def _stays(self, tensor: torch.Tensor, dtype: torch.dtype | None) -> bool:
        """Return whether the values of ``tensor`` are kept where it is moved to the device."""
        if self.device.values or not self.device.keeps_integers or tensor.is_quantized:
            return True
        return _is_small_integer(tensor)

    def _to_like(self, func: Any, tensor: torch.Tensor, other: torch.Tensor) -> Any:
        return self._to(torch.Tensor.to, tensor, other)

    def _to_host(self, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self._to(torch.Tensor.to, tensor, "cpu")

    def _to_cuda(
        self,
        func: Any,
        tensor: torch.Tensor,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format | None = None,
    ) -> Any:
        if isinstance(device, int):
            device = torch.device("cuda", device)
        options = {} if memory_format is None else {"memory_format": memory_format}
        target = torch.device("cuda" if device is None else device)
        return self._to(torch.Tensor.to, tensor, target, non_blocking=non_blocking, **options)

    def _type(self, func: Any, tensor: torch.Tensor, dtype: Any = None, *args: Any) -> Any:
        if dtype is None and self._is_cuda(func, tensor):
            return func(tensor).replace("torch.", "torch.cuda.", 1)
        return func(tensor, dtype, *args)

    def _new_tensor(self, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is None:
            kwargs["device"] = self._here if self.device.is_here(tensor) else tensor.device
        return self._make(func, (tensor, *args), kwargs)

    def _copy_deeply(self, func: Any, tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        """Place the copy: torch copies the storage by operations that do not tell where it
        lies."""
        self._copy_held(tensor, memo)
        with disable_current_modes():
            output: torch.Tensor = func(tensor, memo)
        if not self.device.knows(output):
            is_here = self.device.is_here(tensor)
            self.device.place(output, is_here)
            self.device.run(Operation("deepcopy", [tensor], [output]), on_host=not is_here)
        return output

    def _copy_held(self, tensor: torch.Tensor, memo: dict[int, Any]) -> None:
        """Copy what torch copies together with ``tensor``: its gradient, and the tensors that it
        consists of. torch, which finds the copies in ``memo``, would make them outside of this
        mode."""
        slots = chain.from_iterable(getattr(each, "__slots__", ()) for each in type(tensor).__mro__)
        held = [tensor.grad, *(getattr(tensor, name, None) for name in (*slots, *vars(tensor)))]
        with self:
            for each in held:
                if isinstance(each, torch.Tensor):
                    deepcopy(each, memo)

    def _pin(self, func: Any, tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        return self._with_memory(False, True, tensor.clone)

    def _is_pinned(self, func: Any, tensor: torch.Tensor, *args: Any) -> bool:
        return self.device.is_pinned(tensor)

    def _read(self, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Let the host read values without an operation that the dispatcher sees."""
        device = self.device
        if self.device.is_here(tensor):
            if func == torch.Tensor.numpy:
                raise TypeError(f"numpy() of a tensor on {self._here} ({call_site()}): use cpu()")
            device.wait_for_current(func.__name__)
        device.run(Operation(func.__name__, [tensor], []), on_host=True)
        if has_values(tensor):
            return func(tensor, *args, **kwargs)
        with disable_current_modes():
            return func(torch.zeros(tensor.shape, dtype=tensor.dtype), *args, **kwargs)

    def _show(self, func: Any, tensor: torch.Tensor, **options: Any) -> str:
        text: str = self._read(func, tensor, **options)  # by operations that no mode sees
        if not self.device.is_here(tensor):
            return text
        return f"{text[:-1]}, device='{self._here}')"

    def _read_one(self, func: Any, tensor: torch.Tensor, *args: Any) -> Any:
        # Of a tensor with values an operation tells.
        return func(tensor, *args) if has_values(tensor) else self._read(func, tensor, *args)

    def _decide(self, func: Any, tensor: torch.Tensor) -> bool:
        if not has_values(tensor):
            raise depends_on_value()
        return func(tensor)

    def _are_numbers(self, func: Any, tensor: torch.Tensor) -> torch.Tensor:
        """Answer as if all elements of a tensor without values were numbers."""
        held = tensor if type(tensor) in PLAIN else inner_of(tensor)
        if held is None or has_values(held):
            return func(tensor)
        answer = func in _ASK_FOR_NUMBERS[:2]
        make = partial(torch.full, tensor.shape, answer, dtype=torch.bool)
        return self._with_memory(True, False, make)

    def _set_data(self, func: Any, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Set ``tensor.data`` also where one of the two has values and the other has none."""
        if has_values(tensor) == has_values(value):
            func(tensor, value)
            return
        with DisableTorchFunction():
            # Not detach(): it would count edits of what it is a view of.
            swap_tensor_impl(tensor, value.data.requires_grad_(tensor.requires_grad))

    def _attend(
        self,
        func: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Any:
        """Return what the kernel gives that a GPU would run, which keeps no matrix of attention.
        The one without masks wants values as wide as keys."""
        if not self._has_kernel(query, key, value, attn_mask, options.get("enable_gqa", False)):
            return func(query, key, value, attn_mask, dropout_p, is_causal, **options)
        scale, width = options.get("scale"), value.shape[-1]
        output: Any
        if attn_mask is not None:
            if attn_mask.dtype is torch.bool:
                attn_mask = query.new_empty(attn_mask.shape).copy_(attn_mask)
            bias = attn_mask.expand(*query.shape[:-1], key.shape[-2])
            trains = torch.is_grad_enabled()
            output = masked_attention(query, key, value, bias, trains, dropout_p, scale=scale)
        else:
            if width < query.shape[-1]:
                value = torch.nn.functional.pad(value, (0, query.shape[-1] - width))
            output = flash_attention(query, key, value, dropout_p, is_causal, scale=scale)
        if torch.is_grad_enabled():
            self.backwards.follow(output)
        return output[0] if width == output[0].shape[-1] else output[0][..., :width]

    def _has_kernel(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        is_grouped: bool,
    ) -> bool:
        """Return whether attention has a kernel, and torch need not refuse or decompose it."""
        tensors = [query, key, value, *([] if mask is None else [mask])]
        if query.dim() != 4 or not all(map(self.device.is_here, tensors)):
            return False
        if mask is None:
            heads_fit = is_grouped or key.shape[1] == query.shape[1]
            return heads_fit and value.shape[-1] <= query.shape[-1]
        is_whole = query.shape[1] == key.shape[1] == value.shape[1]
        return is_whole and mask.dtype in (torch.bool, query.dtype)

    def _drop(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what the kernel gives that a GPU would run, which keeps a byte an element."""
        given: dict[str, Any] = (
            dict(zip(("input", "p", "train", "inplace"), args, strict=False)) | kwargs
        )
        p, train = given.get("p", 0.5), given.get("training", given.get("train", True))
        is_kernel = train and 0 < p < 1 and not given.get("inplace")
        if not is_kernel or not self.device.is_here(given["input"]):
            return func(*args, **kwargs)
        output = torch.native_dropout(given["input"], p, True)[0]
        if torch.is_grad_enabled():
            self.backwards.follow(output)
        return output


def _move_gradients(target: torch.device, gradients: Sequence[Any]) -> tuple[Any, ...]:
    """Return the gradients of a tensor that was moved where it was before. C++ would leave them: it
    takes both sides for the host."""
    return tuple(each if each is None else each.to(target) for each in gradients)


# What these make of whole numbers has values on any device: ranks tell each other such numbers, and
# models ask them which position a token has.
_KEPT = (torch.tensor, torch.arange)
_SMALL = 64 << 20  # bytes
_ASK_FOR_NUMBERS = (
    torch.isfinite,
    torch.Tensor.isfinite,
    torch.isnan,
    torch.Tensor.isnan,
    torch.isinf,
    torch.Tensor.isinf,
)


def _is_small_integer(tensor: torch.Tensor) -> bool:
    is_integer = not (tensor.is_floating_point() or tensor.is_complex())
    return is_integer and tensor.nbytes <= _SMALL
