"""The oracle over layers that keep their window alone: whatever happens to a request whose text is
far longer than the window, it receives the tokens of transformers' `generate`, and the bits that it
receives where all layers keep the whole text.

That blocks really are given up, and how many a sequence has, is in tests/replicas/kv_cache.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from benchmarks.shared.oracle import OracleDrafter
from cluster.local.engine import LocalEngine
from replicas.config import ReplicaConfig
from replicas.kv_cache import one_group
from replicas.parallel.parallel_replica import load_parallel
from replicas.replica import Replica
from scheduler.config import SchedulerConfig
from scheduler.decoding import Decoding
from scheduler.messages import Request, Sampling
from tests.oracle.worlds import Answered, check_answers
from tests.reference import plain_greedy
from tests.replicas.kv_cache.windowed import (
    CONTEXT,
    drafted_pair,
    windowed_model,
    windowed_pair,
    windowed_replica,
)
from tests.replicas.pool import Client, Failing, prompt
from tests.tiny_pairs import VOCAB

KINDS = ("gemma3_text", "gpt_oss")
LENGTHS = ((150, 30), (1, 95), (97, 40), (97, 20), (130, 9), (40, 60))
"""Tokens of the prompts, and to come: most are longer than what a layer with a window keeps."""


@cache
def answered(kind: str) -> Answered:
    """Requests, and what transformers' own `generate` gives for each."""
    model = windowed_model(kind)
    return tuple(
        (
            Request(f"r{number}", tuple(prompt(length, number)), new),
            plain_greedy(model, prompt(length, number), new),
        )
        for number, (length, new) in enumerate(LENGTHS)
    )


def oracle(kind: str) -> OracleDrafter:
    """Right half of the time."""
    whole = [[*request.prompt, *tokens] for request, tokens in answered(kind)]
    return OracleDrafter(whole, 0.5, VOCAB)


@cache
def drafting_replica(kind: str) -> Replica:
    return windowed_replica(windowed_pair(kind), oracle(kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows_max", "draft_len"), [(1, 4), (8, 0), (3, 1), (16, 8)])
def test_output_equals_plain_generate(kind: str, rows_max: int, draft_len: int) -> None:
    outputs = check_answers(drafting_replica(kind), answered(kind), rows_max, draft_len, rows_max)
    accepted = sum(output.usage.accepted_tokens for output in outputs)
    drafted = sum(output.usage.draft_tokens for output in outputs)
    assert not draft_len or 0 < accepted < drafted, "some are right and some are not"


@pytest.mark.parametrize("kind", ["llama4_text", "mistral"])
def test_layers_with_chunks_and_models_of_windows_alone_do_the_same(kind: str) -> None:
    check_answers(drafting_replica(kind), answered(kind)[2:4], 2, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_in_chunks_and_blocks_that_run_out_change_nothing(kind: str) -> None:
    """Blocks for the longest sequence and little more: rows go and come back."""
    replica = windowed_replica(windowed_pair(kind), oracle(kind), num_gpu_blocks_override=64)
    config = SchedulerConfig(rows_max=4, draft_len=2, prefill_tokens_max=11, kv_reserve=0.0)
    engine = LocalEngine(replica, config, check=True)
    outputs = engine.generate([request for request, _ in answered(kind)])
    for (request, tokens), output in zip(answered(kind), outputs, strict=True):
        assert output.tokens == tokens, request.id
    assert engine.scheduler.snapshot().preempted > 0
    replica.check_integrity()


@pytest.mark.parametrize("graphs", ["off", pytest.param("on", marks=pytest.mark.long)])
def test_a_draft_model_beside_them_keeps_its_whole_text(graphs: str) -> None:
    """Its layer lies in the blocks of the layers that see everything. `on`: in fixed shapes, by the
    attention of a device."""
    pair = drafted_pair("gemma3_text")
    replica = windowed_replica(pair, graphs=graphs, plan_rows=4, plan_draft_len=4)
    assert replica.spec.kv_groups
    check_answers(replica, answered("gemma3_text")[:4], 4, 3)


def test_a_batch_that_fails_in_a_later_step_is_undone() -> None:
    """Nothing is given up before the last step: the rows begin again where the batch began."""
    kind = "gemma3_text"
    failing = Failing(drafting_replica(kind), 0.4)
    config = SchedulerConfig(rows_max=4, draft_len=2, steps_per_batch_max=16)
    engine = LocalEngine(failing, config, check=True)
    outputs = engine.generate([request for request, _ in answered(kind)])
    assert [output.tokens for output in outputs] == [tokens for _, tokens in answered(kind)]
    assert failing.failed > 3


def test_a_batch_has_as_many_steps_as_it_has_room_for() -> None:
    """64 tokens behind the window; the pool asks for more."""
    request, tokens = answered("gemma3_text")[1]
    client = Client(drafting_replica("gemma3_text"))
    client.prefill(new=len(tokens), r=list(request.prompt))
    assert client.steps(k=8, n=32).steps == 64 // 9
    assert client.new_tokens("r") == tokens[: len(client.new_tokens("r"))]
    client.replica.release(["r"])


@pytest.mark.parametrize("kind", KINDS)
def test_another_replica_goes_on_where_one_has_died(kind: str) -> None:
    """With all that was committed as its content, in whatever blocks."""
    first = LocalEngine(windowed_replica(windowed_pair(kind)), SchedulerConfig(draft_len=0))
    begun = [first.submit(request) for request, _ in answered(kind)]
    for _ in range(8):
        first.advance()
    engine = LocalEngine(drafting_replica(kind), SchedulerConfig(draft_len=4), check=True)
    went_on = 0
    for (request, tokens), output in zip(answered(kind), begun, strict=True):
        done = tuple(output.tokens)
        if len(done) < len(tokens):
            content, left = request.prompt + done, len(tokens) - len(done)
            went_on += bool(done)
            output.tokens += engine.generate([Request(request.id, content, left)])[0].tokens
        assert output.tokens == tokens
    assert went_on > 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_chat_goes_on_where_it_ended(kind: str) -> None:
    """Each turn begins with what was said before, of which the last window is still there."""
    engine = LocalEngine(drafting_replica(kind), SchedulerConfig(draft_len=3), check=True)
    said = tuple(prompt(60, 5))
    found = []
    for turn in range(3):
        (output,) = engine.generate([Request(f"t{turn}", said, 30)])
        assert output.tokens == plain_greedy(windowed_model(kind), said, 30)
        found.append((output.usage.cached_tokens, len(said)))
        said += (*output.tokens, 4, 2)
    for cached, length in found[1:]:
        assert length - 12 <= cached < length


def test_a_shared_beginning_is_found_while_its_window_is_there_and_else_computed() -> None:
    kind = "gemma3_text"
    replica = windowed_replica(windowed_pair(kind), num_gpu_blocks_override=64)
    engine = LocalEngine(replica, SchedulerConfig(draft_len=0), check=True)
    system = prompt(80, 9)
    found = []
    for number in range(3):
        asked = (*system, *prompt(70, 20 + number))
        if number == 2:  # other texts take the blocks
            engine.generate([Request(f"o{seed}", tuple(prompt(200, seed)), 9) for seed in range(3)])
        (output,) = engine.generate([Request(f"q{number}", asked, 12)])
        assert output.tokens == plain_greedy(windowed_model(kind), asked, 12)
        found.append(output.usage.cached_tokens)
    assert found[0] == 0
    assert found[1] == 80
    assert found[2] < 80


@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_those_of_layers_that_keep_everything(kind: str) -> None:
    """Log-probabilities of sampled rows, beside others and drafted, against each one alone."""
    pair = windowed_pair(kind)
    config = ReplicaConfig(block_size=4, num_gpu_blocks_override=512, device=str(pair.device))
    plan = replace(pair.plan(config), groups=one_group(pair.shape.target.attention))
    whole = windowed_replica(pair, plan=plan)
    assert not whole.spec.kv_groups
    assert drafting_replica(kind).spec.kv_groups
    requests = [
        replace(
            request,
            sampling=Sampling(temperature=0.9, seed=number),
            decoding=Decoding(len(request.prompt), logprobs=3),
        )
        for number, (request, _) in enumerate(answered(kind))
    ]
    alone = LocalEngine(whole, SchedulerConfig(rows_max=1, draft_len=0))
    expected = [alone.generate([request])[0] for request in requests]
    engine = LocalEngine(drafting_replica(kind), SchedulerConfig(rows_max=8, draft_len=4))
    for got, want in zip(engine.generate(requests), expected, strict=True):
        assert (got.tokens, got.logprobs) == (want.tokens, want.logprobs)


def test_logits_of_a_content_are_those_of_a_row() -> None:
    replica = drafting_replica("gemma3_text")
    (request, tokens) = answered("gemma3_text")[0]
    free = replica.free_blocks
    assert int(replica.logits([*request.prompt, *tokens[:20]]).argmax()) == tokens[20]
    assert replica.free_blocks == free
    replica.check_integrity()


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_give_the_tokens_of_one(kind: str, tmp_path: Path) -> None:
    windowed_model(kind).save_pretrained(tmp_path)
    words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(VOCAB)}))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    config = ReplicaConfig(
        target=str(tmp_path),
        speculative_config={"method": "suffix"},
        tensor_parallel=2,
        device="cpu",
        torch_threads=1,
        block_size=4,
        num_gpu_blocks_override=64,
        context_len=CONTEXT,
        calibrate=False,
    )
    few = answered(kind)[:5]
    with closing(load_parallel(config)) as parallel:
        assert parallel.spec.kv_groups
        scheduler = SchedulerConfig(rows_max=4, draft_len=3, kv_reserve=0.0)
        outputs = LocalEngine(parallel, scheduler).generate([request for request, _ in few])
    assert [output.tokens for output in outputs] == [tokens for _, tokens in few]
