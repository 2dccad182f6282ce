"""The Triton merge without a GPU: interpreted, against the torch code, and compiled for a Hopper GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dualkv_compile.kernels import triton_merge

ROOT = Path(__file__).parents[2]


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_interpreted_kernels_are_the_torch_code() -> None:
    pytest.importorskip("triton")
    tests = str(ROOT / "tests/kernels/interpreted_merge.py")
    done = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", tests, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def test_works_without_triton() -> None:
    """A None in sys.modules makes the import fail, and find_spec with it, as if triton were not installed."""
    program = """
import sys
sys.modules["triton"] = None
import torch
from dualkv_compile.kernels import triton_merge
from dualkv_compile.kernels.merge import merge
out, lse = merge([torch.ones(2, 4)] * 2, [torch.zeros(2)] * 2)
assert torch.equal(out, torch.ones(2, 4)) and not triton_merge.AVAILABLE
"""
    done = run_python("-c", program)
    assert done.returncode == 0, done.stderr


def test_only_what_the_kernels_can_do_goes_to_them() -> None:
    out, lse = torch.zeros(2, 8), torch.zeros(2)
    assert not triton_merge.accepts([out], [lse])  # on the CPU


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", ["merge_forward", "merge_backward", "sum_rows"])
def test_compiles_for_hopper(name: str, count: int) -> None:
    """The interpreter accepts Python that the compiler does not; loads of rows have to be 16 bytes wide."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from dualkv_compile.kernels import merge_kernels

    vector, number, index = "*bf16", "*fp32", "*i32"
    stride, code = ("i32", "i32", "i32", "constexpr"), ("i32", "i32", "i32")
    span = ("i32", "i32")
    kinds: dict[str, Any] = {
        "outs": (vector,) * count,
        "parts": (vector,) * count,
        "lses": (number,) * count,
        "out_strides": (stride,) * count,
        "strides": (stride,) * count,
        "lse_strides": (code,) * count,
        "spans": (span,) * count,
        "indices": (index, *("constexpr",) * (count - 1)),
        "grad_outs": (vector,) * count,
        "grad_lses": (number,) * count,
        "grad_out_strides": (stride,) * count,
        "grad_lse_strides": (code,) * count,
        "merged_lse_stride": code,
        "grad_lse_stride": code,
        "merged_stride": stride,
        "grad_stride": stride,
        "total_stride": stride,
        "merged": vector,
        "grad": vector,
        "total": vector,
        "merged_lse": number,
        "grad_lse": number,
        "tokens": "i32",
        "heads": "i32",
    }
    constants = {"COUNT": count, "COLUMNS": 4, "SIZE": 128, "BLOCK_T": 8, "BLOCK_H": 4, "BLOCK_D": 128}
    kernel = getattr(merge_kernels, name)
    signature = {argument: kinds.get(argument, "constexpr") for argument in kernel.arg_names}
    known: dict[tuple[int, ...], Any] = {}
    aligned: dict[tuple[int, ...], list[list[Any]]] = {}

    def walk(kind: Any, path: tuple[int, ...], value: Any) -> None:
        if isinstance(kind, tuple):
            for at, inner in enumerate(kind):
                walk(inner, (*path, at), value)
        elif kind == "constexpr":
            known[path] = value
        elif kind == vector or (kind == "i32" and value == 1):
            aligned[path] = [["tt.divisibility", 16]]

    for at, (argument, kind) in enumerate(signature.items()):
        # In strides, the constant is the last dimension's 1; in indices, it is "no index".
        vectors = kind == stride or kind == (stride,) * count
        walk(kind, (at,), constants.get(argument, 1 if vectors else None))
    source = ASTSource(kernel, signature, known, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    ptx = compiled.asm["ptx"]
    assert ptx.count("ld.global.v4.b32") >= 4 * count
    assert "st.global.v4.b32" in ptx
