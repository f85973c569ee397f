"""Drafts by an EAGLE-3 head: it sees what the target has computed, and goes on from its own output.

Its KV of a position needs the target's hidden states there, also those of steps without drafts.
They are kept and taken in together, when the row drafts next or after TOGETHER of them. Those of a
row's last position are kept longer: its first draft token comes from there. If a batch that failed
takes them away, the next step of the row is a plain one, which brings new ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import torch
from transformers import PreTrainedModel

from replicas.config import ReplicaConfig
from replicas.cuda import GraphedModel
from replicas.drafters.backlog import Backlog
from replicas.drafters.checkpoints import Head, HeadSource
from replicas.drafters.eagle3.head_config import LAYER, Eagle3Config, eagle3_config
from replicas.drafters.eagle3.layer import HeadLayer
from replicas.drafters.eagle3.planted_head import PLANTED_HEAD, planted_head, planted_tensors
from replicas.drafters.protocol import Drafter, DraftRequest, Observation, Proposal
from replicas.kv_cache import SCRAP_BLOCK
from replicas.memory import MemoryPlan
from replicas.models import ALL
from replicas.names import map_shift
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


class Eagle3Source(HeadSource[Eagle3Config]):
    config_of = staticmethod(eagle3_config)
    renamed = MappingProxyType({"midlayer.": LAYER})

    @classmethod
    def read_head(cls, path: str, target: Any) -> Eagle3Config:
        return planted_head(target) if path == PLANTED_HEAD else super().read_head(path, target)

    @classmethod
    def load_head(
        cls, path: str, config: Eagle3Config, dtype: torch.dtype, device: torch.device
    ) -> Head[Eagle3Config]:
        if path != PLANTED_HEAD:
            return super().load_head(path, config, dtype, device)
        tensors = planted_tensors(config, dtype, device)
        return Head(config, tensors, shift=map_shift(config.target_vocab))

    def drafter(self, target: PreTrainedModel, config: ReplicaConfig, plan: MemoryPlan) -> Drafter:
        _, backend = self.cache(target, config, plan)
        embeddings = target.get_input_embeddings().weight.detach()
        layer = HeadLayer(self.head, embeddings, backend, plan.prepack)
        passes: HeadLayer | GraphedModel = layer
        if config.fixed_shapes(target.device):
            passes = GraphedModel(layer, plan.work.rows, [1], hidden_size=self.head.config.width)
        return Eagle3Drafter(layer, passes, self.name)
