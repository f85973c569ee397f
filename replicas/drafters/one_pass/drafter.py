"""Drafts a whole block in one pass of a few layers, then walks its slots to choose tokens.

Its KV of a position is made of the target's hidden states there and of nothing else, so every
position before a row's last token is there whenever the row drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from replicas.config import ReplicaConfig
from replicas.drafters.backlog import Backlog
from replicas.drafters.checkpoints import head_of, no_storage, refuse_ranks
from replicas.drafters.one_pass.layers import OnePassLayers
from replicas.drafters.one_pass.markov import MarkovHead
from replicas.drafters.one_pass.weights import OnePassHead, load_one_pass, read_one_pass
from replicas.drafters.protocol import Drafter, DraftRequest, DraftSource, Observation, Proposal
from replicas.invariant import Arithmetic
from replicas.memory import DraftMemory, MemoryPlan
from replicas.models import (
    AttentionBackend,
    ModelShape,
    attention_over,
    cache_of,
    computes_on_host,
    dtype_of,
)
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


@dataclass(frozen=True)
class OnePassSource(DraftSource):
    """A head for the target."""

    name: str
    head: OnePassHead

    @classmethod
    def read(cls, config: ReplicaConfig, target: object) -> OnePassSource:
        """For a target of this config. Raises PairRefused, or OSError for a name not found."""
        name = config.drafting.model
        assert name is not None
        with head_of(name) as path:
            of_head = read_one_pass(path, target)
            if not of_head.own_head:
                refuse_ranks(config)
        tensors = no_storage(of_head.tensors, dtype_of(config))
        return cls(name, OnePassHead(of_head, tensors, None))

    @property
    def draft_len_max(self) -> int:
        return self.head.config.most

    @property
    def memory(self) -> DraftMemory:
        config, tensors = self.head.config, self.head.tensors.values()
        weights = sum(tensor.nbytes for tensor in tensors)
        return DraftMemory(
            weights, ModelShape.of(config), len(config.aux_layers), copies_context=True
        )

    def load(self, config: ReplicaConfig, device: torch.device) -> OnePassSource:
        with head_of(self.name) as path:
            head = load_one_pass(path, self.head.config, dtype_of(config), device)
        return replace(self, head=head)

    def drafter(self, target: PreTrainedModel, config: ReplicaConfig, plan: MemoryPlan) -> Drafter:
        sizes, on_host = ModelShape.of(self.head.config), computes_on_host(config, target.device)
        cache = cache_of(sizes.attention, config, plan.cache_blocks, plan.pair.context_len, target)
        matrices = (target.get_input_embeddings(), target.get_output_embeddings())
        embeddings, lm_head = (matrix.weight.detach() for matrix in matrices)
        layers = OnePassLayers(self.head, embeddings, lm_head, cache, plan.prepack)
        markov = MarkovHead(self.head, plan.prepack) if self.head.config.markov_rank else None
        backend = attention_over(cache, Arithmetic(), on_host)
        return OnePassDrafter(layers, markov, backend, self.name)
