"""Proves that the kernels compile for an H100, which needs none; what they compute is shown in
tests/replicas/models."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMPILE = """
import inspect
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from replicas.kernels import layers, paged_attention
from replicas.models.device_attention import QUERIES

COUNTS = dict.fromkeys(("starts", "firsts", "counts", "table", "slots", "positions"), "*i64")
NUMBERS = dict.fromkeys(("columns", "pieces", "folded", "inner", "token_stride"), "i32")
NUMBERS |= {"head_stride": "i32", "table_stride": "i32", "scale": "fp32", "eps": "fp32"}
SIZES = {"GROUP": 4, "GROUP_ROWS": 4, "DIM": 128, "DIMS": 128, "BLOCK": 16, "PIECE": 256}
SIZES |= {"QUERIES": QUERIES, "KEYS": paged_attention.KEYS, "KV_HEADS": 8, "HALF": 64}
SIZES |= {"INNER": 1024}


def compiled(kernel, floats, **sizes):
    given = {**COUNTS, **NUMBERS, **floats}
    signature, constants = {}, {}
    for at, name in enumerate(inspect.signature(kernel.fn).parameters):
        constant = {**SIZES, **sizes}.get(name)
        signature[name] = given.get(name, "*bf16") if constant is None else "constexpr"
        if constant is not None:
            constants[(at,)] = constant
    source = ASTSource(kernel, signature, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert made.asm["cubin"]
    print(kernel.fn.__name__)


parts = {"out": "*fp32", "sums": "*fp32"}
compiled(paged_attention.attend, parts, WHOLE=False)
compiled(paged_attention.attend, {}, WHOLE=True)
compiled(paged_attention.add_pieces, {"parts": "*fp32", "sums": "*fp32"})
compiled(layers._rotate, {}, NORM=True, FINITE=False)
compiled(layers._activate, {})
"""


@pytest.mark.long
def test_they_compile(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        cwd=Path(__file__).parents[3],
        env=env | {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    names = ["attend", "attend", "add_pieces", "_rotate", "_activate"]
    assert done.stdout.split() == names
