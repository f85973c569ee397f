"""Drafts by an EAGLE-3 head: it sees what the target has computed, and goes on from its own output.

Its KV of a position needs the target's hidden states there, also those of steps without drafts.
They are kept and taken in together, when the row drafts next or after TOGETHER of them. Those of a
row's last position are kept longer: its first draft token comes from there. If a batch that failed
takes them away, the next step of the row is a plain one, which brings new ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from transformers import PreTrainedModel

from replicas.config import ReplicaConfig
from replicas.cuda import GraphedModel
from replicas.drafters.backlog import Backlog
from replicas.drafters.checkpoints import head_of, no_storage
from replicas.drafters.eagle3.layer import HeadLayer
from replicas.drafters.eagle3.weights import Head, load_head, read_head
from replicas.drafters.protocol import Drafter, DraftRequest, DraftSource, Observation, Proposal
from replicas.invariant import Arithmetic
from replicas.kv_cache import SCRAP_BLOCK
from replicas.memory import DraftMemory, MemoryPlan
from replicas.models import ALL, ModelShape, attention_over, cache_of, computes_on_host, dtype_of
from replicas.sampling import guess
from replicas.stopwatch import Stopwatch
from replicas.transfers import upload


class Eagle3Drafter:
    def __init__(self, layer: HeadLayer, passes: HeadLayer | GraphedModel, name: str) -> None:
        """`passes` run the layer over one position of each row."""
        self.name = name
        self.aux_layers = tuple(sorted(set(layer.config.aux_layers)))
        self._order = [self.aux_layers.index(number) for number in layer.config.aux_layers]
        self._layer, self.passes = layer, passes
        self._backlog = Backlog()
        self._last: dict[str, tuple[int, list[torch.Tensor]]] = {}  # each [1, hidden]
        """The hidden states at the last of so many positions of a row, by layer."""

    def begin(self, row: str, tokens: Sequence[int], salt: str, prefilled: int) -> None:
        self._backlog.begin(row, prefilled)
        self._last.pop(row, None)

    def end(self, row: str) -> None:
        self._backlog.end(row)
        self._last.pop(row, None)

    def valid(self, row: str) -> int | None:
        return self._backlog.valid(row)

    def rollback(self, rows: Sequence[str], lengths: Sequence[int]) -> None:
        self._backlog.rollback(rows, lengths)
        for row, length in zip(rows, lengths, strict=True):
            if row in self._last and self._last[row][0] > length - 1:
                del self._last[row]

    def observe(self, observed: Observation) -> None:
        drafted = observed.drafted or [0] * len(observed.ids)
        for id, (begin, _), count in zip(observed.ids, observed.ranges, drafted, strict=True):
            if count:  # its first pass took in the last position
                self._backlog.entered(id, begin)
        due = self._backlog.observe(observed)
        if observed.drafted is None:  # after a prefill it is as far as the target is
            self._take_in(observed.ids, observed.table, least=1)
        elif due or any(drafted):
            self._take_in(observed.ids, observed.table)

    def _take_in(
        self,
        ids: Sequence[str],
        table: torch.Tensor,  # [rows, blocks], int64
        least: int = 2,
    ) -> None:
        """All that was seen of rows that are at least so many positions behind."""
        arrears = self._backlog.take(ids, table, least)
        if arrears is None:
            return
        fed = upload(arrears.tokens, torch.int64, table.device)
        hidden = self._layer.fused([arrears.hidden[index] for index in self._order])
        layout = self._layer.backend.ranges_layout(arrears.table, arrears.ranges)
        self._layer.enter(fed, hidden, layout)
        self._backlog.settle(arrears)
        last = accumulate(end - begin for begin, end in arrears.ranges)
        for id, (_, position), end in zip(arrears.ids, arrears.ranges, last, strict=True):
            # A copy: a part of a prompt would keep all of it.
            at_last = [states[end - 1 : end].clone() for states in arrears.hidden]
            self._last[id] = (position, at_last)

    def _at_last(self, row: str, content: Sequence[int]) -> list[torch.Tensor] | None:
        """The hidden states before the row's last token, by layer; None: they are not here."""
        if self._backlog.seen(row) != len(content) - 1:
            return None
        position, states = self._last.get(row, (-1, None))
        here = states if position == self._backlog.valid(row) else None
        return self._backlog.kept(row) or here

    def propose(self, request: DraftRequest, watch: Stopwatch) -> Proposal:
        rows = list(zip(request.ids, request.contents, strict=True))
        if any(self._backlog.seen(id) - self._backlog.valid(id) > 1 for id, _ in rows):
            with watch.section("catch_up"):
                self._take_in(request.ids, request.table)
        last = [self._at_last(id, content) for id, content in rows]
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
        by_layer = zip(*(states or spare for states in last), strict=True)
        joined = [torch.cat(states) for states in by_layer]
        x = self._layer.fused([joined[index] for index in self._order])
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
        with head_of(name) as path:
            of_head = read_head(path, target)
        return cls(name, Head(of_head, no_storage(of_head.tensors, dtype_of(config)), None))

    @property
    def memory(self) -> DraftMemory:
        config, tensors = self.head.config, self.head.tensors.values()
        weights = sum(tensor.nbytes for tensor in tensors)
        return DraftMemory(weights, ModelShape.of(config), len(config.aux_layers))

    def load(self, config: ReplicaConfig, device: torch.device) -> HeadSource:
        with head_of(self.name) as path:
            head = load_head(path, self.head.config, dtype_of(config), device)
        return replace(self, head=head)

    def drafter(self, target: PreTrainedModel, config: ReplicaConfig, plan: MemoryPlan) -> Drafter:
        sizes, device = ModelShape.of(self.head.config), target.device
        cache = cache_of(sizes.attention, config, plan.cache_blocks, plan.pair.context_len, target)
        backend = attention_over(cache, Arithmetic(), computes_on_host(config, device))
        embeddings = target.get_input_embeddings().weight.detach()
        layer = HeadLayer(self.head, embeddings, backend, plan.prepack)
        passes: HeadLayer | GraphedModel = layer
        if config.fixed_shapes(device):
            passes = GraphedModel(layer, plan.work.rows, [1], hidden_size=self.head.config.width)
        return Eagle3Drafter(layer, passes, self.name)
