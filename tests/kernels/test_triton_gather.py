"""Un-packing by Triton without a GPU: interpreted, against the torch code, and compiled for a Hopper GPU."""

from __future__ import annotations

import pytest
import torch

from dualkv_compile.kernels import triton_gather
from tests.kernels.test_triton_merge import ROOT, run_python


def test_interpreted_kernels_are_the_torch_code() -> None:
    pytest.importorskip("triton")
    tests = str(ROOT / "tests/kernels/interpreted_gather.py")
    done = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", tests, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def test_only_what_the_kernels_can_do_goes_to_them() -> None:
    assert not triton_gather.accepts(torch.zeros(2, 8))  # on the CPU


@pytest.mark.parametrize("name", ["copy_rows", "sum_copies"])
def test_compiles_for_hopper(name: str) -> None:
    """The interpreter accepts Python that the compiler does not; rows have to be read 16 bytes at a time."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from dualkv_compile.kernels import gather_kernels

    kernel = getattr(gather_kernels, name)
    pointers = dict.fromkeys(("source", "target", "grad", "total"), "*bf16")
    pointers |= dict.fromkeys(("inverse", "order", "starts"), "*i64")
    sizes = dict.fromkeys(("rows", "tokens", "size"), "i32")
    constants = {"WIDE": False, "BLOCK_ROWS": 1, "BLOCK_SIZE": 2048}
    signature = {argument: {**pointers, **sizes}.get(argument, "constexpr") for argument in kernel.arg_names}
    known = {(at,): constants[argument] for at, argument in enumerate(signature) if argument in constants}
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, argument in enumerate(signature)
        if argument in pointers or argument == "size"
    }
    source = ASTSource(kernel, signature, known, aligned)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx
