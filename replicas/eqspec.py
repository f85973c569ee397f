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
from dataclasses import dataclass, replace
from itertools import takewhile

import torch

from replicas.decoding import DecodingRows
from replicas.drafters import Ask, Drafter, Proposal, Seen
from replicas.models.paged_model import Layout, Model, Wants
from replicas.sampling import SamplingBatch, choose
from replicas.stopwatch import Stopwatch

_NO_TOKEN = -1
_RAGGED = 0.75
"""Share of the tokens of equally long rows from which on all are checked as if they were."""


class NotFinite(ArithmeticError):
    """A row's logits are no numbers, so it has no next token; the message says which row's."""


@dataclass(slots=True)
class Outcome:
    """What a step did, per row."""

    committed: list[list[int]]
    """Accepted tokens, then one of the target's own: 1 .. draft_len + 1."""
    drafted: Sequence[int]
    """Draft tokens that it had: the drafter may propose fewer than were asked for."""
    accepted: list[int]


def step(
    target: Model,
    drafter: Drafter | None,
    rows: Ask,  # without noise
    hooks: DecodingRows | None,
    watch: Stopwatch,
) -> Outcome:
    """Propose, verify, choose, commit, advance; requests may change drafts and logits."""
    starts = [len(content) - 1 for content in rows.contents]
    layout = target.backend.step_layout(rows.table, starts, 1 + max(rows.draft_lens))
    noise = rows.sampling.noise_after(layout.positions)
    rows = replace(rows, noise=noise, token_most=target.vocab)
    proposal, own = _propose(drafter, rows, hooks, watch)
    k = proposal.tokens.shape[0]  # 0 where nothing is proposed: then the step is a plain one
    last = torch.tensor([[content[-1] for content in rows.contents]], device=rows.table.device)
    tokens = torch.cat((last, proposal.tokens)).t()  # [rows, 1 + k]: the tokens to check
    widths = _widths(rows, proposal)
    if min(widths) > k:
        window = layout.window(0, k + 1)
    else:
        ranges = [(start, start + width) for start, width in zip(starts, widths, strict=True)]
        window = target.backend.ranges_layout(rows.table, ranges)
    chosen, taps = _verify(target, drafter, rows, hooks, proposal, tokens, window, widths, watch)
    outcome = _outcome(rows, proposal, chosen)
    if drafter is not None:
        seen = _seen(rows, outcome, own, widths, taps)
        if drafter.taps:  # work for the device, once per step and by its tokens, as the check is
            with watch.section("verify"):
                drafter.observe(seen)
        else:
            drafter.observe(seen)
    if hooks is not None:
        for row, new in enumerate(outcome.committed):
            hooks.committed(row, new)
    return outcome


def _propose(
    drafter: Drafter | None, rows: Ask, hooks: DecodingRows | None, watch: Stopwatch
) -> tuple[Proposal, Sequence[int]]:
    """Drafts of the rows' own lengths, as wide as the longest; and with how many tokens of the
    drafter each of them begins."""
    if max(rows.draft_lens) == 0:
        empty = torch.empty((0, len(rows.ids)), dtype=torch.int64, device=rows.table.device)
        return Proposal(empty, rows.draft_lens), rows.draft_lens
    assert drafter is not None, "drafting needs a drafter"
    proposal = drafter.propose(rows, watch)
    proposal = Proposal(proposal.tokens[: max(proposal.lens)], proposal.lens)
    if hooks is not None and hooks.drafts:
        return _redraft(rows, hooks, proposal)
    return proposal, proposal.lens


def _redraft(rows: Ask, hooks: DecodingRows, proposal: Proposal) -> tuple[Proposal, Sequence[int]]:
    """The proposal as the requests want it, and what is left of the drafter's."""
    drafts, own = [], []
    for row, tokens in enumerate(proposal.tokens.t().tolist()):
        proposed = tokens[: proposal.lens[row]]
        draft = hooks.draft(row, proposed, rows.draft_lens[row])
        same = (a == b for a, b in zip(proposed, draft, strict=False))
        drafts.append(draft)
        own.append(sum(takewhile(bool, same)))
    return Proposal.of(drafts, rows.table.device), own


def _widths(rows: Ask, proposal: Proposal) -> list[int]:
    """Tokens of each row in the check: all of its own, or as many as the widest row has."""
    widths = [length + 1 for length in proposal.lens]
    widest = max(widths)
    # A device runs shapes that it knows, a host as many tokens as there are.
    on_host = rows.table.device.type == "cpu"
    if on_host and sum(widths) <= _RAGGED * len(widths) * widest:
        return widths
    return [widest] * len(widths)


def _adjust(
    hooks: DecodingRows,
    proposal: Proposal,
    widths: Sequence[int],
    logits: torch.Tensor,  # [tokens of the check, vocab], row by row
) -> None:
    """Let requests change the logits of their rows."""
    first = 0
    for row, draft in enumerate(proposal.tokens.t().tolist()):
        own = proposal.lens[row]
        hooks.adjust(row, draft[:own], logits[first : first + 1 + own])
        first += widths[row]


def _verify(
    target: Model,
    drafter: Drafter | None,
    rows: Ask,
    hooks: DecodingRows | None,
    proposal: Proposal,
    tokens: torch.Tensor,  # [rows, 1 + k], int64
    window: Layout,
    widths: Sequence[int],
    watch: Stopwatch,
) -> tuple[list[list[int]], list[torch.Tensor]]:
    """The target's choice after each token, _NO_TOKEN where it saw none or its logits are no
    numbers; and the hidden states that the drafter taps."""
    sampling, noise, inside = rows.sampling, rows.noise, None
    checked = tokens
    if min(widths) < tokens.shape[1]:  # each token is a row of its own
        inside = torch.arange(tokens.shape[1]) < torch.tensor(widths)[:, None]
        of_row, column = inside.nonzero(as_tuple=True)
        checked = tokens[inside][:, None]
        sampling = sampling.take(of_row)
        noise = None if noise is None else noise.take(of_row, column)
    elif noise is not None:
        noise = noise.columns(0, tokens.shape[1])
    wants = Wants(taps=() if drafter is None else drafter.taps)
    with watch.section("verify"):
        out = target.forward(checked.reshape(-1), window, wants)
    assert out.logits is not None
    if hooks is not None:
        _adjust(hooks, proposal, widths, out.logits)
    logits = out.logits.view(*checked.shape, -1)
    chosen = of_numbers(choose(logits, sampling, noise), logits, sampling)
    if inside is not None:
        chosen = torch.full_like(tokens, _NO_TOKEN).masked_scatter_(inside, chosen)
    return chosen.tolist(), out.taps


def of_numbers(
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
    if best.is_cpu and best.amin().item() > -math.inf:
        return chosen
    return chosen.masked_fill((best > -math.inf).logical_not(), _NO_TOKEN)


def _outcome(rows: Ask, proposal: Proposal, chosen: Sequence[Sequence[int]]) -> Outcome:
    """What the rows commit, within each row's own draft length."""
    drafted = proposal.tokens.t().tolist()
    committed, accepted = [], []
    for row, draft_len in enumerate(proposal.lens):
        tokens = chosen[row]
        right = 0
        while right < draft_len and drafted[row][right] == tokens[right]:
            right += 1
        mine = list(tokens[: right + 1])
        if _NO_TOKEN in mine:
            raise NotFinite(
                f"row {row}: the logits after {len(rows.contents[row])} tokens or a few more are"
                " not finite"
            )
        committed.append(mine)
        accepted.append(right)
    return Outcome(committed, proposal.lens, accepted)


def _seen(
    rows: Ask,
    outcome: Outcome,
    own: Sequence[int],
    widths: Sequence[int],
    taps: list[torch.Tensor],  # each [tokens of the check, hidden]
) -> Seen:
    ranges = [
        (len(content) - 1, len(content) + accepted)
        for content, accepted in zip(rows.contents, outcome.accepted, strict=True)
    ]
    if taps:
        kept = _kept(outcome.accepted, widths).to(taps[0].device)
        taps = [tap.index_select(0, kept) for tap in taps]
    return Seen(rows.ids, rows.contents, ranges, rows.table, outcome.committed, own, taps)


def _kept(accepted: Sequence[int], widths: Sequence[int]) -> torch.Tensor:
    """The places of each row's last token and its accepted draft tokens, [kept], int64, among the
    tokens of the check."""
    kept: list[int] = []
    first = 0
    for right, width in zip(accepted, widths, strict=True):
        kept += range(first, first + right + 1)
        first += width
    return torch.tensor(kept)
