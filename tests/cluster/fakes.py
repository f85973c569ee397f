"""A replica and a tokenizer without weights, for everything above them.

The fake's next token is a function of the content, so a perfect world can be computed; how many
tokens a step commits varies, as if a draft had guessed them.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from cluster.frontend.target_text import TargetText
from replicas.calibration import probe
from replicas.config import ReplicaConfig
from scheduler.messages import Batch, BatchKind, ReplicaSpec, RowResult, StepResult, StepTimes

VOCAB = 320
CONTEXT = 512
EOS = 1
SAMPLES = ["the quick brown fox jumps over the lazy dog", "héllo wörld", "漢字 and 😀 emoji 🎉"]


def next_token(content: Sequence[int], vocab: int = VOCAB, name: str = "") -> int:
    """What the fake target of this name says after `content`; never the end of text."""
    key = f"{name}{len(content)},{list(content[-6:])}".encode()
    return 2 + zlib.crc32(key) % (vocab - 2)


def perfect(
    prompt: Sequence[int], count: int, stops: Sequence[int] = (), name: str = ""
) -> list[int]:
    """The tokens that an undisturbed run gives."""
    content = list(prompt)
    for _ in range(count):
        content.append(next_token(content, name=name))
        if content[-1] in stops:
            break
    return content[len(prompt) :]


class Clock:
    """Stands still until it is set."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


class ClockAhead:
    """The machine's, and so much more."""

    ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


@dataclass
class _Resident:
    content: list[int]
    tokens_left: int
    stops: tuple[int, ...]


class FakeReplica:
    """Implements HostedReplica; `step_s` is how long a step takes."""

    def __init__(
        self,
        step_s: float = 0.0,
        kv_blocks: int = 2000,
        prefill_s: float = 0.0,
        name: str = "",
    ) -> None:
        """`name`: of the target; another one says something else."""
        self._name = name
        self.spec = ReplicaSpec(
            kv_blocks=kv_blocks,
            block_size=16,
            context_len=CONTEXT,
            vocab_size=VOCAB,
            target=name or "fake",
            draft="fake draft",
            drafter="draft_model",
        )
        self.broken: Exception | None = None
        self._step_s = step_s
        self._prefill_s = prefill_s
        self._residents: dict[str, _Resident] = {}

    @property
    def residents(self) -> tuple[str, ...]:
        return tuple(self._residents)

    def release(self, sequence_ids: Iterable[str]) -> None:
        for sequence_id in sequence_ids:
            self._residents.pop(sequence_id, None)

    def probe(self) -> None:
        probe(self)

    def step(self, batch: Batch, interrupted: Callable[[], bool] = lambda: False) -> StepResult:
        start = time.perf_counter()
        if batch.kind is BatchKind.PREFILL:
            time.sleep(self._prefill_s)
            for row in batch.prefill:
                known = row.sequence_id in self._residents
                assert known != bool(row.tokens), "content comes with the first chunk, and once"
                if not known:
                    self._residents[row.sequence_id] = _Resident(
                        list(row.tokens), row.tokens_left, row.stop_token_ids
                    )
            rows = tuple(RowResult(row.sequence_id) for row in batch.prefill)
            return StepResult(batch.id, batch.replica_id, rows)
        taken = {row.sequence_id: _Row(row.draft_len) for row in batch.rows}
        for row in batch.rows:
            assert len(self._residents[row.sequence_id].content) == row.length, "length"
        steps = 0
        finished = False
        while steps < batch.steps and not finished and not (steps and interrupted()):
            time.sleep(self._step_s)
            steps += 1
            for sequence_id, row in taken.items():
                finished |= row.advance(self._residents[sequence_id], self._name)
        return StepResult(
            batch.id,
            batch.replica_id,
            tuple(
                RowResult(sequence_id, tuple(row.tokens), steps, row.drafted, tuple(row.accepted))
                for sequence_id, row in taken.items()
            ),
            steps,
            StepTimes(total_s=time.perf_counter() - start),
        )


class _Row:
    def __init__(self, draft_len: int) -> None:
        self.draft_len = draft_len
        self.tokens: list[int] = []
        self.drafted = 0
        self.accepted = [0] * draft_len

    def advance(self, resident: _Resident, name: str) -> bool:
        draft_len = min(self.draft_len, resident.tokens_left - 1)
        agreed = zlib.crc32(str(resident.content[-3:]).encode()) % (draft_len + 1)
        self.drafted += draft_len
        for position in range(agreed):
            self.accepted[position] += 1
        for _ in range(agreed + 1):
            token = next_token(resident.content, name=name)
            resident.content.append(token)
            resident.tokens_left -= 1
            self.tokens.append(token)
            if token in resident.stops:
                return True
        return resident.tokens_left <= 0


def load_fake(config: ReplicaConfig, step_s: float = 0.0, prefill_s: float = 0.0) -> FakeReplica:
    return FakeReplica(step_s, config.num_gpu_blocks_override or 2000, prefill_s)


@cache
def tokenizer() -> Tokenizer:
    """Byte-level BPE over all bytes and a few merges; ids 0 and 1 are special."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(SAMPLES * 20, trainer)
    return made


def _encode(
    text: str, add_special_tokens: bool = True, verbose: bool = True
) -> dict[str, list[int]]:
    return {"input_ids": tokenizer().encode(text).ids}


def load_fake_text(_config: ReplicaConfig) -> TargetText:
    return TargetText(tokenizer(), (EOS,), CONTEXT, _encode)
