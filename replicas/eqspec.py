"""One EQSPEC step: the draft proposes, the target checks all rows at once, each row commits.

The method is that of "Batch Speculative Decoding Done Right" (arXiv 2510.22876). The ragged-tensor
problem it solves by unpadding and re-padding is index arithmetic here: rows keep their own lengths
in a paged cache, and a rejected token is overwritten by the next step.

Invariant before and after a step: a row of content length n has valid target KV for n - 1
positions; its last token has none yet. Its draft KV is valid for at least n - 2 positions.

`propose` and `check` are the device part: tensors to tensors, shapes from `Inputs` alone, nothing
read back. Where fewer draft tokens are checked than were proposed (`replicas.trimming`), the target
sees the chosen ones only, packed into one row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from replicas.model import PagedModel
from replicas.paged_cache import CacheShape, Layout, Span
from replicas.sampling import SamplingBatch, array_of, choose, choose_and_rate
from replicas.stopwatch import Stopwatch
from replicas.trimming import trimmed
from replicas.upload import upload

_NO_TOKEN = -1


class NotFinite(ArithmeticError):
    """A row's logits are no numbers, so it has no next token; the message says which row's."""


@dataclass(frozen=True)
class Group:
    """The rows of one step."""

    contents: Sequence[Sequence[int]]
    """All content tokens per row; at least one. Read, never changed."""
    draft_lens: Sequence[int]
    """Draft tokens per row, each at most k."""
    sampling: SamplingBatch
    table: torch.Tensor  # [rows, blocks], int64
    verify_tokens: int | None = None
    """Draft tokens of all rows together that the target checks; None: all. Needs a `whole`
    SamplingBatch."""
    parts: Sequence[int] = ()
    """Rows of each part that attention reads together, in order; see `replicas.parts`. Empty: all.
    Steps of fixed shapes read all."""


@dataclass(frozen=True)
class Outcome:
    """What a step did, per row."""

    committed: list[list[int]]
    """Accepted tokens, then one of the target's own: 1 .. draft_len + 1."""
    accepted: list[int]
    checked: list[int]
    """Draft tokens that the target saw."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """All that the device part depends on: tensors, and beside them what fixes their shapes."""

    state: torch.Tensor  # [rows, 4], int64: last two tokens, first position, draft_len
    table: torch.Tensor  # [rows, blocks], int64
    sampling: SamplingBatch
    k: int
    verify_tokens: int | None
    """Fewer than rows * k, or None."""
    span: Span
    starts: Sequence[int] | None = None
    """The first positions once more, where the host does the index arithmetic: on a CPU. None:
    those of `state` are taken, and nothing is read back."""
    parts: Sequence[int] = ()
    """The group's; they need `starts`."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """What `check` needs of `propose`."""

    layout: Layout
    noise: torch.Tensor | None  # [sampled, k + 1, vocab]
    tokens: torch.Tensor  # [rows, 1 + k], int64: the last committed token, then the draft's
    belief: torch.Tensor | None  # [rows, k], float32: cumulated log-probability, if trimmed


def step(
    target: PagedModel,
    draft: PagedModel | None,
    group: Group,
    shape: CacheShape,
    watch: Stopwatch,
) -> Outcome:
    """Run one step with exactly the shapes that the group needs."""
    rows, k = len(group.contents), max(group.draft_lens)
    trimmed = group.verify_tokens
    if trimmed is not None:
        trimmed = min(trimmed, sum(group.draft_lens))
    starts = [len(content) - 2 for content in group.contents]
    inputs = Inputs(
        upload(rows_of(group), torch.int64, group.table.device),
        group.table,
        group.sampling,
        k,
        trimmed if trimmed is not None and trimmed < rows * k else None,
        Span.of(starts, k + 2, group.table, shape),
        starts if group.table.device.type == "cpu" else None,
        group.parts,
    )
    proposal = propose(target, draft, inputs, shape, watch)
    # One transfer, the step's only synchronisation.
    return read_back(group, check(target, inputs, proposal, watch).tolist(), k)


def rows_of(group: Group) -> list[tuple[int, int, int, int]]:
    """`Inputs.state`, row by row. A step begins one position before a row's last token, for the
    draft to catch up from."""
    return [
        (content[-2] if len(content) > 1 else 0, content[-1], len(content) - 2, draft_len)
        for content, draft_len in zip(group.contents, group.draft_lens, strict=True)
    ]


def read_back(group: Group, table: list[list[int]], k: int) -> Outcome:
    """What the rows commit by what `check` returned, within each row's own draft length; raises
    NotFinite."""
    committed, accepted, checked = [], [], []
    for row, ((seen, *tokens), draft_len) in enumerate(zip(table, group.draft_lens, strict=False)):
        proposed, chosen = tokens[:k], tokens[k:]
        limit = min(draft_len, seen, k)
        right = 0
        while right < limit and proposed[right] == chosen[right]:
            right += 1
        accepted.append(right)
        committed.append(chosen[: right + 1])
        checked.append(limit)
        if _NO_TOKEN in committed[-1]:
            raise NotFinite(
                f"row {row}: the logits after {len(group.contents[row])} tokens or a few more are"
                " not finite"
            )
    return Outcome(committed, accepted, checked)


def propose(
    target: PagedModel,
    draft: PagedModel | None,
    inputs: Inputs,
    shape: CacheShape,
    watch: Stopwatch,
) -> Proposal:
    """Draft k tokens per row."""
    starts = inputs.state[:, 2] if inputs.starts is None else inputs.starts
    layout = Layout(inputs.table, starts, inputs.k + 2, shape, inputs.span, inputs.parts)
    tail = inputs.state[:, :2]
    # Embeddings may be padded to different sizes; an id that only one model has is never proposed,
    # and the draft is fed its own last id in place of one that only the target has.
    shared = target.vocab if draft is None else min(target.vocab, draft.vocab)
    noise = None
    if inputs.sampling.any_sampled:
        # Logits at position p choose the token of position p + 1.
        noise = inputs.sampling.noise(layout.positions[:, 1:] + 1, target.vocab)
    proposed = [tail[:, 1:]]  # each [rows, 1], from the last committed token on
    belief = []
    drafting = watch.section("draft")
    for j in range(inputs.k):
        assert draft is not None, "drafting needs a draft"
        # After a step that accepted everything the draft lacks two positions, else one; feeding
        # two always keeps the shapes fixed and writes nothing new into the second.
        window = layout.window(0, 2) if j == 0 else layout.window(j + 1, j + 2)
        fed = tail if j == 0 else proposed[-1]
        if draft.vocab > shared or target.vocab > shared:
            fed = fed.clamp(max=shared - 1)
        with drafting:
            logits = draft.forward(fed, window, logits_to_keep=1)
        if logits.shape[-1] > shared:
            logits = logits[..., :shared]
        here = None if noise is None else noise[:, j : j + 1]
        if inputs.verify_tokens is None:
            token = choose(logits, inputs.sampling, here)
        else:
            token, rated = choose_and_rate(logits, inputs.sampling, here)
            belief.append(rated)
        proposed.append(token)
    tokens = _joined(proposed) if inputs.k else proposed[0]
    return Proposal(layout, noise, tokens, torch.cat(belief, 1).cumsum(1) if belief else None)


def check(
    target: PagedModel, inputs: Inputs, proposal: Proposal, watch: Stopwatch
) -> torch.Tensor:  # [rows, 1 + k + k + 1], int64
    """How many draft tokens the target saw, the draft tokens, and the target's choices: _NO_TOKEN
    where it saw none or its logits are NaN."""
    k, tokens, noise = inputs.k, proposal.tokens, proposal.noise
    rows = tokens.shape[0]
    window = proposal.layout.window(1, k + 2)
    if proposal.belief is None:
        with watch.section("verify"):
            logits = target.forward(tokens, window)
        chosen = _of_numbers(
            choose(logits, inputs.sampling, noise), logits, inputs.sampling
        )  # [rows, k + 1]
        seen = inputs.state[:, 3:]
    else:
        assert inputs.verify_tokens is not None
        trim = trimmed(proposal.belief, inputs.state[:, 3:], inputs.verify_tokens)
        with watch.section("verify"):
            packed = tokens.reshape(-1).index_select(0, trim.cells)[None]
            logits = target.forward(packed, window.packed(trim.cells))
        if noise is not None:
            noise = noise.flatten(0, 1)[trim.cells][:, None]
        logits = logits.transpose(0, 1)
        sampling = inputs.sampling.take(trim.of_row)
        picked = _of_numbers(choose(logits, sampling, noise), logits, sampling)[:, 0]
        chosen = tokens.new_full((rows * (k + 1),), _NO_TOKEN).index_copy_(0, trim.cells, picked)
        chosen = chosen.view(rows, k + 1)
        seen = trim.seen
    return _joined((seen, tokens[:, 1:], chosen))


def _of_numbers(
    chosen: torch.Tensor,  # [rows, width], int64
    logits: torch.Tensor,  # [rows, width, vocab]
    sampling: SamplingBatch,
) -> torch.Tensor:  # [rows, width], int64
    """The choices, _NO_TOKEN for those of logits with a NaN, or of none but -inf.

    argmax takes a NaN for the greatest, so a greedy choice shows it. A sampled one does not: one
    NaN spreads to all scores there, and any token may be the first of them.
    """
    if logits.is_cpu and not sampling.any_sampled:
        # A few numbers, one by one: less code to fetch than for any operation on all.
        score = array_of(logits).item
        tokens = chosen.numpy()
        for row, of_row in enumerate(tokens.tolist()):
            for column, token in enumerate(of_row):
                if not score(row, column, token) > -math.inf:
                    tokens[row, column] = _NO_TOKEN
        return chosen
    best = (
        logits.amax(dim=-1)
        if sampling.any_sampled
        else logits.gather(-1, chosen[..., None])[..., 0]
    )
    return chosen.masked_fill((best > -torch.inf).logical_not(), _NO_TOKEN)


def _joined(columns: Sequence[torch.Tensor]) -> torch.Tensor:
    """Columns of a few numbers each, [rows, some], side by side."""
    if columns[0].is_cpu:
        return torch.from_numpy(np.concatenate([one.numpy() for one in columns], axis=1))
    return torch.cat(list(columns), dim=1)
