"""Builds the kernels of quantized communication for GPUs, on a machine without one, and checks the
instructions. Prints the compute capabilities."""

from __future__ import annotations

import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fsdp_overlap.features.quantized import triton_kernels as kernels

POINTERS = {
    "float32": "*fp32",
    "bfloat16": "*i16",
    "float8_e4m3fn": "*u8",
    "float8_e5m2": "*u8",
    "int8": "*i8",
    "float8_e8m0fnu": "*u8",
}
TABLES = {"tiles": "*i32", "runs": "*i64"}


def build(kernel: Any, capability: int, types: dict[str, str], columns: int, **given: Any) -> str:
    """Return the instructions."""
    constants = {**given, "ALIGN": 16, "SEGMENTS": max(1, 4096 // columns), "COLUMNS": columns}
    source = ASTSource(
        fn=kernel,
        signature={**types, **TABLES, **dict.fromkeys(constants, "constexpr")},
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
    )
    options = {"num_warps": max(4, columns // 1024), "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm[
        "ptx"
    ]


def check(capability: int) -> None:
    for values, codes, scales, columns in (
        ("bfloat16", "float8_e4m3fn", "bfloat16", 16384),
        ("float32", "float8_e5m2", "float8_e8m0fnu", 32),
        ("float32", "int8", "float32", 4096),
    ):
        of_values, of_codes, of_scales = (POINTERS[each] for each in (values, codes, scales))
        kinds = {"VALUES": values, "CODES": codes, "SCALES": scales}
        whole = columns != 4096
        types = {"values": of_values, "codes": of_codes, "scales": of_scales, "most": "*i32"}
        encode = build(
            *(kernels.encode_blocks, capability, types, columns),
            **kinds,
            LARGEST=448.0,
            WHOLE=whole,
        )
        assert "div.rn.f32" in encode
        numbers = dict.fromkeys(("rank", "code_stride", "scale_stride"), "i32")
        types = {"codes": of_codes, "scales": of_scales, "own": of_values, "values": of_values}
        decode = build(
            *(kernels.decode_blocks, capability, {**types, **numbers}, min(columns, 4096)),
            **kinds,
            RANKS=8,
        )
        types = {"values": of_values, "most": "*i32"}
        measure = build(kernels.measure_blocks, capability, types, columns, VALUES=values)
        assert "max.s32" in measure
        for instructions in (encode, decode, measure):
            assert not re.search(r"\bfma\.|\.ftz|div\.(full|approx)", instructions)


if __name__ == "__main__":
    for capability in (80, 90):
        check(capability)
        print(capability)
