"""Proves: docs/models.md says of each family what a small model of it gives: the tokens of
transformers' own `generate`, with drafts and without, or a refusal in these words.

`python -m tests.replicas.models.test_every_family` tries all and writes that part of the page.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.local.engine import LocalEngine
from replicas.errors import PairRefused
from replicas.models.own_code.layer_reading import layers_of
from scheduler.config import SchedulerConfig
from scheduler.messages import Request
from tests.oracle.drafters import replica_of
from tests.reference import plain_greedy
from tests.replicas.models.every_family import KINDS, small_model
from tests.tiny_pairs import VOCAB, pair_of

PAGE = Path("docs/models.md")
MADE = "tests.replicas.models.test_every_family -->\n"
SERVED, REFUSED = "| its layers need | model types |", "| refused, because | model types |"
_FEW = """llama phi3 gemma2 gemma4_text gpt_oss qwen3_moe deepseek_v3 llama4_text mimo_v2_flash
hunyuan_v1_moe qwen3_next bloom"""
IN_MAKE_TEST = _FEW.split()
NEW = 12


def outcome(kind: str) -> tuple[str, str]:
    """A head of a table, and the first cell of a row in it."""
    model = small_model(kind)
    try:
        pair = pair_of(model, kind)
        replica = replica_of("model", [], pair, num_gpu_blocks_override=256)
    except PairRefused as refusal:
        return REFUSED, str(refusal).partition(" is not served: ")[2]
    rng = random.Random(5)
    requests = [
        Request(str(length), tuple(rng.randrange(3, VOCAB) for _ in range(length)), NEW)
        for length in (2, 11, 30, 63)
    ]
    expected = [plain_greedy(model, request.prompt, NEW) for request in requests]
    for k in (0, 4):
        engine = LocalEngine(replica, SchedulerConfig(rows_max=4, draft_len=k), check=True)
        asked = [replace(request, id=f"{request.id} {k}") for request in requests]
        assert [output.tokens for output in engine.generate(asked)] == expected, (kind, k)
    return SERVED, ", ".join(needs(model)) or "full attention"


def needs(model: Any) -> Iterator[str]:
    layers = layers_of(model)
    for name, words in (("window", "a window"), ("chunk", "chunks")):
        having = [layer for layer in layers if getattr(layer, name) is not None]
        if having:
            yield words if len(having) == len(layers) else f"{words} in some layers"
    if any(layer.soft_cap is not None for layer in layers):
        yield "soft caps"
    if any(layer.sinks for layer in layers):
        yield "sinks"
    if any(layer.value_dim != layer.head_dim for layer in layers):
        yield "values narrower than keys"
    if len({(layer.heads, layer.kv_heads, layer.head_dim) for layer in layers}) > 1:
        yield "other widths in some layers"
    if len({layer.store for layer in layers}) < len(layers):
        yield "layers that read another's cache"
    if any("Experts" in type(module).__name__ for module in model.modules()):
        yield "experts"


def page_part(outcomes: Mapping[str, tuple[str, str]]) -> str:
    lines: list[str] = []
    for head in (SERVED, REFUSED):
        rows: dict[str, list[str]] = {}
        for kind, (of_head, first) in sorted(outcomes.items()):
            if of_head == head:
                rows.setdefault(first, []).append(kind)
        lines += ["", head, "|---|---|"] if lines else [head, "|---|---|"]
        lines += [
            f"| {first} | {', '.join(kinds)} |"
            for first, kinds in sorted(rows.items(), key=lambda row: -len(row[1]))
        ]
    return "\n".join(lines) + "\n"


def said() -> dict[str, tuple[str, str]]:
    """What the page says of each model type."""
    found, head = {}, ""
    for line in PAGE.read_text().partition(MADE)[2].splitlines():
        if line in (SERVED, REFUSED):
            head = line
        elif line.startswith("| "):
            first, kinds = line.strip("| ").split(" | ")
            found.update(dict.fromkeys(kinds.split(", "), (head, first)))
    return found


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in IN_MAKE_TEST else pytest.mark.slow) for kind in KINDS],
)
def test_a_family_is_served_or_refused_as_the_page_says(kind: str) -> None:
    assert outcome(kind) == said()[kind]


def test_the_page_has_each_family_once() -> None:
    assert sorted(said()) == sorted(KINDS)
    assert PAGE.read_text().partition(MADE)[2] == page_part(said())


if __name__ == "__main__":
    PAGE.write_text(
        "".join(PAGE.read_text().partition(MADE)[:2])
        + page_part({kind: outcome(kind) for kind in KINDS})
    )
