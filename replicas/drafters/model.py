"""A drafter that is a smaller language model with a KV cache of its own in the same block table.

It proposes with the target's rule and the target's noise, so that it agrees as often as its
distribution does (drafter-invariant coupling, arXiv 2408.07978). It needs tokens alone: rows that
steps without drafting left behind are filled before it drafts again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from replicas.drafters.protocol import Ask, Proposal, Seen
from replicas.models.paged_model import ALL, Model, Wants
from replicas.models.prefill import fill
from replicas.sampling.choice import guess
from replicas.stopwatch import Stopwatch


class ModelDrafter:
    """Drafts token by token; its KV of a row is valid for at least length - 2 positions when it
    drafts."""

    taps: tuple[int, ...] = ()

    def __init__(self, model: Model, name: str, pass_tokens: int) -> None:
        """`pass_tokens`: tokens of one prefill pass at most."""
        self.name = name
        self.model = model
        self._pass_tokens = pass_tokens
        self._valid: dict[str, int] = {}
        """Valid KV positions of each row."""

    def begin(self, row: str, tokens: Sequence[int], salt: str, filled: int) -> None:
        self._valid[row] = filled

    def end(self, row: str) -> None:
        self._valid.pop(row, None)

    def valid(self, row: str) -> int | None:
        return self._valid[row]

    def observe(self, seen: Seen) -> None:
        if seen.drafted is None:
            self._fill(seen.ids, seen.contents, seen.ranges, seen.table)
        elif (k := max(seen.drafted)) > 0:
            for index, (_, end) in enumerate(seen.ranges):
                # Drafting fed all proposed tokens but the last one.
                fed = len(seen.contents[index]) + min(seen.drafted[index], k - 1)
                self._valid[seen.ids[index]] = min(end, fed)

    def rollback(self, rows: Sequence[str], lengths: Sequence[int]) -> None:
        for row, length in zip(rows, lengths, strict=True):
            self._valid[row] = min(self._valid[row], length - 1)

    def propose(self, ask: Ask, watch: Stopwatch) -> Proposal:
        self._catch_up(ask, watch)
        rows, k, model = len(ask.ids), ask.k, self.model
        device = ask.table.device
        # After a step that accepted everything two positions are missing, else one: feeding two
        # always keeps shapes fixed, and the second writes what is there already.
        starts = [len(content) - 2 for content in ask.contents]
        layout = model.backend.step_layout(ask.table, starts, k + 1)
        # An id that only the target has, padding of its embedding, is fed as the last one.
        most = model.vocab - 1
        last = [min(id, most) for content in ask.contents for id in (0, *content[-2:])[-2:]]
        fed = torch.tensor(last, device=device)
        shared = min(ask.token_most, model.vocab)
        kept = torch.arange(1, 2 * rows, 2, device=device)
        tokens = []
        # Not each before its pass: after a pass a processor would have to fetch the code anew.
        windows = [layout.window(j + 1 if j else 0, j + 2) for j in range(k)]
        for j, window in enumerate(windows):
            with watch.section("draft"):
                logits = model.forward(fed, window, ALL if j else Wants(kept)).logits
            assert logits is not None
            logits = logits[:, :shared]  # of ids that both have
            fed = guess(logits, ask.sampling, ask.noise, j)
            tokens.append(fed)
        return Proposal(torch.stack(tokens), ask.draft_lens)

    def _catch_up(self, ask: Ask, watch: Stopwatch) -> None:
        """Fill rows that steps without drafting left behind."""
        behind = [
            index
            for index, (row, content) in enumerate(zip(ask.ids, ask.contents, strict=True))
            if self._valid[row] < len(content) - 2
        ]
        if not behind:
            return
        with watch.section("catch_up"):
            self._fill(
                [ask.ids[index] for index in behind],
                [ask.contents[index] for index in behind],
                [(self._valid[ask.ids[i]], len(ask.contents[i]) - 2) for i in behind],
                ask.table[behind],
            )

    def _fill(
        self,
        ids: Sequence[str],
        contents: Sequence[Sequence[int]],
        ranges: Sequence[tuple[int, int]],
        table: torch.Tensor,
    ) -> None:
        fill(self.model, contents, ranges, table, self._pass_tokens)
        for row, (_, end) in zip(ids, ranges, strict=True):
            self._valid[row] = max(self._valid[row], end)
