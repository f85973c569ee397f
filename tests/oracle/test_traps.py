"""Traps that existing batch implementations of speculation have fallen into, end to end through the
scheduler and a replica: those that no other test shows.

Elsewhere: 2, 6 and 9, a stop token in the prompt, lengths with padding in them, tokens after the
end, in tests/scheduler and tests/sim; 3 and 7, the bonus token, and 4, a draft that reads all anew,
in tests/replicas/test_eqspec.py; 8, the caller's order, and 12, sampling that depends on batch
mates, in the oracle of drafters and of sampling; 10, unlike vocabularies, in
tests/replicas/models/test_pair.py; 11, a finished row that changes while others run, in
tests/oracle/test_greedy.py, which reads outputs when all have ended; 13, log-probabilities of the
draft, in tests/oracle/test_decoding.py.
"""

from __future__ import annotations

import random

from cluster.local_engine import LocalEngine, Output
from scheduler.config import SchedulerConfig
from scheduler.messages import Request
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
