"""One test for each trap that existing batch implementations of speculation have fallen into.

End to end through the scheduler and a replica; traps 1, 3, 4, 5, 7 and 10 are also proved on their
own floor, in tests/replicas. Trap 13, logprobs taken from the draft, has no place to happen:
none are reported.
"""

from __future__ import annotations

import random

import pytest

from cluster.local_engine import LocalEngine, Output
from scheduler.config import SchedulerConfig
from scheduler.messages import FinishReason, Request, SamplingParams, StepResult
from tests.reference import plain_greedy
from tests.tiny_pairs import VOCAB, target_model, tiny_replica

PAD, EOS = 0, 2


def generate(*requests: Request, k: int = 3, rows: int = 8) -> list[Output]:
    engine = LocalEngine(
        tiny_replica("llama"), SchedulerConfig(rows_max=rows, draft_len=k), check=True
    )
    return engine.generate(requests)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(f"{length} {seed}")
    return tuple(rng.randrange(3, VOCAB) for _ in range(length))


def reference(tokens: tuple[int, ...], new: int) -> list[int]:
    return plain_greedy(target_model("llama"), tokens, new)


def test_trap_01_pad_ids_in_the_content_are_tokens() -> None:
    prompts = [(PAD,) * 5, (7, PAD, PAD, 9), (PAD, EOS, PAD), prompt(11)]
    outputs = generate(*(Request(str(i), p, 12) for i, p in enumerate(prompts)))
    assert [output.tokens for output in outputs] == [reference(p, 12) for p in prompts]


def test_trap_02_a_stop_token_in_the_prompt_stops_nothing() -> None:
    tokens = (EOS, 5, EOS, 8, EOS)
    expected = reference(tokens, 15)
    assert EOS not in expected, "the reference must not stop by itself"
    (output,) = generate(Request("a", tokens, 15, stop_token_ids=(EOS,)))
    assert output.tokens == expected
    assert output.reason is FinishReason.LENGTH


def test_trap_03_a_step_may_commit_all_draft_tokens_and_one_more() -> None:
    engine = LocalEngine(tiny_replica("qwen3"), SchedulerConfig(rows_max=4, draft_len=3))
    engine.generate([Request(str(i), prompt(4 + i), 40) for i in range(4)])
    most = max(_tokens_per_step(result) for result in engine.results if result.steps == 1)
    assert most == 4


def _tokens_per_step(result: StepResult) -> int:
    return max(len(row.tokens) for row in result.rows)


def test_trap_04_the_draft_keeps_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = tiny_replica("llama")
    widths: list[int] = []
    forward = replica._drafter.model.forward

    def recorded(tokens, *args):  # type: ignore[no-untyped-def]
        widths.append(tokens.shape[0])
        return forward(tokens, *args)

    engine = LocalEngine(replica, SchedulerConfig(rows_max=4, draft_len=4))
    engine.submit(Request("a", prompt(40), 60))
    engine.advance()
    monkeypatch.setattr(replica._drafter.model, "forward", recorded)
    engine.run()
    assert set(widths) == {1, 2}, "after the prefill the draft is fed at most two tokens"


def test_trap_05_realignment_moves_no_kv_data() -> None:
    """Rows accept different numbers of tokens; each KV position is written where it will stay."""
    replica = tiny_replica("llama")
    engine = LocalEngine(replica, SchedulerConfig(rows_max=4, draft_len=3, steps_per_batch_max=1))
    for i in range(4):
        engine.submit(Request(str(i), prompt(10 + i), 40))
    engine.advance()
    layer = replica._target.cache._layers[0]
    for _ in range(6):
        before = layer.clone()
        valid = {name: len(resident.content) - 1 for name, resident in replica._residents.items()}
        engine.advance()
        for name, length in valid.items():
            table = replica._blocks.table([name], layer.device)[0]
            kept = layer[table].flatten(0, 1)[:length]
            assert kept.equal(before[table].flatten(0, 1)[:length])


def test_trap_06_length_is_content_only() -> None:
    engine = LocalEngine(tiny_replica("llama"), SchedulerConfig(rows_max=4, draft_len=3))
    engine.generate([Request("long", prompt(50), 9), Request("short", prompt(2), 9)])
    for output in engine.outputs.values():
        assert output.usage.completion_tokens == len(output.tokens) == 9
    assert engine.outputs["short"].usage.prompt_tokens == 2


def test_trap_07_the_bonus_token_is_the_targets() -> None:
    """With a hopeless draft every token is a bonus token, and still the target's."""
    replica = tiny_replica("llama", draft_architecture="glm4")
    engine = LocalEngine(replica, SchedulerConfig(rows_max=2, draft_len=4))
    (output,) = engine.generate([Request("a", prompt(9), 30)])
    assert output.tokens == reference(prompt(9), 30)
    assert output.usage.accepted_tokens < output.usage.draft_tokens / 4


def test_trap_08_outputs_come_in_the_callers_order() -> None:
    prompts = [prompt(n) for n in (40, 3, 22, 3, 61, 10)]
    outputs = generate(*(Request(str(i), p, 10) for i, p in enumerate(prompts)), rows=3)
    assert [output.tokens for output in outputs] == [reference(p, 10) for p in prompts]


@pytest.mark.parametrize("k", [0, 1, 4, 8])
def test_trap_09_nothing_is_returned_after_a_stop_token_or_the_limit(k: int) -> None:
    tokens = prompt(6)
    expected = reference(tokens, 30)
    at = next(i for i in range(4, 30) if expected[i] not in expected[:i])
    stopped, limited = generate(
        Request("stopped", tokens, 30, stop_token_ids=(expected[at],)),
        Request("limited", tokens, at),
        k=k,
    )
    assert stopped.tokens == expected[: at + 1]
    assert stopped.reason is FinishReason.STOP
    assert limited.tokens == expected[:at]
    assert limited.reason is FinishReason.LENGTH
    for output in (stopped, limited):
        assert output.usage.completion_tokens == len(output.tokens)


def test_trap_11_a_finished_row_stays_as_it_is_while_others_run() -> None:
    engine = LocalEngine(tiny_replica("llama"), SchedulerConfig(rows_max=4, draft_len=3))
    engine.submit(Request("short", prompt(5), 3))
    engine.submit(Request("long", prompt(5, seed=1), 60))
    while engine.outputs["short"].reason is None:
        engine.advance()
    frozen = (list(engine.outputs["short"].tokens), engine.outputs["short"].usage)
    engine.run()
    assert (engine.outputs["short"].tokens, engine.outputs["short"].usage) == frozen
    assert engine.outputs["long"].tokens == reference(prompt(5, seed=1), 60)


def test_trap_12_a_sampled_row_does_not_depend_on_its_batch_mates() -> None:
    hot = Request("hot", prompt(8), 25, SamplingParams(temperature=1.2, top_p=0.95, seed=77))
    (alone,) = generate(hot, k=0)
    mates = [
        Request(str(i), prompt(4 + i), 25, SamplingParams(temperature=0.5 + i, seed=i))
        for i in range(7)
    ]
    together = generate(*mates, hot, k=5)
    assert together[-1].tokens == alone.tokens
