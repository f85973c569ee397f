"""Drafts by an EAGLE-3 head: it sees what the target has computed, and goes on from its own output.

Its KV of a position needs the target's hidden states there, so it looks on at every step, also of
those without drafts. That is half of the layer; the other half is computed for one position of a
row, when the row drafts. Between steps a row carries what that takes. A batch that failed takes it
away; the next step of such a row is a plain one, which brings it back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from replicas.cuda.transfers import upload
from replicas.drafters.eagle3.layer import HeadLayer
from replicas.drafters.protocol import Ask, Proposal, Seen
from replicas.sampling.choice import guess
from replicas.stopwatch import Stopwatch


@dataclass(slots=True)
class _Row:
    valid: int
    """KV positions."""
    carry: tuple[torch.Tensor, torch.Tensor] | None = None
    """What has entered the layer at position `valid` - 1; see `HeadLayer.enter`."""


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
        for row, length in zip(rows, lengths, strict=True):
            self._rows[row] = _Row(min(self._rows[row].valid, length - 1))

    def observe(self, seen: Seen) -> None:
        tokens: list[int] = []
        for index, (content, (begin, end)) in enumerate(
            zip(seen.contents, seen.ranges, strict=True)
        ):
            assert self._rows[seen.ids[index]].valid == begin, "it sees every position once"
            # Of a check all next tokens are new, of a prefill none is.
            new = seen.committed[index] if seen.committed else content[begin + 1 : end + 1]
            tokens += new
        fed = upload(tokens, torch.int64, seen.table.device)
        hidden = self._layer.fused([seen.taps[index] for index in self._order])
        layout = self._layer.backend.ranges_layout(seen.table, seen.ranges)
        last = [end - 1 for end in accumulate(end - begin for begin, end in seen.ranges)]
        entered, residual = self._layer.enter(fed, hidden, layout)
        carries = zip(entered[last], residual[last], strict=True)
        for row, (_, end), carry in zip(seen.ids, seen.ranges, carries, strict=True):
            self._rows[row] = _Row(end, carry)

    def propose(self, ask: Ask, watch: Stopwatch) -> Proposal:
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
