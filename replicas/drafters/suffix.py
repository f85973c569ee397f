"""Suffix decoding: drafts are what followed the last tokens before (arXiv 2411.04975).

It looks into the row's own content and into recent outputs of the replica, and takes the draft with
the larger sum of probabilities. Rows draft as far as they have a match; most have none most of the
time, and then a step is a plain one. No weights, no KV; rows of different salts share nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from replicas.config import ReplicaConfig
from replicas.drafters.history import DEPTH, END, TOKEN_BYTES, Draft, History
from replicas.drafters.protocol import Drafter, DraftRequest, DraftSource, Observation, Proposal
from replicas.memory import DraftMemory, MemoryPlan
from replicas.stopwatch import Stopwatch

OUTPUTS_TOKENS = 1 << 18
"""Tokens of outputs of all salts together; the salt written longest ago is forgotten first."""
OUTPUTS_LEAST = 16
"""Tokens that a salt counts for at least, as its empty tables take about as much."""


@dataclass(slots=True)
class SuffixRow:
    history: History
    prompt: int
    """Tokens that it began with."""
    salt: str


class SuffixDrafter:
    """Holds the content of every row, and outputs of rows that have left."""

    name = ""
    aux_layers: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.rows: dict[str, SuffixRow] = {}
        """Those that have begun and not ended."""
        self._outputs: OrderedDict[str, History] = OrderedDict()
        """By salt, the one written last at the end."""
        self.size = 0
        """Tokens in all of them."""

    def begin(self, row: str, tokens: Sequence[int], salt: str, prefilled: int) -> None:
        self.rows[row] = SuffixRow(History(tokens), len(tokens), salt)

    def end(self, row: str) -> None:
        left = self.rows.pop(row, None)
        if left is None or len(left.history) == left.prompt:
            return
        outputs = self._outputs.setdefault(left.salt, History())
        self._outputs.move_to_end(left.salt)
        before = _size(outputs) if len(outputs) else 0
        outputs.extend([*left.history.tokens[left.prompt :], END])
        self.size += _size(outputs) - before
        while self.size > OUTPUTS_TOKENS:
            salt, outputs = self._outputs.popitem(last=False)
            self.size -= _size(outputs)
            if salt == left.salt:  # the only one left: its younger half stays
                self._outputs[salt] = younger = History(outputs.tokens[-OUTPUTS_TOKENS // 2 :])
                self.size += _size(younger)

    def observe(self, observed: Observation) -> None:
        for row, tokens in zip(observed.ids, observed.committed, strict=False):
            self.rows[row].history.extend(tokens)

    def propose(self, request: DraftRequest, watch: Stopwatch) -> Proposal:
        with watch.section("draft"):
            drafts = [
                self.best(row, most)[1] if most else []
                for row, most in zip(request.ids, request.draft_lens, strict=True)
            ]
            return Proposal.of(drafts, request.table.device)

    def best(self, id: str, most: int) -> Draft:
        """Of its own content, and of outputs of its salt."""
        row = self.rows[id]
        found = row.history.draft(most)
        outputs = self._outputs.get(row.salt)
        if outputs is not None and found[0] < most and len(row.history) > 1:
            other = outputs.draft(most, row.history.tokens[-DEPTH:])
            if other[0] > found[0]:
                return other
        return found

    def rollback(self, rows: Sequence[str], lengths: Sequence[int]) -> None:
        for row, length in zip(rows, lengths, strict=True):
            self.rows[row].history.truncate(length)

    def valid(self, row: str) -> int | None:
        return None


def _size(outputs: History) -> int:
    return max(len(outputs), OUTPUTS_LEAST)


class SuffixSource(DraftSource):
    memory = DraftMemory(kept=TOKEN_BYTES * OUTPUTS_TOKENS)

    def drafter(self, target: PreTrainedModel, config: ReplicaConfig, plan: MemoryPlan) -> Drafter:
        return SuffixDrafter()
