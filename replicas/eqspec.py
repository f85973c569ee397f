"""One EQSPEC step: the drafter proposes, the target checks all rows at once, each row commits.

The method is that of "Batch Speculative Decoding Done Right" (arXiv 2510.22876). The ragged-tensor
problem it solves by unpadding and re-padding is index arithmetic here: rows keep their own lengths
in a paged cache, and a rejected token is overwritten by the next step.

Invariant before and after a step: a row of content length n has valid target KV for n - 1
positions; its last token has none yet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import takewhile
from operator import eq

import torch

from replicas.decoding import DecodingRows
from replicas.drafters import Drafter, DraftRequest, Observation, Proposal
from replicas.kv_cache import first_table
from replicas.models import BatchLayout, ForwardOptions, Model
from replicas.sampling import SamplingBatch, choose
from replicas.stopwatch import Stopwatch
from scheduler.messages import RowFailure

_NO_TOKEN = -1
_RAGGED = 0.75
"""Share of the tokens of equally long rows from which on all are checked as if they were."""


@dataclass(slots=True)
class Outcome:
    """What a step did, per row."""

    committed: list[list[int]]
    """Accepted tokens, then one of the target's own: 1 .. draft_len + 1. Fewer, maybe none, of a
    row that has failed; none of an absent one."""
    drafted: Sequence[int]
    """Draft tokens that it had: the drafter may propose fewer than were asked for."""
    accepted: list[int]
    absent: set[int]
    """Rows that took no part; they are as they were."""
    failures: dict[int, RowFailure] = field(default_factory=dict)
    """Why rows go no further, which is no other row's concern."""


def step(
    target: Model,
    drafter: Drafter | None,
    rows: DraftRequest,  # without noise; `table` has all groups of the target's layers
    hooks: DecodingRows | None,
    watch: Stopwatch,
) -> Outcome:
    """Propose, verify, choose, commit, advance; requests may change drafts and logits."""
    starts, table = [len(content) - 1 for content in rows.contents], rows.table
    layout = target.backend.step_layout(table, starts, 1 + max(rows.draft_lens))
    noise = rows.sampling.noise_after(layout.positions)
    rows = replace(rows, noise=noise, token_most=target.vocab, table=first_table(table))
    proposal, own, absent = _propose(drafter, rows, hooks, watch)
    if len(absent) == len(rows.ids):
        assert hooks is not None
        nothing: list[list[int]] = [[] for _ in rows.ids]
        return Outcome(nothing, proposal.lens, [0] * len(absent), absent, dict(hooks.failures))
    k = proposal.tokens.shape[0]  # 0 where nothing is proposed: then the step is a plain one
    last = torch.tensor([[content[-1] for content in rows.contents]], device=rows.table.device)
    tokens = torch.cat((last, proposal.tokens)).t()  # [rows, 1 + k]: the tokens to check
    widths = _widths(rows, proposal)
    if min(widths) > k:
        window = layout.window(0, k + 1)
    else:
        ranges = [(start, start + width) for start, width in zip(starts, widths, strict=True)]
        window = target.backend.ranges_layout(table, ranges)
    chosen, hidden = _verify(target, drafter, rows, hooks, proposal, tokens, window, widths, watch)
    outcome = _outcome(rows, proposal, chosen, absent, hooks)
    left_out = outcome.absent | outcome.failures.keys()
    if drafter is not None and len(left_out) < len(rows.ids):
        observed = _observation(rows, outcome, own, widths, hidden, left_out)
        if drafter.aux_layers:  # work for the device, once per step, as the check is
            with watch.section("verify"):
                drafter.observe(observed)
        else:
            drafter.observe(observed)
    return outcome


def _propose(
    drafter: Drafter | None, rows: DraftRequest, hooks: DecodingRows | None, watch: Stopwatch
) -> tuple[Proposal, Sequence[int], set[int]]:
    """Drafts of the rows' own lengths, as wide as the longest; with how many tokens of the drafter
    each of them begins; and the rows that take no part in the step."""
    if max(rows.draft_lens) == 0:
        empty = torch.empty((0, len(rows.ids)), dtype=torch.int64, device=rows.table.device)
        proposal = Proposal(empty, rows.draft_lens)
    else:
        assert drafter is not None, "drafting needs a drafter"
        proposal = drafter.propose(rows, watch)
        proposal = Proposal(proposal.tokens[: max(proposal.lens)], proposal.lens)
    if hooks is None or not hooks.drafts:
        return proposal, proposal.lens, set()
    proposed = [
        tokens[:length]
        for tokens, length in zip(proposal.tokens.t().tolist(), proposal.lens, strict=True)
    ]
    drafts, absent = hooks.redraft(proposed, rows.draft_lens)
    own = [
        sum(takewhile(bool, map(eq, ours, wanted)))
        for ours, wanted in zip(proposed, drafts, strict=True)
    ]
    return Proposal.of(drafts, rows.table.device), own, absent


def _widths(rows: DraftRequest, proposal: Proposal) -> list[int]:
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
    rows: DraftRequest,
    hooks: DecodingRows | None,
    proposal: Proposal,
    tokens: torch.Tensor,  # [rows, 1 + k], int64
    window: BatchLayout,
    widths: Sequence[int],
    watch: Stopwatch,
) -> tuple[list[list[int]], list[torch.Tensor]]:
    """The target's choice after each token, _NO_TOKEN where it saw none or its logits are no
    numbers; and the hidden states after the drafter's `aux_layers`."""
    sampling, noise, inside = rows.sampling, rows.noise, None
    to_verify = tokens
    if min(widths) < tokens.shape[1]:  # each token is a row of its own
        inside = torch.arange(tokens.shape[1]) < torch.tensor(widths)[:, None]
        of_row, column = inside.nonzero(as_tuple=True)
        to_verify = tokens[inside][:, None]
        sampling = sampling.take(of_row)
        noise = None if noise is None else noise.take(of_row, column)
    elif noise is not None:
        noise = noise.columns(0, tokens.shape[1])
    options = ForwardOptions(aux_layers=() if drafter is None else drafter.aux_layers)
    with watch.section("verify"):
        out = target.forward(to_verify.reshape(-1), window, options)
    assert out.logits is not None
    if hooks is not None:
        _adjust(hooks, proposal, widths, out.logits)
    logits = out.logits.view(*to_verify.shape, -1)
    chosen = of_numbers(choose(logits, sampling, noise), logits, sampling)
    if inside is not None:
        chosen = torch.full_like(tokens, _NO_TOKEN).masked_scatter_(inside, chosen)
    return chosen.tolist(), out.aux_hidden_states


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
        best = logits.gather(dim=-1, index=chosen[..., None]).squeeze(dim=-1)
    return chosen.masked_fill((best > -math.inf).logical_not(), _NO_TOKEN)


def _outcome(
    rows: DraftRequest,
    proposal: Proposal,
    chosen: Sequence[Sequence[int]],
    absent: set[int],
    hooks: DecodingRows | None,
) -> Outcome:
    """What the rows commit, within each row's own draft length; the hooks are told."""
    drafted = proposal.tokens.t().tolist()
    outcome = Outcome([], proposal.lens, [], absent)
    for row, draft_len in enumerate(proposal.lens):
        tokens = chosen[row]
        right = 0
        while right < draft_len and drafted[row][right] == tokens[right]:
            right += 1
        # The accepted tokens stand, whatever comes behind them.
        known = tokens[right] != _NO_TOKEN
        if not known and row not in absent:
            length = len(rows.contents[row]) + right
            outcome.failures[row] = RowFailure(f"the logits after {length} tokens are not finite")
        mine = list(tokens[: right + known])
        outcome.committed.append([] if row in absent else mine)
        outcome.accepted.append(right)  # 0 of an absent row, which has no draft
    if hooks is not None:
        hooks.commit(outcome.committed)
        outcome.failures |= hooks.failures
        for row in hooks.failures:
            outcome.accepted[row] = min(outcome.accepted[row], len(outcome.committed[row]))
    return outcome


def _observation(
    rows: DraftRequest,
    outcome: Outcome,
    own: Sequence[int],
    widths: Sequence[int],
    hidden: list[torch.Tensor],  # each [tokens of the check, hidden]
    left_out: Set[int],
) -> Observation:
    """Of the rows that go on from here, all but those that are left out."""
    on = [row for row in range(len(rows.ids)) if row not in left_out]
    table = rows.table
    if left_out:
        table = table.index_select(0, torch.tensor(on, device=table.device))
    ranges = [
        (len(rows.contents[row]) - 1, len(rows.contents[row]) + outcome.accepted[row]) for row in on
    ]
    if hidden:
        kept = _kept(outcome.accepted, widths, left_out).to(hidden[0].device)
        hidden = [states.index_select(0, kept) for states in hidden]
    return Observation(
        [rows.ids[row] for row in on],
        [rows.contents[row] for row in on],
        ranges,
        table,
        [outcome.committed[row] for row in on],
        [own[row] for row in on],
        hidden,
    )


def _kept(
    accepted: Sequence[int], widths: Sequence[int], left_out: Set[int]
) -> torch.Tensor:  # [kept], int64
    """The places of each row's last token and its accepted draft tokens among the tokens of the
    check, but for the rows that are left out."""
    kept: list[int] = []
    first = 0
    for row, (right, width) in enumerate(zip(accepted, widths, strict=True)):
        if row not in left_out:
            kept += range(first, first + right + 1)
        first += width
    return torch.tensor(kept, dtype=torch.int64)
