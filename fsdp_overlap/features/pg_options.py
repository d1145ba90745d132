"""Options of the backend for groups that the library makes: ``FsdpContext(pg_options=...)``."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_overlap.comm.process_groups import (
    GroupCache,
    GroupConfig,
    backend_name,
    copied_options,
    options_of,
)
from fsdp_overlap.torch_internals import default_group

PG_OPTION_KINDS = ("all_gather", "reduce_scatter", "all_reduce")
"""The comm streams whose groups can be given options of their own."""

# The options that users gave beside one default group, by what the groups are for. Their places
# tell them apart.
_known: WeakKeyDictionary[dist.ProcessGroup, dict[str, list[object]]] = WeakKeyDictionary()


class GroupOptions:
    """What the user gave for the groups of each comm stream: options of the backend, or what to
    change in those of the mesh's group (:func:`with_fields`).

    Raises:
        ValueError: there is no such comm stream.
    """

    def __init__(self, options: Mapping[str, object]) -> None:
        _check_kinds(options)
        self.given = dict(options)

    def apply_to(self, cache: GroupCache) -> None:
        """Make the groups of ``cache`` with these."""
        cache.configs = {
            comm_stream: partial(_config, comm_stream, options)
            for comm_stream, options in self.given.items()
        }

    def check(self, mesh: DeviceMesh) -> None:
        """Check that groups over ``mesh`` can be made with the options that the user gave.

        Raises:
            TypeError: they are those of another backend, or the backend of ``mesh`` takes none.
        """
        for comm_stream, options in self.given.items():
            shard = mesh.get_group(mesh.ndim - 1)
            backend = backend_name(shard, mesh.device_type)
            if backend == "gloo":
                raise TypeError(f"pg_options: gloo, which {mesh} has, takes none; leave them out")
            suitable = options_of(shard, mesh.device_type)
            if isinstance(options, Mapping):
                try:
                    with_fields(suitable, options)
                except (TypeError, ValueError) as error:
                    raise type(error)(f"pg_options: {comm_stream}: {error}") from error
            elif suitable is not None and not isinstance(options, type(suitable)):
                raise TypeError(
                    f"pg_options: those of {comm_stream} are a {type(options).__name__}; "
                    f"{backend}, which {mesh} has, takes a {type(suitable).__qualname__}"
                )


def _config(
    comm_stream: str, options: object, like: dist.ProcessGroup, device_type: str
) -> GroupConfig:
    """Return what a group of ``comm_stream`` beside ``like`` is made with, by ``options``."""
    config = GroupConfig.like(like, device_type)
    name = _name_of_options(options, f"{comm_stream} {like.group_name}")
    if isinstance(options, Mapping):
        options = with_fields(config.options, options)
    else:
        options = copied_options(options, config.timeout, is_prior=False)
    return replace(config, options=options, name=name)


def _name_of_options(options: object, use: str) -> str:
    """Return what tells ``options`` apart from others for the same use."""
    if isinstance(options, Mapping):
        return f" fields {sorted(options.items())}"
    given = _known.setdefault(default_group(), {}).setdefault(use, [])
    if all(options is not other for other in given):
        given.append(options)
    return f" options {next(i for i, other in enumerate(given) if other is options)}"


def _check_kinds(options: Mapping[str, object]) -> None:
    """Raise ValueError if ``options`` names something that is no comm stream."""
    for comm_stream in options:
        if comm_stream not in PG_OPTION_KINDS:
            raise ValueError(
                f"pg_options: there is no comm stream {comm_stream!r}; use "
                f"{', '.join(PG_OPTION_KINDS)}"
            )


def with_fields(options: Any, fields: Mapping[str, object]) -> Any:
    """Return a copy of a backend's ``options`` with high priority and ``fields``, by name: those of
    the options themselves or, of NCCL, those of their ``config``. What cannot be copied is returned
    as it is.

    Kernels of collectives wait for room on the device, so that without priority they start after
    compute that came later. An asynchronous one runs on a stream of the group, whatever the stream
    is that it is called from.

    Raises:
        ValueError: there is no such field.
        TypeError: a value does not suit its field, or there are fields, and no options that could
            be copied.
    """
    try:
        made = copy.deepcopy(options)
    except TypeError:
        made = None
    if made is None:
        if fields:
            raise TypeError(f"a {type(options).__name__} takes no {', '.join(fields)}")
        return options
    if hasattr(made, "is_high_priority_stream"):
        made.is_high_priority_stream = True
    if fields:
        _set_fields(made, fields)
    return made


def _set_fields(options: Any, fields: Mapping[str, object]) -> None:
    for name, value in fields.items():
        owner = options if hasattr(options, name) else getattr(options, "config", None)
        if not hasattr(owner, name):
            raise ValueError(f"a {type(options).__qualname__} has no {name!r}")
        setattr(owner, name, value)
