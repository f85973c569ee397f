"""Drafts by an EAGLE-3 head: it sees what the target has computed, and goes on from its own output.

Its KV of a position needs the target's hidden states there, also those of steps without drafts.
They are kept and taken in together, when the row drafts next or after TOGETHER of them. Those of a
row's last position are kept longer: its first draft token comes from there. If a batch that failed
takes them away, the next step of the row is a plain one, which brings new ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from transformers import PreTrainedModel

from replicas.config import DRAFTING_FIELD, ReplicaConfig
from replicas.cuda import GraphedModel
from replicas.drafters.checkpoints import no_storage
from replicas.drafters.eagle3.layer import HeadLayer
from replicas.drafters.eagle3.weights import Head, load_head, read_head
from replicas.drafters.protocol import Drafter, DraftRequest, DraftSource, Observation, Proposal
from replicas.errors import PairRefused
from replicas.invariant import Arithmetic
from replicas.kv_cache import SCRAP_BLOCK
from replicas.memory import DraftMemory, MemoryPlan
from replicas.models import (
    ALL,
    ModelShape,
    attention_over,
    cache_of,
    computes_on_host,
    dtype_of,
    resolve,
)
from replicas.sampling import guess
from replicas.stopwatch import Stopwatch
from replicas.transfers import upload

TOGETHER = 16
"""Positions of a row that are taken in at the latest while no row of its batch drafts."""


@dataclass(slots=True)
class _HeadRow:
    valid: int
    """KV positions."""
    last: list[torch.Tensor] | None = None  # each [1, hidden]
    """The hidden states at position `valid` - 1, by layer."""
    tokens: list[int] = field(default_factory=list)
    """What follows on each position from `valid` on that was seen and not taken in."""
    hidden: list[list[torch.Tensor]] = field(default_factory=list)  # each [positions, hidden]
    """The hidden states there: of each part that was seen, by layer."""

    def __len__(self) -> int:
        """Positions that were seen."""
        return self.valid + len(self.tokens)


class Eagle3Drafter:
    def __init__(self, layer: HeadLayer, passes: HeadLayer | GraphedModel, name: str) -> None:
        """`passes` run the layer over one position of each row."""
        self.name = name
        self.aux_layers = tuple(sorted(set(layer.config.aux_layers)))
        self._order = [self.aux_layers.index(number) for number in layer.config.aux_layers]
        self._layer, self.passes = layer, passes
        self._rows: dict[str, _HeadRow] = {}

    def begin(self, row: str, tokens: Sequence[int], salt: str, prefilled: int) -> None:
        self._rows[row] = _HeadRow(prefilled)

    def end(self, row: str) -> None:
        self._rows.pop(row, None)

    def valid(self, row: str) -> int | None:
        return self._rows[row].valid

    def rollback(self, rows: Sequence[str], lengths: Sequence[int]) -> None:
        for id, length in zip(rows, lengths, strict=True):
            row = self._rows[id]
            if row.valid > length - 1:
                row.valid, row.last = length - 1, None
            count = length - 1 - row.valid
            row.tokens = row.tokens[:count]
            row.hidden = [[states[:count] for states in _joined(row.hidden)]] if row.tokens else []

    def observe(self, observed: Observation) -> None:
        first = 0
        drafted = observed.drafted or [0] * len(observed.ids)
        for index, (content, (begin, end)) in enumerate(
            zip(observed.contents, observed.ranges, strict=True)
        ):
            row = self._rows[observed.ids[index]]
            assert len(row) == begin, "it sees every position once"
            if drafted[index]:  # which took in the last position
                row.valid, row.last, row.tokens, row.hidden = begin, None, [], []
            # Of a check all next tokens are new, of a prefill none is.
            new = observed.committed[index] if observed.committed else content[begin + 1 : end + 1]
            row.tokens += new
            if new:
                span = slice(first, first + end - begin)
                parts = [states[span] for states in observed.aux_hidden_states]
                # A single position may be kept, and the next pass writes where a recording's are.
                row.hidden.append([part.clone() for part in parts] if end - begin == 1 else parts)
            first += end - begin
        if observed.drafted is None:  # after a prefill it is as far as the target is
            self._take_in(observed.ids, observed.table, least=1)
        elif any(drafted) or any(len(self._rows[id].tokens) >= TOGETHER for id in observed.ids):
            self._take_in(observed.ids, observed.table)

    def _take_in(
        self,
        ids: Sequence[str],
        table: torch.Tensor,  # [rows, blocks], int64
        least: int = 2,
    ) -> None:
        """All that was seen of rows that are at least so many positions behind."""
        behind = [at for at, id in enumerate(ids) if len(self._rows[id].tokens) >= least]
        if not behind:
            return
        if len(behind) < len(ids):
            ids = [ids[at] for at in behind]
            table = table.index_select(0, upload(behind, torch.int64, table.device))
        rows = [self._rows[id] for id in ids]
        fed = upload([token for row in rows for token in row.tokens], torch.int64, table.device)
        aux_hidden_states = _joined([part for row in rows for part in row.hidden])
        hidden = self._layer.fused([aux_hidden_states[index] for index in self._order])
        layout = self._layer.backend.ranges_layout(table, [(row.valid, len(row)) for row in rows])
        self._layer.enter(fed, hidden, layout)
        last = list(accumulate(len(row.tokens) for row in rows))
        for id, row, end in zip(ids, rows, last, strict=True):
            # A copy: a part of a prompt would keep all of it.
            at_last = [states[end - 1 : end].clone() for states in aux_hidden_states]
            self._rows[id] = _HeadRow(len(row), at_last)

    def propose(self, request: DraftRequest, watch: Stopwatch) -> Proposal:
        if any(len(self._rows[id].tokens) > 1 for id in request.ids):
            with watch.section("catch_up"):
                self._take_in(request.ids, request.table)
        rows = [self._rows[id] for id in request.ids]
        last = [
            None if len(row) != len(content) - 1 else row.hidden[0] if row.hidden else row.last
            for row, content in zip(rows, request.contents, strict=True)
        ]
        draft_lens = zip(last, request.draft_lens, strict=True)
        lens = [0 if states is None else most for states, most in draft_lens]
        if not any(lens):
            none = torch.empty((0, len(rows)), dtype=torch.int64, device=request.table.device)
            return Proposal(none, lens)
        with watch.section("draft"):
            return self._draft(request, lens, last)

    def _draft(
        self, request: DraftRequest, lens: list[int], last: Sequence[list[torch.Tensor] | None]
    ) -> Proposal:
        """`last`: the hidden states at each row's last position, by layer, if they are there."""
        ids, shift, table = self._layer.ids, self._layer.shift, request.table
        k, spare = max(lens), next(states for states in last if states is not None)
        if None in last:  # such a row is computed in the scrap block: what it has stays
            absent = upload([states is None for states in last], torch.bool, table.device)
            table = table.masked_fill(absent[:, None], SCRAP_BLOCK)
        aux_hidden_states = _joined([states or spare for states in last])
        x = self._layer.fused([aux_hidden_states[index] for index in self._order])
        starts = [len(content) - 2 for content in request.contents]
        layout = self._layer.backend.step_layout(table, starts, k)
        token = upload([content[-1] for content in request.contents], torch.int64, table.device)
        tokens = []
        for j in range(k):
            out = self.passes.forward(token, layout.window(j, j + 1), ALL, x)
            assert out.logits is not None
            (x,) = out.aux_hidden_states
            guessed = guess(out.logits, request.sampling, request.noise, j, ids)
            if shift is not None:
                token = (token + shift) % request.token_most
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
        path = resolve(name, "draft", field=DRAFTING_FIELD)
        try:
            of_head = read_head(path, target)
        except PairRefused as error:
            raise PairRefused(f"{DRAFTING_FIELD}: {path}: {error}") from None
        except OSError as error:
            raise OSError(f"{DRAFTING_FIELD}: {error}") from error
        return cls(name, Head(of_head, no_storage(of_head.tensors, dtype_of(config)), None))

    @property
    def memory(self) -> DraftMemory:
        config, tensors = self.head.config, self.head.tensors.values()
        weights = sum(tensor.nbytes for tensor in tensors)
        return DraftMemory(weights, ModelShape.of(config), len(config.aux_layers))

    def load(self, config: ReplicaConfig, device: torch.device) -> HeadSource:
        path = resolve(self.name, "draft", field=DRAFTING_FIELD)
        try:
            head = load_head(path, self.head.config, dtype_of(config), device)
        except PairRefused as error:
            raise PairRefused(f"{DRAFTING_FIELD}: {path}: {error}") from None
        return replace(self, head=head)

    def drafter(self, target: PreTrainedModel, config: ReplicaConfig, plan: MemoryPlan) -> Drafter:
        sizes, device = ModelShape.of(self.head.config), target.device
        cache = cache_of(sizes, config, plan.kv_blocks, plan.pair.context_len, target)
        backend = attention_over(cache, Arithmetic(), computes_on_host(config, device))
        embeddings = target.get_input_embeddings().weight.detach()
        layer = HeadLayer(self.head, embeddings, backend, plan.prepack)
        passes: HeadLayer | GraphedModel = layer
        if config.fixed_shapes(device):
            passes = GraphedModel(layer, plan.work.rows, [1], hidden_size=self.head.config.width)
        return Eagle3Drafter(layer, passes, self.name)


def _joined(parts: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:  # each [tokens, hidden]
    """All parts by layer; a single one is not copied, for it may be a prompt."""
    of_layers = zip(*parts, strict=True)
    return [states[0] if len(states) == 1 else torch.cat(states) for states in of_layers]
