"""Drafts by a Clover-2 head, token by token from the state at a row's last position.

If a batch that failed takes that state away, or a shared prefix brings keys and values without it,
the next step of the row is a plain one, which brings a new one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from transformers import PreTrainedModel

from replicas.config import ReplicaConfig
from replicas.drafters.backlog import Backlog
from replicas.drafters.checkpoints import HeadSource
from replicas.drafters.clover.head_config import CloverConfig, clover_config
from replicas.drafters.clover.layers import CloverLayers
from replicas.drafters.protocol import Drafter, DraftRequest, Observation, Proposal
from replicas.errors import PairRefused
from replicas.memory import MemoryPlan
from replicas.sampling import guess
from replicas.stopwatch import Stopwatch
from replicas.transfers import upload


class CloverDrafter:
    def __init__(self, layers: CloverLayers, name: str) -> None:
        self.name = name
        self.aux_layers = layers.config.aux_layers
        self._layers = layers
        self._backlog = Backlog()
        self._states: dict[str, tuple[int, torch.Tensor]] = {}  # each [1, width]
        """The state after so many positions of a row."""

    def begin(self, row: str, tokens: Sequence[int], salt: str, prefilled: int) -> None:
        self._backlog.begin(row, prefilled)
        self._states.pop(row, None)

    def end(self, row: str) -> None:
        self._backlog.end(row)
        self._states.pop(row, None)

    def valid(self, row: str) -> int | None:
        return self._backlog.valid(row)

    def rollback(self, rows: Sequence[str], lengths: Sequence[int]) -> None:
        self._backlog.rollback(rows, lengths)

    def observe(self, observed: Observation) -> None:
        if self._backlog.observe(observed):
            self._take_in(observed.ids, observed.table)

    def propose(self, request: DraftRequest, watch: Stopwatch) -> Proposal:
        with watch.section("draft"):
            self._take_in(request.ids, request.table)
            lens = [
                min(wanted, self._layers.config.most) if self._at(row)[0] == len(content) - 1 else 0
                for row, content, wanted in zip(
                    request.ids, request.contents, request.draft_lens, strict=True
                )
            ]
            if not any(lens):
                none = torch.empty((0, len(lens)), dtype=torch.int64, device=request.table.device)
                return Proposal(none, lens)
            return Proposal(self._drafted(request, lens), lens)

    def _at(self, row: str) -> tuple[int, torch.Tensor | None]:
        """The state of a row, and how many positions it has seen."""
        return self._states.get(row, (-1, None))

    def _take_in(
        self,
        ids: Sequence[str],
        table: torch.Tensor,  # [rows, blocks], int64
    ) -> None:
        """All that was seen of these rows."""
        arrears = self._backlog.take(ids, table)
        if arrears is None:
            return
        device = table.device
        following = upload(arrears.tokens, torch.int64, device)
        layout = self._layers.backend.ranges_layout(arrears.table, arrears.ranges)
        ends = accumulate(end - begin for begin, end in arrears.ranges)
        last = upload([end - 1 for end in ends], torch.int64, device)
        states = self._layers.augmented(arrears.hidden[0], following, layout, last)
        self._backlog.settle(arrears)
        for row, (_, end), state in zip(arrears.ids, arrears.ranges, states[:, None], strict=True):
            self._states[row] = (end, state)

    def _drafted(self, request: DraftRequest, lens: list[int]) -> torch.Tensor:  # [k, rows], int64
        states = [self._at(row)[1] for row in request.ids]
        spare = next(state for state in states if state is not None)
        state = torch.cat([spare if state is None else state for state in states])
        logits = self._layers.first(state)
        tokens = [guess(logits, request.sampling, request.noise, 0)]
        for j in range(1, max(lens)):
            logits, state = self._layers.later(state, tokens[-1])
            tokens.append(guess(logits, request.sampling, request.noise, j))
        return torch.stack(tokens)


class CloverSource(HeadSource[CloverConfig]):
    config_of = staticmethod(clover_config)

    def drafter(self, target: PreTrainedModel, config: ReplicaConfig, plan: MemoryPlan) -> Drafter:
        if not hasattr(target.base_model, "layers"):
            raise PairRefused(f"{type(target).__name__} has no layers of that name to look behind")
        _, backend = self.cache(target, config, plan)
        lm_head = target.get_output_embeddings().weight.detach()
        return CloverDrafter(CloverLayers(self.head, lm_head, backend, plan.prepack), self.name)
