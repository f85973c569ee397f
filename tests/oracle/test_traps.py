"""Traps that existing batch implementations of speculation have fallen into, end to end through the
scheduler and a replica: those that no other test shows.

Elsewhere: 2, 6 and 9, a stop token in the prompt, lengths with padding in them, tokens after the
end, in tests/scheduler and tests/sim; 3 and 7, the bonus token, and 4, a draft that reads all anew,
in tests/replicas/test_eqspec.py; 8, the caller's order, and 12, sampling that depends on batch
mates, in the oracle of drafters and of requests alone; 10, unlike vocabularies, in
tests/replicas/test_pair.py; 11, a finished row that changes while others run, in
tests/oracle/test_alone.py, which reads outputs when all have ended; 13, log-probabilities of the
draft, in tests/oracle/test_decoding.py.
"""

from __future__ import annotations

import random

from cluster.local.engine import LocalEngine
from scheduler.config import SchedulerConfig
from scheduler.messages import Request
from tests.reference import plain_greedy
from tests.tiny_pairs import VOCAB, target_model, tiny_replica, unrecorded

PAD, EOS = 0, 2


def prompt(length: int) -> tuple[int, ...]:
    rng = random.Random(length)
    return tuple(rng.randrange(3, VOCAB) for _ in range(length))


def test_trap_01_pad_ids_in_the_content_are_tokens() -> None:
    prompts = [(PAD,) * 5, (7, PAD, PAD, 9), (PAD, EOS, PAD), prompt(11)]
    engine = LocalEngine(tiny_replica("llama"), SchedulerConfig(draft_len=3), check=True)
    outputs = engine.generate([Request(str(i), tokens, 12) for i, tokens in enumerate(prompts)])
    expected = [plain_greedy(target_model("llama"), tokens, 12) for tokens in prompts]
    assert [output.tokens for output in outputs] == expected


def test_trap_05_realignment_moves_no_kv_data() -> None:
    """Rows accept different numbers of tokens; each KV position is written where it will stay."""
    replica = tiny_replica("llama")
    engine = LocalEngine(replica, SchedulerConfig(rows_max=4, draft_len=3, steps_per_batch_max=1))
    outputs = {str(i): engine.submit(Request(str(i), prompt(10 + i), 40)) for i in range(4)}
    engine.advance()
    layer = unrecorded(replica.target).cache.layers[0]
    for _ in range(6):
        before = layer.clone()
        valid = {
            resident: 9 + int(resident) + len(outputs[resident].tokens)
            for resident in replica.residents
        }
        engine.advance()
        for name, length in valid.items():
            table = replica.blocks.table([name], layer.device)[0]
            kept = layer[table].flatten(0, 1)[:length]
            assert kept.equal(before[table].flatten(0, 1)[:length])
