"""Proves that the kernels compile for an A100, an H100 and a B200, which needs none of them; what
they compute is shown in tests/replicas/models."""

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
NUMBERS |= {"soft_cap": "fp32", "seen_before": "i32"}
SIZES = {"GROUP": 4, "GROUP_ROWS": 4, "DIM": 128, "DIMS": 128, "BLOCK": 16, "PIECE": 256}
SIZES |= {"KEY": 128, "VALUE": 128, "CAPPED": False, "SEEN": 0, "SINKS": False}
SIZES |= {"QUERIES": QUERIES, "KEYS": paged_attention.KEYS, "KV_HEADS": 8, "HALF": 64}
SIZES |= {"INNER": 1024}


ROOM = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}


def compiled(kernel, floats, on=(90,), **sizes):
    given = {**COUNTS, **NUMBERS, **floats}
    signature, constants = {}, {}
    for at, name in enumerate(inspect.signature(kernel.fn).parameters):
        constant = {**SIZES, **sizes}.get(name)
        signature[name] = given.get(name, "*bf16") if constant is None else "constexpr"
        if constant is not None:
            constants[(at,)] = constant
    source = ASTSource(kernel, signature, constexprs=constants)
    for capability in on:
        target = GPUTarget("cuda", capability, 32)
        made = triton.compile(source, target=target, options={"num_warps": 4})
        assert made.asm["cubin"]
        assert made.metadata.shared <= ROOM[capability], made.metadata.shared
        print(kernel.fn.__name__, capability)


parts = {"out": "*fp32", "sums": "*fp32"}
compiled(paged_attention.attend, parts, ROOM, WHOLE=False)
compiled(paged_attention.attend, {}, WHOLE=True)
compiled(paged_attention.add_pieces, {"parts": "*fp32", "sums": "*fp32"})
forms = {"CAPPED": True, "SEEN": 1, "SINKS": True, "GROUP": 8, "GROUP_ROWS": 8, "DIM": 64}
forms |= {"DIMS": 64, "KEY": 64, "VALUE": 64}  # the width of gpt-oss's heads
compiled(paged_attention.attend, parts, ROOM, WHOLE=False, **forms)
compiled(paged_attention.attend, {}, WHOLE=True, **{**forms, "SEEN": 2})
compiled(paged_attention.add_pieces, {"parts": "*fp32", "sums": "*fp32"}, **forms)
latent = {"GROUP": 1, "GROUP_ROWS": 1, "DIM": 192, "DIMS": 256, "KEY": 192, "VALUE": 128}
compiled(paged_attention.attend, parts, ROOM, WHOLE=False, **latent)
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
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    every = [f"attend {capability}" for capability in (80, 90, 100)]
    both = [*every, "attend 90", "add_pieces 90"]
    assert done.stdout.splitlines() == [*both, *both, *every, "_rotate 90", "_activate 90"]
