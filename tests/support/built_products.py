"""Builds the kernel of symmetric products for GPUs, on a machine without one. Prints for each
compute capability whether tensor cores multiply, and the most bytes of shared memory."""

from __future__ import annotations

import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fsdp_overlap.optim.symmetric_products import TILE, symmetric_product_kernel

TENSORS = ("left", "right", "added", "product")


def build(capability: int, kind: str, mirrored: bool, adds: bool) -> tuple[str, int]:
    """Return the instructions and the bytes of shared memory. ``mirrored``: the right factor is the
    transpose of the left."""
    names = symmetric_product_kernel.arg_names
    constants = {"ADDS": adds, "INNER": 4096, "WIDENS": False}
    constants |= {"TILE": TILE, "DEPTH": 64, "left_column": 1, "added_column": 1}
    constants["right_row" if mirrored else "right_column"] = 1
    signature = dict.fromkeys(names, "i32") | dict.fromkeys(TENSORS, f"*{kind}")
    signature |= {"alpha": "fp32", "beta": "fp32"} | dict.fromkeys(constants, "constexpr")
    aligned = [n for n in names if signature[n] == "i32" or n in TENSORS]
    built = triton.compile(
        ASTSource(
            fn=symmetric_product_kernel,
            signature=signature,
            constexprs={(names.index(name),): value for name, value in constants.items()},
            attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
        ),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": 4, "num_stages": 3},
    )
    return built.asm["ptx"], built.metadata.shared


if __name__ == "__main__":
    for capability in (80, 90):
        most, multiplies = 0, True
        for kind, mirrored in (("bf16", True), ("bf16", False), ("fp16", False)):
            instructions, shared = build(capability, kind, mirrored, adds=not mirrored)
            found = re.search(rf"mma\S*\.f32\.{kind.replace('fp', 'f')}\.", instructions)
            multiplies, most = multiplies and found is not None, max(most, shared)
        print(capability, multiplies, most)
