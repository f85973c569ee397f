"""What a drafter on hidden states has seen of its rows and not taken in yet.

Taking in costs a pass. So what plain steps bring is kept and taken in together, when the row drafts
next or after TOGETHER positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from replicas.drafters.protocol import Observation
from replicas.kv_cache import TokenRange
from replicas.transfers import upload

TOGETHER = 16
"""Positions of a row that are taken in at the latest while no row of its batch drafts."""


@dataclass(slots=True)
class _Row:
    valid: int
    """KV positions."""
    tokens: list[int] = field(default_factory=list)
    """What follows on each position from `valid` on that was seen and not taken in."""
    hidden: list[list[torch.Tensor]] = field(default_factory=list)  # each [positions, hidden]
    """The hidden states there: of each part that was seen, by layer."""


@dataclass(frozen=True, slots=True)
class Arrears:
    """What some rows are taken in with."""

    ids: list[str]
    ranges: list[TokenRange]
    """KV positions."""
    tokens: list[int]
    """What follows on each position, row by row."""
    hidden: list[torch.Tensor]  # each [tokens, hidden]
    table: torch.Tensor  # [rows, blocks], int64


class Backlog:
    """The rows of a drafter by id."""

    def __init__(self) -> None:
        self._rows: dict[str, _Row] = {}

    def begin(self, row: str, prefilled: int) -> None:
        self._rows[row] = _Row(prefilled)

    def end(self, row: str) -> None:
        self._rows.pop(row, None)

    def valid(self, row: str) -> int:
        """KV positions that were taken in."""
        return self._rows[row].valid

    def seen(self, row: str) -> int:
        """Positions that were seen."""
        return self._rows[row].valid + len(self._rows[row].tokens)

    def kept(self, row: str) -> list[torch.Tensor]:  # each [1, hidden]
        """The hidden states, by layer, of the one position that was not taken in; empty: none."""
        hidden = self._rows[row].hidden
        return hidden[0] if hidden else []

    def entered(self, row: str, end: int) -> None:
        """The drafter has taken in the positions before `end` by itself."""
        self._rows[row] = _Row(end)

    def rollback(self, rows: Sequence[str], lengths: Sequence[int]) -> None:
        for id, length in zip(rows, lengths, strict=True):
            row = self._rows[id]
            row.valid = min(row.valid, length - 1)
            row.tokens = row.tokens[: length - 1 - row.valid]
            count = len(row.tokens)
            joined = (torch.cat(states) for states in zip(*row.hidden, strict=True))
            row.hidden = [[states[:count] for states in joined]] if count else []

    def observe(self, observed: Observation) -> bool:
        """Whether these rows should be taken in now."""
        first = 0
        for index, (begin, end) in enumerate(observed.ranges):
            row, content = self._rows[observed.ids[index]], observed.contents[index]
            assert row.valid + len(row.tokens) == begin, "it sees every position once"
            # Of a check all next tokens are new, of a prefill none is.
            row.tokens += (
                observed.committed[index] if observed.committed else content[begin + 1 : end + 1]
            )
            span = slice(first, first + end - begin)
            row.hidden.append([states[span] for states in observed.aux_hidden_states])
            first += end - begin
        most = max(len(self._rows[id].tokens) for id in observed.ids)
        return observed.drafted is None or most >= TOGETHER

    def take(
        self,
        ids: Sequence[str],
        table: torch.Tensor,  # [rows, blocks], int64
        least: int = 1,
    ) -> Arrears | None:
        """All that was seen of those of these rows that are at least so many positions behind;
        None: nothing. It stays until `settle`."""
        behind = [at for at, id in enumerate(ids) if len(self._rows[id].tokens) >= least]
        if not behind:
            return None
        if len(behind) < len(ids):
            table = table.index_select(0, upload(behind, torch.int64, table.device))
        rows = [self._rows[ids[at]] for at in behind]
        by_layer = zip(*(part for row in rows for part in row.hidden), strict=True)
        return Arrears(
            [ids[at] for at in behind],
            [(row.valid, row.valid + len(row.tokens)) for row in rows],
            [token for row in rows for token in row.tokens],
            [states[0] if len(states) == 1 else torch.cat(states) for states in by_layer],
            table,
        )

    def settle(self, taken: Arrears) -> None:
        """It is in the cache now."""
        for id, (_, end) in zip(taken.ids, taken.ranges, strict=True):
            self._rows[id] = _Row(end)
