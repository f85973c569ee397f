"""Proves that the KV positions a step says it has read are those that its attention was told to.

With steps of fixed shapes that includes what pads their buckets: rows, blocks and draft tokens.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cluster.local_engine import LocalEngine
from replicas.in_place import VarlenInPlace
from replicas.model import PagedModel
from replicas.replica import Replica
from replicas.windows import Window
from scheduler.config import SchedulerConfig
from scheduler.messages import StepResult
from tests.oracle.test_trimmed import Trimming
from tests.oracle.worlds import mixed_requests
from tests.tiny_pairs import VOCAB, tiny_replica

REQUESTS = mixed_requests(VOCAB, 10, seed=5)
BLOCK_SIZE = 4
LAYERS = 3


def results_of(replica: Any, draft_len: int) -> list[StepResult]:
    """Of steps, of groups of up to five rows of different lengths."""
    engine = LocalEngine(replica, SchedulerConfig(rows_max=5, draft_len=draft_len))
    engine.generate(REQUESTS)
    return [result for result in engine.results if result.steps]


def windows_of(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> list[Window]:
    """Those of the target's passes over steps, as they come."""
    seen: list[Window] = []
    forward = replica._target.forward

    def noted(tokens: torch.Tensor, window: Window, logits_to_keep: int = 0) -> torch.Tensor:
        seen.append(window)
        return forward(tokens, window, logits_to_keep)

    monkeypatch.setattr(replica._target, "forward", noted)
    return seen


def read(results: list[StepResult]) -> int:
    return sum(result.kv_positions_read for result in results)


def own(results: list[StepResult]) -> int:
    return sum(result.kv_positions_own for result in results)


@pytest.mark.parametrize("draft_len", [0, 3, 5])
@pytest.mark.parametrize("trimmed", [False, True])
def test_a_gathering_step_of_fixed_shape_reads_all_of_its_table(
    draft_len: int, trimmed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = tiny_replica("qwen3", graphs="on")
    windows = windows_of(replica, monkeypatch)
    runner = replica._runner
    assert runner is not None
    tables = []
    step = runner.step

    def stepped(group: Any, watch: Any) -> Any:
        outcome = step(group, watch)
        tables.append(runner._kept[runner.kinds[-1]]._inputs.table.numel())
        return outcome

    monkeypatch.setattr(runner, "step", stepped)
    results = results_of(Trimming(replica, None) if trimmed else replica, draft_len)
    assert read(results) == sum(tables) * BLOCK_SIZE
    assert read(results) == sum(window.rows * window.length for window in windows)
    assert read(results) == sum(window.blocks.numel() for window in windows) * BLOCK_SIZE
    assert own(results) < read(results)


class Steps:
    """Notes what in-place attention is told, in steps alone and not in prefills."""

    def __init__(self, replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told = 0
        self._stepping = False
        forward = replica._target.forward

        def stepping(*of: Any, **more: Any) -> torch.Tensor:
            self._stepping = True
            out = forward(*of, **more)
            self._stepping = False
            return out

        monkeypatch.setattr(replica._target, "forward", stepping)

    def note(self, counts: torch.Tensor) -> None:
        if self._stepping:
            self.told += int(counts.sum())


@pytest.mark.parametrize("draft_len", [0, 3, 5])
@pytest.mark.parametrize("graphs", ["on", "off"])
def test_flex_reads_the_blocks_that_it_lists(
    graphs: str, draft_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = tiny_replica("qwen3", graphs=graphs, attention="flex", kv_blocks=256)
    steps = Steps(replica, monkeypatch)
    attention: Any = replica._target._in_place
    attend = attention._attend

    def noted(*given: Any) -> torch.Tensor:
        _, _, _, _, _, counts, _, _ = given
        steps.note(counts)
        out: torch.Tensor = attend(*given)
        return out

    monkeypatch.setattr(attention, "_attend", noted)
    results = results_of(replica, draft_len)
    assert read(results) * LAYERS == steps.told * BLOCK_SIZE > 0
    assert own(results) < read(results)


@pytest.mark.parametrize("draft_len", [0, 3, 5])
@pytest.mark.parametrize("graphs", ["on", "off"])
def test_varlen_reads_the_positions_that_it_is_told_of(
    graphs: str, draft_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU has no such kernel. What stands for it computes nothing, and tokens do not matter."""
    steps: Steps | None = None

    def varlen(
        query: torch.Tensor, *of: Any, seqused_k: torch.Tensor, block_table: Any, **more: Any
    ) -> torch.Tensor:
        if steps is not None:
            steps.note(seqused_k)
        return torch.zeros_like(query)

    def chosen(models: list[PagedModel], *of: Any) -> dict[str, str]:
        models[0].attend(VarlenInPlace(torch.bfloat16, torch.device("cuda")))
        return {"target": "varlen", "draft": "gather"}

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen)
    monkeypatch.setattr("replicas.replica.choose_attention", chosen)
    replica = tiny_replica("qwen3", graphs=graphs)
    steps = Steps(replica, monkeypatch)
    results = results_of(replica, draft_len)
    assert read(results) * LAYERS == steps.told > 0
    assert own(results) <= read(results)
    assert graphs == "on" or own(results) == read(results), "nothing pads"
