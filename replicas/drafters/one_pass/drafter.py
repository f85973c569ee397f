"""Drafts a whole block in one pass of a few layers, then walks its slots to choose tokens.

Its KV of a position is made of the target's hidden states there and of nothing else, so every
position before a row's last token is there whenever the row drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from replicas.config import ReplicaConfig
from replicas.drafters.backlog import Backlog
from replicas.drafters.checkpoints import HeadSource
from replicas.drafters.one_pass.head_config import OnePassConfig, one_pass_config
from replicas.drafters.one_pass.layers import OnePassLayers
from replicas.drafters.one_pass.markov import MarkovHead
from replicas.drafters.protocol import Drafter, DraftRequest, Observation, Proposal
from replicas.memory import MemoryPlan
from replicas.models import AttentionBackend
from replicas.sampling import guess
from replicas.stopwatch import Stopwatch
from replicas.transfers import upload


class OnePassDrafter:
    def __init__(
        self, layers: OnePassLayers, markov: MarkovHead | None, backend: AttentionBackend, name: str
    ) -> None:
        """`backend` says where in the layers' cache positions lie."""
        self.name = name
        self.aux_layers = tuple(sorted(set(layers.config.aux_layers)))
        self._order = [self.aux_layers.index(number) for number in layers.config.aux_layers]
        self._layers, self._markov, self._backend = layers, markov, backend
        self._backlog = Backlog()

    def begin(self, row: str, tokens: Sequence[int], salt: str, prefilled: int) -> None:
        self._backlog.begin(row, prefilled)

    def end(self, row: str) -> None:
        self._backlog.end(row)

    def valid(self, row: str) -> int | None:
        return self._backlog.valid(row)

    def rollback(self, rows: Sequence[str], lengths: Sequence[int]) -> None:
        self._backlog.rollback(rows, lengths)

    def observe(self, observed: Observation) -> None:
        if self._backlog.observe(observed):
            self._take_in(observed.ids, observed.table)

    def propose(self, request: DraftRequest, watch: Stopwatch) -> Proposal:
        most = self._layers.config.most
        lens = [min(wanted, most) for wanted in request.draft_lens]
        with watch.section("draft"):
            self._take_in(request.ids, request.table)
            return Proposal(self._drafted(request, max(lens)), lens)

    def _take_in(
        self,
        ids: Sequence[str],
        table: torch.Tensor,  # [rows, blocks], int64
    ) -> None:
        """All that was seen of these rows."""
        if (arrears := self._backlog.take(ids, table)) is not None:
            layout = self._backend.ranges_layout(arrears.table, arrears.ranges)
            hidden = [arrears.hidden[index] for index in self._order]
            self._layers.write_context(hidden, layout)
            self._backlog.settle(arrears)

    def _drafted(self, request: DraftRequest, k: int) -> torch.Tensor:  # [k, rows], int64
        layers, first = self._layers, self._layers.config.first
        starts = [len(content) - 1 for content in request.contents]
        for id, start in zip(request.ids, starts, strict=True):
            assert self._backlog.valid(id) == start, "all context is there"
        last = [content[-1] for content in request.contents]
        token = upload(last, torch.int64, request.table.device)
        hidden = layers.forward(token, starts, request.table)[:, first : first + k]
        logits = layers.logits(hidden)
        state = None if self._markov is None else self._markov.start(len(starts))
        tokens = []
        for j in range(k):
            scores = logits[:, j]
            if self._markov is not None:
                assert state is not None
                bias, state = self._markov.step(token, hidden[:, j], state)
                scores = scores + bias
            token = guess(scores, request.sampling, request.noise, j, layers.ids)
            if layers.ids is not None:
                token = layers.ids[token]
            tokens.append(token)
        return torch.stack(tokens)


class OnePassSource(HeadSource[OnePassConfig]):
    config_of = staticmethod(one_pass_config)
    copies_context = True

    def drafter(self, target: PreTrainedModel, config: ReplicaConfig, plan: MemoryPlan) -> Drafter:
        cache, backend = self.cache(target, config, plan)
        matrices = (target.get_input_embeddings(), target.get_output_embeddings())
        embeddings, lm_head = (matrix.weight.detach() for matrix in matrices)
        layers = OnePassLayers(self.head, embeddings, lm_head, cache, plan.prepack)
        markov = MarkovHead(self.head, plan.prepack) if self.head.config.markov_rank else None
        return OnePassDrafter(layers, markov, backend, self.name)
