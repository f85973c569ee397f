"""Proves: a draft model on a device of its own drafts one batch while the target checks another,
and output is the target's all the same; a draft that is not used leaves nothing behind; with one
batch it drafts in the step. What cannot be overlapped is refused by the field's name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from cluster.local.engine import LocalEngine
from replicas.config import ReplicaConfig
from replicas.drafters.overlapped import OverlappedDrafter, OverlappedSource
from replicas.memory import plan_memory
from replicas.replica import Replica
from scheduler.config import SchedulerConfig
from scheduler.messages import Batch, BatchKind, PrefillRow, Sampling, StepResult, StepRow
from tests.oracle.worlds import conversations, sampled
from tests.replicas.pool import Client, failing_pass, prompt
from tests.tiny_pairs import tiny_pair, tiny_replica

K = 3
HANGS_S = 60.0
"""Nothing lasts so long but what waits for ever."""


def overlapped() -> Replica:
    pair = tiny_pair("llama")
    assert pair.draft is not None
    own = replace(pair, draft=OverlappedSource(pair.draft, apart=False, device=pair.device))
    config = ReplicaConfig(device="cpu", block_size=4, num_gpu_blocks_override=512)
    return Replica(own, config)


class Watched:
    """An overlapping replica, and a note of each proposal that its drafter makes."""

    def __init__(self) -> None:
        self.replica = overlapped()
        self.client = Client(self.replica)
        self.proposals: list[list[str]] = []
        self.proposed = threading.Event()
        assert isinstance(self.replica.drafter, OverlappedDrafter)
        self._drafter: Any = self.replica.drafter._drafter
        self._propose: Callable[..., Any] = self._drafter.propose
        self._drafter.propose = self._noting

    def _noting(self, request: Any, watch: Any) -> Any:
        proposal = self._propose(request, watch)
        self.proposals.append(list(request.ids))
        self.proposed.set()
        return proposal

    def batch(self, number: int, *names: str, blocks: int | None = None) -> Batch:
        contents = self.client.contents
        rows = tuple(
            StepRow(name, len(contents[name]), K, blocks or self.client.blocks[name])
            for name in sorted(names, key=lambda name: len(contents[name]))
        )
        return Batch(number, "r", BatchKind.SPECULATE, rows=rows, draft_len=K)

    def run(self, batch: Batch) -> StepResult:
        result = self.replica.step(batch)
        for row in result.rows:
            self.client.contents[row.sequence_id].extend(row.tokens)
        self.replica.check_integrity()
        return result

    def wait(self) -> None:
        assert self.proposed.wait(HANGS_S)
        self.proposed.clear()


@pytest.fixture
def watched() -> Watched:
    made = Watched()
    made.client.prefill(**{name: prompt(7 + at, at) for at, name in enumerate("abcd")})
    return made


def test_a_batch_is_drafted_while_another_one_is_checked(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of the first ends only when the second has been drafted."""
    one, two = watched.batch(2, "a", "b"), watched.batch(3, "c", "d")
    forward = watched.replica.target.forward

    def check(*args: Any) -> Any:
        watched.proposed.clear()
        watched.replica.draft_ahead(two)
        watched.wait()
        return forward(*args)

    monkeypatch.setattr(watched.replica.target, "forward", check)
    first = watched.run(one)
    monkeypatch.undo()
    assert watched.proposals == [["a", "b"], ["c", "d"]]
    second = watched.run(two)
    assert watched.proposals == [["a", "b"], ["c", "d"]], "the draft was there"
    assert first.times.hidden_s == 0 < second.times.hidden_s <= second.times.draft_s
    assert all(row.draft_tokens == K for row in (*first.rows, *second.rows))
    watched.client.check()


def test_drafts_ahead_are_those_of_the_step() -> None:
    """So as many of them are right; sampled, too."""
    requests = sampled(conversations(seed=3))[:12]
    requests = [replace(request, draft_len=None) for request in requests]
    config = SchedulerConfig(rows_max=4, draft_len=K, kv_reserve=1.0)
    found = []
    for replica in (tiny_replica("llama"), overlapped()):
        engine = LocalEngine(replica, config, check=True)
        tokens = [output.tokens for output in engine.generate(requests)]
        found.append((tokens, [output.usage.accepted_tokens for output in engine.outputs.values()]))
        hidden_s = sum(result.times.hidden_s != 0 for result in engine.results)
        assert bool(hidden_s) == replica.spec.overlaps
        assert replica.residents == ()
    (tokens, right), (theirs, right_too) = found
    assert tokens == theirs
    assert sum(right) > 0
    assert sum(right_too) == pytest.approx(sum(right), rel=0.1)  # of batches of other rows


def test_a_batch_that_fails_leaves_the_draft_of_the_other_one(watched: Watched) -> None:
    one, two = watched.batch(2, "a", "b"), watched.batch(3, "c", "d")
    watched.replica.draft_ahead(one)
    watched.replica.draft_ahead(two)
    with pytest.raises(RuntimeError, match="out of memory"), failing_pass(watched.replica, 1):
        watched.replica.step(one)
    watched.run(two)
    assert watched.proposals == [["a", "b"], ["c", "d"]]
    watched.run(one)
    assert watched.proposals[2:] == [["a", "b"]], "what was drafted before it failed is gone"
    for _ in range(2):
        watched.client.steps(K)
    watched.client.check()


def test_a_draft_that_is_not_used_leaves_nothing_behind(watched: Watched) -> None:
    """Its rows are released, and others of the same names and lengths come."""
    watched.replica.draft_ahead(watched.batch(2, "a", "b"))
    watched.replica.release("abcd")
    assert watched.replica.free_blocks == 512
    watched.proposals.clear()
    client = watched.client = Client(watched.replica)
    client.prefill(a=prompt(7, 10), b=prompt(8, 11))
    watched.run(watched.batch(2, "a", "b"))
    assert watched.proposals == [["a", "b"]], "what was drafted for the others is gone"
    client.steps(K)
    client.check()


def test_a_draft_ahead_takes_no_blocks(watched: Watched) -> None:
    """Where those of the rows do not last, they are drafted in the step."""
    replica, content = watched.replica, prompt(7, 9)
    row = PrefillRow("e", tuple(content), 20, Sampling(), (), blocks=2)
    replica.step(Batch(9, "r", BatchKind.PREFILL, prefill=(row,)))
    watched.client.contents = {"e": list(content)}
    watched.client.prompts["e"] = len(content)
    batch, free = watched.batch(10, "e", blocks=7), replica.free_blocks
    replica.draft_ahead(batch)
    assert replica.free_blocks == free
    result = watched.run(batch)
    assert (watched.proposals, result.times.hidden_s) == ([["e"]], 0)
    watched.client.check()


def test_a_batch_alone_and_one_of_several_steps_are_drafted_in_their_steps(
    watched: Watched,
) -> None:
    result = watched.client.steps(K, 2, ["a"])
    assert (result.steps, watched.proposals, result.times.hidden_s) == (2, [["a"]] * 2, 0)
    batch = replace(watched.batch(9, "b"), steps=2)
    watched.replica.draft_ahead(batch)
    assert watched.run(batch).steps == 2
    assert watched.proposals == [["a"], ["a"], ["b"], ["b"]]
    watched.client.contents = {name: watched.client.contents[name] for name in "ab"}
    watched.client.check()


def test_what_a_draft_raises_fails_its_own_batch(watched: Watched) -> None:
    one, two = watched.batch(2, "a", "b"), watched.batch(3, "c", "d")
    propose = watched._drafter.propose

    def failing(*args: Any) -> Any:
        raise RuntimeError("the drafter's device is full")

    watched._drafter.propose = failing
    watched.replica.draft_ahead(two)
    with pytest.raises(RuntimeError, match="device is full"):
        watched.replica.step(two)
    watched._drafter.propose = propose
    watched.run(one)
    watched.run(two)
    watched.client.check()


def test_another_devices_memory_is_not_the_targets() -> None:
    """Its weights and its layers take none of it."""
    pair = tiny_pair("llama")
    assert pair.draft is not None
    config = ReplicaConfig(device="cpu", block_size=4, memory="100MiB")
    shapes = {
        "beside": pair.shape,
        "apart": replace(pair, draft=OverlappedSource(pair.draft, apart=True)).shape,
        "none": replace(pair, draft=None).shape,
    }
    bytes_of = {
        name: plan_memory(config, shape, torch.device("cpu"), loaded=True).block_bytes
        for name, shape in shapes.items()
    }
    assert bytes_of["apart"] == bytes_of["none"] < bytes_of["beside"]
    assert shapes["apart"].weights == shapes["none"].weights


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "suffix", "draft_device": "cpu"}, "draft_device: for method draft_model"),
        (
            {
                "method": "draft_model",
                "model": "tiny",
                "draft_device": "cpu",
                "enable_suffix_decoding": True,
            },
            "draft_device: for method draft_model",
        ),
        ({"method": "draft_model", "model": "tiny", "draft_device": "tpu"}, "draft_device"),
    ],
)
def test_what_cannot_be_overlapped_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ReplicaConfig(speculative_config=settings)


def test_ranks_cannot_be_overlapped_yet() -> None:
    said = {"method": "draft_model", "model": "tiny", "draft_device": "cpu"}
    with pytest.raises(ValidationError, match="draft_device: not with tensor_parallel"):
        ReplicaConfig(tensor_parallel=2, speculative_config=said)


def test_a_setting_puts_the_draft_model_on_a_thread_of_its_own() -> None:
    said = {"method": "draft_model", "model": "tiny", "draft_device": "cpu"}
    config = ReplicaConfig(
        target="tiny",
        device="cpu",
        speculative_config=said,
        num_gpu_blocks_override=256,
        calibrate=False,
    )
    replica = Replica.load(config)
    assert isinstance(replica.drafter, OverlappedDrafter)
    assert replica.spec.overlaps
    assert not tiny_replica("llama").spec.overlaps
