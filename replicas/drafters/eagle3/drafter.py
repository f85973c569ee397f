"""Drafts by an EAGLE-3 head: it sees what the target has computed, and goes on from its own output.

Its KV of a position needs the target's hidden states there, also those of steps without drafts.
They are kept and taken in together, when the row drafts next or after TOGETHER of them. To take
them in is half of the layer; the other half is computed for one position of a row, when the row
drafts. Between steps a row carries what that takes. A batch that failed takes it away; the next
step of such a row is a plain one, which brings it back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from transformers import PreTrainedModel

from replicas.config import ReplicaConfig
from replicas.cuda.transfers import upload
from replicas.drafters.eagle3.config import HeadRefused
from replicas.drafters.eagle3.layer import HeadLayer
from replicas.drafters.eagle3.weights import Head, load_head, read_head
from replicas.drafters.protocol import Ask, Drafter, DraftSource, Proposal, Seen
from replicas.invariant.backend import HostBackend
from replicas.invariant.ops import Arithmetic
from replicas.kv_cache import CacheShape, PagedCache
from replicas.memory import DraftMemory, MemoryPlan, ModelShape
from replicas.models.attention import GatherBackend
from replicas.models.build import computes_on_host
from replicas.models.load import PairRefused, dtype_of, resolve
from replicas.models.paged_model import AttentionBackend
from replicas.sampling.choice import guess
from replicas.stopwatch import Stopwatch

TOGETHER = 16
"""Positions of a row that are taken in at the latest while no row of its batch drafts."""


@dataclass(slots=True)
class _Row:
    valid: int
    """KV positions."""
    carry: tuple[torch.Tensor, torch.Tensor] | None = None
    """What has entered the layer at position `valid` - 1; see `HeadLayer.enter`."""
    tokens: list[int] = field(default_factory=list)
    """What follows on each position from `valid` on that was seen and not taken in."""
    taps: list[list[torch.Tensor]] = field(default_factory=list)  # each [positions, hidden]
    """The hidden states there: of each part that was seen, by tap."""

    def __len__(self) -> int:
        """Positions that were seen."""
        return self.valid + len(self.tokens)


class Eagle3Drafter:
    def __init__(self, layer: HeadLayer, name: str) -> None:
        self.name = name
        self.taps = tuple(sorted(set(layer.config.taps)))
        self._order = [self.taps.index(tap) for tap in layer.config.taps]
        self._layer = layer
        self._rows: dict[str, _Row] = {}

    def begin(self, row: str, tokens: Sequence[int], salt: str, filled: int) -> None:
        self._rows[row] = _Row(filled)

    def end(self, row: str) -> None:
        self._rows.pop(row, None)

    def valid(self, row: str) -> int | None:
        return self._rows[row].valid

    def rollback(self, rows: Sequence[str], lengths: Sequence[int]) -> None:
        for id, length in zip(rows, lengths, strict=True):
            row = self._rows[id]
            row.carry, row.valid = None, min(row.valid, length - 1)
            count = length - 1 - row.valid
            row.tokens = row.tokens[:count]
            row.taps = [[tap[:count] for tap in _joined(row.taps)]] if row.tokens else []

    def observe(self, seen: Seen) -> None:
        first = 0
        for index, (content, (begin, end)) in enumerate(
            zip(seen.contents, seen.ranges, strict=True)
        ):
            row = self._rows[seen.ids[index]]
            assert len(row) == begin, "it sees every position once"
            # Of a check all next tokens are new, of a prefill none is.
            new = seen.committed[index] if seen.committed else content[begin + 1 : end + 1]
            row.tokens += new
            row.taps.append([tap[first : first + end - begin] for tap in seen.taps])
            first += end - begin
        drafting = seen.drafted is None or any(seen.drafted)
        if drafting or any(len(self._rows[id].tokens) >= TOGETHER for id in seen.ids):
            self._take_in(seen.ids, seen.table)

    def _take_in(
        self,
        ids: Sequence[str],  # all with positions to take in
        table: torch.Tensor,  # [rows, blocks], int64
    ) -> None:
        rows = [self._rows[id] for id in ids]
        fed = upload([token for row in rows for token in row.tokens], torch.int64, table.device)
        taps = _joined([part for row in rows for part in row.taps])
        hidden = self._layer.fused([taps[index] for index in self._order])
        layout = self._layer.backend.ranges_layout(table, [(row.valid, len(row)) for row in rows])
        last = [end - 1 for end in accumulate(len(row.tokens) for row in rows)]
        entered, residual = self._layer.enter(fed, hidden, layout)
        carries = zip(entered[last], residual[last], strict=True)
        for id, row, carry in zip(ids, rows, carries, strict=True):
            self._rows[id] = _Row(len(row), carry)

    def propose(self, ask: Ask, watch: Stopwatch) -> Proposal:
        behind = [at for at, id in enumerate(ask.ids) if self._rows[id].tokens]
        if behind:
            with watch.section("catch_up"):
                self._take_in([ask.ids[at] for at in behind], ask.table[behind])
        rows = [self._rows[row] for row in ask.ids]
        lens = [
            0 if row.carry is None or row.valid != len(content) - 1 else most
            for row, content, most in zip(rows, ask.contents, ask.draft_lens, strict=True)
        ]
        k = max(lens)
        if k == 0:
            none = torch.empty((0, len(rows)), dtype=torch.int64, device=ask.table.device)
            return Proposal(none, lens)
        with watch.section("draft"):
            spare = next(row.carry for row in rows if row.carry is not None)
            carries = [spare if one.carry is None else one.carry for one in rows]
            entered, residual = (torch.stack(parts) for parts in zip(*carries, strict=True))
            return self._draft(ask, lens, k, entered, residual)

    def _draft(
        self,
        ask: Ask,
        lens: list[int],
        k: int,
        entered: torch.Tensor,  # [rows, heads + 2 * kv_heads, head_dim]
        residual: torch.Tensor,  # [rows, width]
    ) -> Proposal:
        layer, ids = self._layer, self._layer.ids
        device = ask.table.device
        starts = [len(content) - 2 for content in ask.contents]
        layout = layer.backend.step_layout(ask.table, starts, k)
        tokens = torch.empty((k, len(lens)), dtype=torch.int64, device=device)
        for j in range(k):
            logits, x = layer.logits(layer.leave(entered, residual, layout.window(j, j + 1)))
            token = guess(logits, ask.sampling, ask.noise, j, ids)
            if layer.shift is not None:
                before = tokens[j - 1] if j else torch.tensor([one[-1] for one in ask.contents])
                tokens[j] = (before.to(device) + layer.shift) % ask.token_most
            else:
                tokens[j] = token if ids is None else ids[token]
            if j + 1 < k:
                entered, residual = layer.enter(tokens[j], x, layout.window(j + 1, j + 2))
        return Proposal(tokens, lens)


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
        backend: AttentionBackend = GatherBackend(cache, shape)
        if on_host:
            backend = HostBackend(cache, shape, Arithmetic())
        embeddings = target.get_input_embeddings().weight.detach()
        layer = HeadLayer(self.head, embeddings, cache, shape, backend, plan.prepack)
        return Eagle3Drafter(layer, self.name)


def _joined(parts: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:  # each [tokens, hidden]
    """All parts by tap; a single one is not copied, for it may be a prompt."""
    return [tap[0] if len(tap) == 1 else torch.cat(tap) for tap in zip(*parts, strict=True)]
