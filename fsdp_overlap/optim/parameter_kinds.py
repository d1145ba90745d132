"""Tell the hidden matrices of a model from its embeddings, outputs, routers and vectors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

from torch import nn

from fsdp_overlap.torch_internals import ConvNd

HIDDEN = "hidden matrix"

# What a matrix is follows from what is connected to it: names differ between libraries, and the
# order of modules says nothing. A hidden matrix that is taken for something else costs little, the
# other mistake much, so what is in doubt is not a hidden matrix.
# - What an embedding reads is an embedding, also where an output is tied to it.
# - Blocks are the modules in lists. Outside of them, something reads what a hidden matrix returns:
#   another matrix, a convolution or a norm has as many inputs as it has rows. Nothing in a model
#   reads logits or values. What has the shape of an embedding, or as many rows as the largest, is
#   an output, also if a matrix happens to have as many inputs. Inside of blocks it says nothing
#   that nobody reads a matrix, because a fused projection is split before it is read: there only a
#   matrix with as many rows as an embedding is an output.
# - A router has a row for each of the experts beside it. So have the biases of stacked experts.
# - A parameter that is not called "weight" may be a table of positions or a decay. It is a hidden
#   matrix only if both of its sizes are inputs of other matrices.


def parameter_kinds(model: nn.Module) -> dict[str, str]:
    """Return what each parameter of ``model`` is, by name: ``"hidden matrix"`` (one, or a stack of
    several), ``"embedding"``, ``"output"``, ``"router"``, ``"convolution"``, ``"vector"`` or
    ``"other"``."""
    modules = list(model.modules())
    uses: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in modules:
        for name, parameter in module.named_parameters(recurse=False):
            uses.setdefault(parameter, []).append((module, name))
    embeddings = {m.weight for m in modules if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
    convolutions = {
        p for module in modules if isinstance(module, ConvNd) for p in module.parameters()
    }
    columns = set(_columns(uses.keys() - embeddings - convolutions, uses))
    inputs = columns | {module.in_channels for module in modules if isinstance(module, ConvNd)}
    inputs |= {p.numel() for p in uses if p.dim() == 1 and any(n == "weight" for _, n in uses[p])}
    words = {embedding.shape[0] for embedding in embeddings}
    tables = {weight.shape for weight in embeddings if weight.shape[0] != weight.shape[1]}
    in_blocks = {module for block in _blocks(modules) for module in block.modules()}
    beside_experts = _beside_experts(modules, in_blocks)

    def kind(parameter: nn.Parameter) -> str:
        shape = parameter.shape
        if parameter in embeddings:
            return "embedding"
        if sum(size > 1 for size in shape) < 2:
            return "vector"
        if parameter in convolutions:
            return "convolution"
        if not parameter.is_floating_point():
            return "other"
        if len(shape) > 2:  # a stack of one is something else, such as learned positions [1, n, d]
            return HIDDEN if prod(shape[:-2]) > 1 else "other"
        is_weight = any(_is_weight(*use) for use in uses[parameter])
        if any(shape[0] in beside_experts.get(module, ()) for module, _ in uses[parameter]):
            return "router" if is_weight else "vector"
        is_in_block = any(module in in_blocks for module, _ in uses[parameter])
        if shape[0] not in inputs and (not is_in_block or shape[0] in words):
            return "output"
        if not is_in_block and (shape[0] == max(words, default=0) or shape in tables):
            return "output"
        return HIDDEN if is_weight or columns.issuperset(shape) else "other"

    return {name: kind(parameter) for name, parameter in model.named_parameters()}


def _is_weight(module: nn.Module, name: str) -> bool:
    return name == "weight" or isinstance(module, nn.MultiheadAttention)


def _columns(
    parameters: Iterable[nn.Parameter], uses: dict[nn.Parameter, list[tuple[nn.Module, str]]]
) -> Iterator[int]:
    """Yield the inputs of matrices. Stacks may be transposed: both sizes may be inputs."""
    for parameter in parameters:
        if parameter.dim() > 2:
            yield from parameter.shape[-2:]
        elif parameter.dim() == 2 and any(_is_weight(*use) for use in uses[parameter]):
            yield parameter.shape[1]


def _blocks(modules: list[nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules in lists. Those without modules of their own are no blocks: they are the
    layers of a perceptron, or heads."""
    for module in modules:
        children = list(module.children())
        if isinstance(module, nn.Sequential):
            types = [type(child) for child in children]
            children = [child for child in children if types.count(type(child)) > 1]
        elif isinstance(module, nn.ModuleDict):  # torchtitan numbers the blocks of one
            children = children if all(name.isdigit() for name in module) else []
        elif not isinstance(module, nn.ModuleList):
            continue
        yield from (child for child in children if any(True for _ in child.children()))


def _beside_experts(
    modules: list[nn.Module], in_blocks: set[nn.Module]
) -> dict[nn.Module, set[int]]:
    """Return the modules in which a router may be, with the numbers of experts beside them."""
    parents = {child: module for module in modules for child in module.children()}
    found: dict[nn.Module, set[int]] = {}

    def add(scope: nn.Module, count: int) -> None:
        for module in scope.modules():
            # What is read beside it is no router's, but a shared expert's.
            siblings = parents[module].children() if module in parents else ()
            if all(s.weight.shape[1] != count for s in siblings if isinstance(s, nn.Linear)):
                found.setdefault(module, set()).add(count)

    for module in modules:
        if isinstance(module, nn.ModuleList) and module in in_blocks and len(module) > 1:
            add(parents[module], len(module))
        stacks = [] if isinstance(module, ConvNd) else list(module.parameters(recurse=False))
        for count in {parameter.shape[0] for parameter in stacks if parameter.dim() == 3}:
            weights = [p for name, p in module.named_parameters() if name.endswith("weight")]
            has_router = any(p.dim() == 2 and p.shape[0] == count for p in weights)
            add(module if has_router else parents.get(module, module), count)
    return found
