"""One EQSPEC step: the drafter proposes, the target checks all rows at once, each row commits.

The method is that of "Batch Speculative Decoding Done Right" (arXiv 2510.22876). The ragged-tensor
problem it solves by unpadding and re-padding is index arithmetic here: rows keep their own lengths
in a paged cache, and a rejected token is overwritten by the next step.

Invariant before and after a step: a row of content length n has valid target KV for n - 1
positions; its last token has none yet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from replicas.drafters.protocol import Ask, Drafter, Proposal, Seen
from replicas.models.paged_model import Layout, Model, Wants
from replicas.sampling.choice import SamplingBatch, choose
from replicas.sampling.selection import Selection, select
from replicas.stopwatch import Stopwatch

_NO_TOKEN = -1


class NotFinite(ArithmeticError):
    """A row's logits are no numbers, so it has no next token; the message says which row's."""


class RowHooks(Protocol):
    """What a request adds to choosing, on the host: a function of the row's own tokens."""

    def masks(self, row: int, draft: Sequence[int]) -> torch.Tensor | None:
        """What is added to the row's logits, [1 + len(draft), vocab]: at place j the row's content
        is followed by the first j draft tokens. None: nothing."""
        ...

    def committed(self, row: int, tokens: Sequence[int], accepted: int) -> None:
        """The row has committed these tokens; draft tokens beyond `accepted` are rolled back."""
        ...


@dataclass(slots=True)
class StepRows:
    """The rows of one step."""

    ids: Sequence[str]
    contents: Sequence[Sequence[int]]
    """All content tokens per row; at least one. Read, never changed."""
    draft_lens: Sequence[int]
    """Draft tokens per row, at most k."""
    sampling: SamplingBatch
    table: torch.Tensor  # [rows, blocks], int64
    verify_tokens: int | None = None
    """Draft tokens of all rows together that the target checks; None: all."""
    hooks: RowHooks | None = None


@dataclass(slots=True)
class Outcome:
    """What a step did, per row."""

    committed: list[list[int]]
    """Accepted tokens, then one of the target's own: 1 .. draft_len + 1."""
    drafted: Sequence[int]
    """Draft tokens that it had: the drafter may propose fewer than were asked for."""
    accepted: list[int]
    checked: list[int]
    """Draft tokens that the target saw."""
    positions_read: int
    """KV positions that the target's attention read, padding included."""


def step(target: Model, drafter: Drafter | None, rows: StepRows, watch: Stopwatch) -> Outcome:
    """Propose, mask, verify, choose, commit, advance."""
    proposal = _propose(target, drafter, rows, watch)
    k = proposal.tokens.shape[0]
    last = [content[-1] for content in rows.contents]
    tokens = torch.tensor(last, device=rows.table.device)[None]
    tokens = torch.cat((tokens, proposal.tokens)).t()  # [rows, 1 + k]: the tokens to check
    masks = _masks(rows, proposal)
    starts = [len(content) - 1 for content in rows.contents]
    layout = target.backend.step_layout(rows.table, starts, k + 1)
    # Logits at position p choose the token of position p + 1.
    positions = layout.positions + 1
    window, cells = layout.window(0, k + 1), None
    if rows.verify_tokens is not None and proposal.log_probabilities is not None:
        budget = min(rows.verify_tokens, sum(proposal.lens))
        cells = select(proposal.log_probabilities, proposal.lens, budget)
        window = layout.some(cells)
    chosen, taps = _verify(target, drafter, rows, tokens, window, cells, positions, masks, watch)
    outcome = _outcome(rows, proposal, cells, chosen, window.positions_read)
    if drafter is not None:
        drafter.observe(_seen(rows, outcome, k, taps))
    if rows.hooks is not None:
        for row, (new, accepted) in enumerate(
            zip(outcome.committed, outcome.accepted, strict=True)
        ):
            rows.hooks.committed(row, new, accepted)
    return outcome


def _propose(target: Model, drafter: Drafter | None, rows: StepRows, watch: Stopwatch) -> Proposal:
    if max(rows.draft_lens) == 0:
        empty = torch.empty((0, len(rows.ids)), dtype=torch.int64, device=rows.table.device)
        return Proposal(empty, rows.draft_lens)
    assert drafter is not None, "drafting needs a drafter"
    ask = Ask(
        ids=rows.ids,
        contents=rows.contents,
        draft_lens=rows.draft_lens,
        sampling=rows.sampling,
        table=rows.table,
        rate=rows.verify_tokens is not None and drafter.rates,
        token_most=target.vocab,
    )
    return drafter.propose(ask, watch)


def _masks(rows: StepRows, proposal: Proposal) -> torch.Tensor | None:  # [rows, 1 + k, vocab]
    if rows.hooks is None:
        return None
    drafts = proposal.tokens.t().tolist()
    k = proposal.tokens.shape[0]
    whole: torch.Tensor | None = None
    for row, draft in enumerate(drafts):
        mask = rows.hooks.masks(row, draft)
        if mask is None:
            continue
        if whole is None:
            whole = mask.new_zeros((len(drafts), 1 + k, mask.shape[-1]))
        whole[row] = mask
    return None if whole is None else whole.to(rows.table.device)


def _verify(
    target: Model,
    drafter: Drafter | None,
    rows: StepRows,
    tokens: torch.Tensor,  # [rows, 1 + k], int64
    window: Layout,
    cells: Selection | None,
    positions: torch.Tensor,  # [rows, 1 + k], int64: of the tokens to choose
    masks: torch.Tensor | None,  # [rows, 1 + k, vocab]
    watch: Stopwatch,
) -> tuple[list[list[int]], list[torch.Tensor]]:
    """The target's choice after each token, _NO_TOKEN where it saw none or its logits are no
    numbers; and the hidden states that the drafter taps."""
    count, width = tokens.shape
    flat = tokens.reshape(-1) if cells is None else tokens.reshape(-1)[cells.cells]
    wants = Wants(taps=() if drafter is None else drafter.taps)
    with watch.section("verify"):
        out = target.forward(flat, window, wants)
    assert out.logits is not None
    if masks is not None:
        masks = masks.flatten(0, 1) if cells is None else masks.flatten(0, 1)[cells.cells]
        out.logits += masks
    if cells is None:
        logits = out.logits.view(count, width, -1)
        chosen = _of_numbers(choose(logits, rows.sampling, positions), logits, rows.sampling)
        return chosen.tolist(), out.taps
    positions = positions.flatten()[cells.cells][:, None]
    logits = out.logits[:, None]
    sampling = rows.sampling.take(cells.of_row)
    picked = _of_numbers(choose(logits, sampling, positions), logits, sampling)[:, 0]
    chosen = tokens.new_full((count * width,), _NO_TOKEN)
    chosen.index_copy_(0, cells.cells, picked)
    return chosen.view(count, width).tolist(), out.taps


def _of_numbers(
    chosen: torch.Tensor,  # [rows, width], int64
    logits: torch.Tensor,  # [rows, width, vocab]
    sampling: SamplingBatch,
) -> torch.Tensor:  # [rows, width], int64
    """The choices, _NO_TOKEN for those of logits with a NaN, or of none but -inf.

    argmax takes a NaN for the greatest, so a greedy choice shows it. A sampled one does not: one
    NaN spreads to all scores there, and any token may be the first of them.
    """
    if sampling.any_sampled:
        best = logits.amax(dim=-1)
    else:
        best = logits.gather(-1, chosen[..., None])[..., 0]
    finite = best > -math.inf
    if finite.is_cpu and finite.all():
        return chosen
    return chosen.masked_fill(finite.logical_not(), _NO_TOKEN)


def _outcome(
    rows: StepRows,
    proposal: Proposal,
    cells: Selection | None,
    chosen: Sequence[Sequence[int]],
    positions_read: int,
) -> Outcome:
    """What the rows commit, within each row's own draft length."""
    drafted = proposal.tokens.t().tolist()
    seen = proposal.lens if cells is None else cells.seen.tolist()
    committed, accepted, checked = [], [], []
    for row, draft_len in enumerate(proposal.lens):
        tokens = chosen[row]
        limit = min(draft_len, seen[row])
        right = 0
        while right < limit and drafted[row][right] == tokens[right]:
            right += 1
        mine = list(tokens[: right + 1])
        if _NO_TOKEN in mine:
            raise NotFinite(
                f"row {row}: the logits after {len(rows.contents[row])} tokens or a few more are"
                " not finite"
            )
        committed.append(mine)
        accepted.append(right)
        checked.append(limit)
    return Outcome(committed, proposal.lens, accepted, checked, positions_read)


def _seen(rows: StepRows, outcome: Outcome, k: int, taps: list[torch.Tensor]) -> Seen:
    ranges = [
        (len(content) - 1, len(content) + accepted)
        for content, accepted in zip(rows.contents, outcome.accepted, strict=True)
    ]
    return Seen(rows.ids, rows.contents, ranges, rows.table, k, taps)
