"""The oracle for drafters: whatever drafts, output is what it is without.

One world has all that a drafter must live through: batches of 1 and 8 whose rows draft 0 to 8
tokens, prompts filled in chunks, shared prefixes of several tenants, blocks that run out, so that
rows are sent back and what is shared is evicted and computed again, batches that fail in the middle
and run again, replicas that die. The drafter of docs/add-a-drafter.md is one of them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import takewhile
from typing import get_args

import pytest
import torch

from benchmarks.shared.oracle import OracleDrafter
from cluster.local.engine import LocalEngine
from replicas.config import Method, ReplicaConfig
from replicas.drafters import SOURCES, DraftRequest, Proposal
from replicas.memory import plan_memory
from replicas.stopwatch import Stopwatch
from scheduler.config import SchedulerConfig
from scheduler.messages import Priority, Request
from tests.oracle.drafters import ORACLES, replica_of, toy_source
from tests.oracle.worlds import TIGHT, Mortal, conversations, sampled
from tests.reference import plain_greedy
from tests.tiny_pairs import VOCAB, pair_in, target_model, tiny_pair, tiny_replica

DRAFTERS = (
    *("none", "model", "suffix", "eagle3", "dflash", "dspark", "clover", "toy"),
    *("suffix+model", "suffix+eagle3", "model+apart", "never", "half", "always"),
)
NAMES = {"draft_model": "model"}
"""Here, of a method whose name here is another."""
RUNS = ((False, 8, "off"), (True, 8, "on"))
LONG_RUNS = ((False, 1, "off"), (True, 1, "off"), (True, 8, "off"))


@cache
def world(hot: bool, architecture: str) -> tuple[list[Request], list[list[int]]]:
    """Requests with draft lengths and priorities of their own, and their outputs one by one
    without a drafter."""
    requests = sampled(conversations(seed=21)) if hot else conversations(seed=21)
    requests = [
        replace(request, draft_len=index % 9, priority=Priority(index % 3))
        for index, request in enumerate(requests)
    ]
    if not hot:
        model = target_model(architecture)
        return requests, [
            plain_greedy(model, request.prompt, request.max_new_tokens) for request in requests
        ]
    replica = replica_of("none", [], num_gpu_blocks_override=2048, prefix_sharing=False)
    engine = LocalEngine(replica, SchedulerConfig(rows_max=1, draft_len=0))
    return requests, [output.tokens for output in engine.generate(requests)]


@pytest.mark.parametrize(
    ("architecture", "drafter", "hot", "rows", "graphs"),
    [
        *(pytest.param("llama", drafter, *run) for drafter in DRAFTERS for run in RUNS),
        *(
            pytest.param("llama", drafter, *run, marks=pytest.mark.long)
            for drafter in DRAFTERS
            for run in LONG_RUNS
        ),
        *(
            pytest.param(architecture, drafter, False, 8, "off", marks=pytest.mark.long)
            for architecture in ("qwen3", "glm4")
            for drafter in ("model", "eagle3", "dflash", "dspark", "clover", *ORACLES)
        ),
    ],
)
def test_output_is_that_of_the_target_alone(
    architecture: str, drafter: str, hot: bool, rows: int, graphs: str
) -> None:
    """Hot: sampled. Graphs: in passes of fixed shapes."""
    requests, expected = world(hot, architecture)
    answered = list(zip(requests, expected, strict=True))
    pair = tiny_pair(architecture)
    settings = {
        "num_gpu_blocks_override": TIGHT,
        "graphs": graphs,
        "plan_rows": 8,
        "plan_draft_len": 8,
    }
    config = SchedulerConfig(rows_max=rows, draft_len=8, kv_reserve=0.0, prefill_tokens_max=24)
    engine = Mortal(lambda: replica_of(drafter, answered, pair, **settings), config)
    outputs = engine.live(requests)
    assert [output.tokens for output in outputs] == expected
    replica = engine.replica
    drafted = sum(output.usage.draft_tokens for output in outputs)
    accepted = sum(output.usage.accepted_tokens for output in outputs)
    assert (drafted > 0) == (drafter != "none")
    if drafter in ORACLES:  # it is unsure where one prompt is the beginning of another
        assert accepted / drafted == pytest.approx(ORACLES[drafter], abs=0.3)
        oracle = replica.drafter
        assert isinstance(oracle, OracleDrafter)
        assert oracle.rows == {}, "every row's life has ended"


def test_the_table_has_every_method_of_the_setting() -> None:
    assert {*SOURCES, "none"} == set(get_args(Method))
    assert {NAMES.get(method, method) for method in get_args(Method)} <= set(DRAFTERS)


def test_a_drafter_gets_the_memory_that_it_asks_for() -> None:
    """The plan leaves it, and has fewer blocks for it."""
    config = ReplicaConfig(device="cpu", block_size=4, memory="100MiB", calibrate=False)
    plain = replace(tiny_pair("llama"), draft=None)
    pair = replace(plain, draft=toy_source())
    planned, without = (
        plan_memory(config, kind.shape, torch.device("cpu"), loaded=True) for kind in (pair, plain)
    )
    assert planned.buffers.drafter == pair.shape.draft.kept == 1 << 20
    assert planned.least - without.least >= 1 << 20
    assert (without.kv_blocks - planned.kv_blocks) * planned.block_bytes >= 1 << 20


def test_a_token_that_was_asked_for_and_not_drafted_counts_as_tried() -> None:
    """So what asking for tokens gains is told by what was tried, however seldom a row drafts."""
    requests, expected = world(False, "llama")
    answered = zip(requests, expected, strict=True)
    config = SchedulerConfig(rows_max=4, draft_len=5, steps_per_batch_max=1)
    engine = LocalEngine(replica_of("always", answered), config)
    engine.generate(requests)
    rows = [row for result in engine.results for row in result.rows if row.steps]
    short = 0
    for row in rows:
        accepted = sum(row.accepted_at)
        assert accepted <= row.draft_tokens <= row.asked_tokens
        assert sum(row.tried_at) == min(accepted + 1, row.asked_tokens)
        short += row.draft_tokens < row.asked_tokens
    assert short > len(rows) / 3


class Clairvoyant(OracleDrafter):
    """It knows what the target will choose, and ends a draft before an odd token."""

    def propose(self, request: DraftRequest, watch: Stopwatch) -> Proposal:
        proposal = super().propose(request, watch)
        drafts = proposal.tokens.t().tolist()
        lens = [
            sum(1 for _ in takewhile(lambda token: token % 2 == 0, draft[:most]))
            for draft, most in zip(drafts, proposal.lens, strict=True)
        ]
        self.cut += sum(proposal.lens) - sum(lens)
        return Proposal(proposal.tokens, lens)

    cut = 0


def test_a_draft_that_is_cut_by_what_it_says_changes_no_sampled_token() -> None:
    """Under rejection sampling it would: a token would be the likelier the less it is checked."""
    requests, expected = world(True, "llama")
    whole = [[*request.prompt, *tokens] for request, tokens in zip(requests, expected, strict=True)]
    drafter = Clairvoyant(whole, 1.0, VOCAB, ragged=False)
    engine = LocalEngine(tiny_replica("llama", drafter), SchedulerConfig(rows_max=8, draft_len=4))
    outputs = engine.generate([replace(request, draft_len=None) for request in requests])
    assert [output.tokens for output in outputs] == expected
    assert drafter.cut > 100
    assert sum(output.usage.accepted_tokens for output in outputs) > 50


IN_BFLOAT16 = {"dtype": "bfloat16", "deterministic": True, "num_gpu_blocks_override": 512}


@cache
def in_bfloat16_alone() -> tuple[list[Request], list[list[int]]]:
    requests = [replace(request, draft_len=None) for request in world(True, "llama")[0][:8]]
    replica = replica_of("none", [], pair_in(torch.bfloat16), **IN_BFLOAT16)
    engine = LocalEngine(replica, SchedulerConfig(rows_max=1, draft_len=0))
    return requests, [output.tokens for output in engine.generate(requests)]


@pytest.mark.long
@pytest.mark.parametrize(
    "drafter", [drafter for drafter in DRAFTERS if drafter not in ("none", "toy")]
)
def test_so_it_is_in_bfloat16_with_deterministic_sums(drafter: str) -> None:
    requests, expected = in_bfloat16_alone()
    answered = zip(requests, expected, strict=True)
    replica = replica_of(drafter, answered, pair_in(torch.bfloat16), **IN_BFLOAT16)
    engine = LocalEngine(replica, SchedulerConfig(rows_max=8, draft_len=5), check=True)
    assert [output.tokens for output in engine.generate(requests)] == expected
