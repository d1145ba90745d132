"""Makes docstrings Markdown, before they are parsed."""

from __future__ import annotations

from typing import Any

import griffe

from rewriting import roles_to_markdown


class Roles(griffe.Extension):
    """Roles of reStructuredText become links."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = roles_to_markdown(
                obj.docstring.value, lambda name: path_of(obj, name)
            )


def path_of(scope: griffe.Object, name: str) -> str | None:
    """The dotted path of what ``name`` stands for in a docstring of ``scope``."""
    first, _, rest = name.partition(".")
    try:
        if scope.parent and scope.parent.is_class and first in scope.parent.all_members:
            found = scope.parent.all_members[first]
        elif scope.is_class and first in scope.all_members:
            found = scope.all_members[first]
        elif first == scope.package.name:
            found = scope.package
        else:
            found = scope.modules_collection[scope.resolve(first)]
        for part in filter(None, rest.split(".")):
            found = found.all_members[part]
        if found.is_module and found.name in found.members:  # import hides the module: fully_shard
            found = found.members[found.name]
        return found.canonical_path
    except (KeyError, griffe.NameResolutionError, griffe.AliasResolutionError):
        return None
