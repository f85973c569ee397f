"""Plays steps to a drafter on hidden states alone, in float64: what it drafts, from which logits,
and what it writes."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from replicas.config import ReplicaConfig
from replicas.drafters import DraftRequest, DraftSource, Observation
from replicas.kv_cache import PagedCache
from replicas.memory import plan_memory
from replicas.models import device_attention
from replicas.sampling import SamplingBatch
from replicas.stopwatch import Stopwatch
from scheduler.messages import Sampling
from tests.tiny_pairs import VOCAB, target_model, tiny_pair

CPU = torch.device("cpu")


@cache
def plain_target() -> PreTrainedModel:
    """In float64; a copy: asking for hidden states changes its layers."""
    return copy.deepcopy(target_model("llama")).double()


def hidden_states(content: Sequence[int], layers: Sequence[int]) -> list[torch.Tensor]:
    """Of all tokens but the last, each [tokens, width], in float64: those after so many layers,
    before the last norm."""
    model: Any = plain_target()
    if len(content) == 1:
        return [torch.empty((0, model.config.hidden_size)).double() for _ in layers]
    last: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, given: last.append(given[0][0]))
    with torch.no_grad():
        out = model(torch.tensor([content[:-1]]), output_hidden_states=True)
    hook.remove()
    states = [hidden[0] for hidden in out.hidden_states[:-1]] + last
    return [states[number] for number in layers]


def drafter_in_float64(source: DraftSource) -> Any:
    """For the tiny Llama; attention in float64, too."""
    config = ReplicaConfig(device="cpu", block_size=4, num_gpu_blocks_override=256, graphs="on")
    shape = dataclasses.replace(tiny_pair("llama"), draft=source).shape
    plan = plan_memory(config, shape, CPU, loaded=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_attention, "_try_out", lambda *_: None)  # it knows no float64
        return source.drafter(plain_target(), config, plan)


class ToldRows:
    """Rows with fixed contents, of which the drafter is told bit by bit."""

    def __init__(
        self,
        drafter: Any,
        cache: PagedCache,
        module: ModuleType,
        lengths: Sequence[int],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """`module`: that in which the drafter guesses."""
        self.drafter, self.cache = drafter, cache
        rng = random.Random(5)
        self.whole = [[rng.randrange(VOCAB) for _ in range(200)] for _ in lengths]
        self.lengths = list(lengths)
        self.ids = [str(row) for row in range(len(lengths))]
        # Rows' blocks lie anywhere.
        self.table = torch.randperm(250)[: 40 * len(lengths)].view(len(lengths), -1) + 1
        for id, content in zip(self.ids, self.contents, strict=True):
            self.drafter.begin(id, content, "", 0)
        self.scores: list[torch.Tensor] = []

        def recording(scores: torch.Tensor, *rest: Any) -> torch.Tensor:
            self.scores.append(scores)
            return guess(scores, *rest)

        guess = module.guess
        monkeypatch.setattr(module, "guess", recording)

    @property
    def contents(self) -> list[list[int]]:
        return [own[:length] for own, length in zip(self.whole, self.lengths, strict=True)]

    def _observe(self, rows: list[int], ranges: list[tuple[int, int]], drafted: Any) -> None:
        states = [
            [part[begin:end] for part in hidden_states(self.whole[row][: end + 1], self._layers)]
            for row, (begin, end) in zip(rows, ranges, strict=True)
        ]
        committed = [
            self.whole[row][begin + 1 : end + 1]
            for row, (begin, end) in zip(rows, ranges, strict=True)
            if drafted is not None
        ]
        joined = [torch.cat(parts) for parts in zip(*states, strict=True)]
        contents, ids = self.contents, [self.ids[row] for row in rows]
        self.drafter.observe(
            Observation(
                *(ids, [contents[row] for row in rows], ranges, self.table[rows]),
                *(committed, drafted, joined),
            )
        )

    @property
    def _layers(self) -> tuple[int, ...]:
        layers: tuple[int, ...] = self.drafter.aux_layers
        return layers

    def prefill(self, chunk: int) -> None:
        for begin in range(0, max(self.lengths) - 1, chunk):
            rows = [row for row, length in enumerate(self.lengths) if length - 1 > begin]
            ends = [min(begin + chunk, self.lengths[row] - 1) for row in rows]
            self._observe(rows, [(begin, end) for end in ends], None)

    def check(self, *committed: int, drafted: int = 3) -> None:
        """Each row commits so many tokens."""
        rows = list(range(len(committed)))
        ranges = [
            (length - 1, length - 1 + new)
            for length, new in zip(self.lengths, committed, strict=True)
        ]
        self._observe(rows, ranges, [drafted] * len(rows))
        self.lengths = [length + new for length, new in zip(self.lengths, committed, strict=True)]

    def take_back(self, lengths: list[int]) -> None:
        self.drafter.rollback(self.ids, lengths)
        self.lengths = lengths

    def propose(self, k: int, sampling: Sequence[Sampling] = ()) -> Any:
        """The drafts of each row, and the logits, [k, rows, vocab]."""
        batch = SamplingBatch.of(sampling or [Sampling()] * len(self.ids), CPU)
        ends = torch.tensor(self.lengths)[:, None] - 1
        noise = batch.noise_after(ends + torch.arange(k + 1))
        lens = [max(k - row, 0) for row in range(len(self.ids))]
        request = DraftRequest(self.ids, self.contents, lens, batch, self.table, noise)
        self.scores.clear()
        before = [layer.clone() for layer in self.cache.layers]
        with torch.inference_mode():
            proposal = self.drafter.propose(request, Stopwatch(CPU))
        for layer, was in zip(self.cache.layers, before, strict=True):
            written = (layer != was).flatten(2).any(-1).nonzero()
            allowed = {
                (int(self.table[row, at // 4]), at % 4)
                for row, length in enumerate(self.lengths)
                for at in range(length - 1)
            }
            assert {(int(block), int(at)) for block, at in written} <= allowed
        self.asked, self.lens = lens, list(proposal.lens)
        return proposal.tokens.t().tolist(), torch.stack(self.scores) if self.scores else None
