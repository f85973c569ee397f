"""Drafts by an EAGLE-3 head: it sees what the target has computed, and goes on from its own output.

Its KV of a position needs the target's hidden states there, also those of steps without drafts.
Those of a row's last position are kept: its first draft token comes from there. If a batch that
failed takes them away, the next step of the row is a plain one, which brings new ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from replicas.config import ReplicaConfig
from replicas.cuda import GraphedModel
from replicas.drafters.eagle3.config import HeadRefused
from replicas.drafters.eagle3.layer import HeadLayer
from replicas.drafters.eagle3.weights import Head, load_head, read_head
from replicas.drafters.protocol import Ask, Drafter, DraftSource, Proposal, Seen
from replicas.invariant import Arithmetic
from replicas.kv_cache import SCRAP_BLOCK, CacheShape, PagedCache
from replicas.memory import DraftMemory, MemoryPlan, ModelShape
from replicas.models.build import attention_over, computes_on_host
from replicas.models.load import PairRefused, dtype_of, resolve
from replicas.models.paged_model import ALL
from replicas.sampling import guess
from replicas.stopwatch import Stopwatch
from replicas.transfers import upload


@dataclass(slots=True)
class _HeadRow:
    valid: int
    """KV positions."""
    last: list[torch.Tensor] | None = None  # each [1, hidden]
    """The hidden states at position `valid` - 1, by tap."""


class Eagle3Drafter:
    def __init__(self, layer: HeadLayer, passes: HeadLayer | GraphedModel, name: str) -> None:
        """`passes` run the layer over one position of each row."""
        self.name = name
        self.taps = tuple(sorted(set(layer.config.taps)))
        self._order = [self.taps.index(tap) for tap in layer.config.taps]
        self._layer, self.passes = layer, passes
        self._rows: dict[str, _HeadRow] = {}

    def begin(self, row: str, tokens: Sequence[int], salt: str, filled: int) -> None:
        self._rows[row] = _HeadRow(filled)

    def end(self, row: str) -> None:
        self._rows.pop(row, None)

    def valid(self, row: str) -> int | None:
        return self._rows[row].valid

    def rollback(self, rows: Sequence[str], lengths: Sequence[int]) -> None:
        for id, length in zip(rows, lengths, strict=True):
            row = self._rows[id]
            if row.valid > length - 1:
                row.valid, row.last = length - 1, None

    def observe(self, seen: Seen) -> None:
        """Take in the positions that were seen, each beside the token that follows on it."""
        tokens: list[int] = []
        for index, (id, (begin, end)) in enumerate(zip(seen.ids, seen.ranges, strict=True)):
            assert self._rows[id].valid == begin, "it sees every position once"
            # Of a check all next tokens are new, of a prefill none is.
            after = seen.contents[index][begin + 1 : end + 1]
            tokens += seen.committed[index] if seen.committed else after
        fed = upload(tokens, torch.int64, seen.table.device)
        hidden = self._layer.fused([seen.taps[index] for index in self._order])
        self._layer.enter(fed, hidden, self._layer.backend.ranges_layout(seen.table, seen.ranges))
        first = 0
        for id, (begin, end) in zip(seen.ids, seen.ranges, strict=True):
            first += end - begin
            # A copy: a part of a prompt would keep all of it.
            last = [tap[first - 1 : first].clone() for tap in seen.taps]
            self._rows[id] = _HeadRow(end, last)

    def propose(self, ask: Ask, watch: Stopwatch) -> Proposal:
        last = [self._rows[id].last for id in ask.ids]
        lens = [0 if one is None else most for one, most in zip(last, ask.draft_lens, strict=True)]
        if not any(lens):
            none = torch.empty((0, len(last)), dtype=torch.int64, device=ask.table.device)
            return Proposal(none, lens)
        with watch.section("draft"):
            return self._draft(ask, lens, last)

    def _draft(
        self, ask: Ask, lens: list[int], last: Sequence[list[torch.Tensor] | None]
    ) -> Proposal:
        """`last`: the hidden states at each row's last position, by tap, if they are there."""
        ids, shift, table = self._layer.ids, self._layer.shift, ask.table
        k, spare = max(lens), next(one for one in last if one is not None)
        if None in last:  # such a row is computed in the scrap block: what it has stays
            absent = upload([one is None for one in last], torch.bool, table.device)
            table = table.masked_fill(absent[:, None], SCRAP_BLOCK)
        taps = [torch.cat(tap) for tap in zip(*(one or spare for one in last), strict=True)]
        x = self._layer.fused([taps[index] for index in self._order])
        starts = [len(content) - 2 for content in ask.contents]
        layout = self._layer.backend.step_layout(table, starts, k)
        token = upload([content[-1] for content in ask.contents], torch.int64, table.device)
        tokens = []
        for j in range(k):
            out = self.passes.forward(token, layout.window(j, j + 1), ALL, x)
            assert out.logits is not None
            (x,) = out.taps
            guessed = guess(out.logits, ask.sampling, ask.noise, j, ids)
            if shift is not None:
                token = (token + shift) % ask.token_most
            else:
                token = guessed if ids is None else ids[guessed]
            tokens.append(token)
        return Proposal(torch.stack(tokens), lens)


@dataclass(frozen=True)
class HeadSource(DraftSource):
    """A head for the target."""

    name: str
    head: Head

    @classmethod
    def read(cls, config: ReplicaConfig, target: Any) -> HeadSource:
        """For a target of this config. Raises PairRefused, or OSError for a name not found."""
        name = config.drafting.model
        assert name is not None
        path = resolve(name, "draft", field=config.drafting_field)
        try:
            of_head = read_head(path, target)
        except HeadRefused as error:
            raise PairRefused(f"speculative.model: {path}: {error}") from None
        except OSError as error:
            raise OSError(f"speculative.model: {error}") from error
        empty = partial(torch.empty, dtype=dtype_of(config), device="meta")
        tensors = {key: empty(size) for key, size in of_head.tensors.items()}
        return cls(name, Head(of_head, tensors, None))

    @property
    def memory(self) -> DraftMemory:
        config, tensors = self.head.config, self.head.tensors.values()
        weights = sum(tensor.nbytes for tensor in tensors)
        return DraftMemory(weights, ModelShape.of(config), len(config.taps))

    def load(self, config: ReplicaConfig, device: torch.device) -> HeadSource:
        path = resolve(self.name, "draft", field=config.drafting_field)
        try:
            head = load_head(path, self.head.config, dtype_of(config), device)
        except HeadRefused as error:
            raise PairRefused(f"speculative.model: {path}: {error}") from None
        return replace(self, head=head)

    def drafter(self, target: PreTrainedModel, config: ReplicaConfig, plan: MemoryPlan) -> Drafter:
        sizes, size, device = ModelShape.of(self.head.config), config.block_size, target.device
        heads, kv_heads, dim = sizes.heads, sizes.kv_heads, sizes.head_dim
        shape = CacheShape(size, plan.pair.context_len, heads, kv_heads, dim)
        on_host = computes_on_host(config, device)
        cache = PagedCache(1, kv_heads, dim, plan.kv_blocks, size, target.dtype, device, on_host)
        backend = attention_over(cache, shape, Arithmetic(), on_host)
        embeddings = target.get_input_embeddings().weight.detach()
        layer = HeadLayer(self.head, embeddings, cache, shape, backend, plan.prepack)
        passes: HeadLayer | GraphedModel = layer
        if config.fixed_shapes(device):
            passes = GraphedModel(layer, plan.work.rows, [1], hidden_size=self.head.config.width)
        return Eagle3Drafter(layer, passes, self.name)
