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

import torch

from replicas.model import PagedModel
from replicas.sampling import SamplingBatch, array_of, choose, choose_and_rate
from replicas.stopwatch import Stopwatch
from replicas.trimming import trimmed
from replicas.upload import upload
from replicas.windows import CacheShape, Layout, Span, Window

_NO_TOKEN = -1


class NotFinite(ArithmeticError):
    """A row's logits are no numbers, so it has no next token; the message says which row's."""


@dataclass(slots=True)
class Group:
    """The rows of one step. Like all that a step makes it is changed by nobody; to freeze it would
    triple what making it takes."""

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
    """Rows of each part that the target's attention reads together, in order; see `replicas.parts`.
    Empty: all. Steps of fixed shapes read all."""
    draft_parts: Sequence[int] = ()
    """The same of the draft's."""


@dataclass(slots=True)
class Outcome:
    """What a step did, per row."""

    committed: list[list[int]]
    """Accepted tokens, then one of the target's own: 1 .. draft_len + 1."""
    accepted: list[int]
    checked: list[int]
    """Draft tokens that the target saw."""


@dataclass(slots=True)
class Inputs:
    """All that the device part depends on: tensors, and beside them what fixes their shapes."""

    state: torch.Tensor  # [4 + k, rows], int64
    """Draft length, first position and last two tokens of each row; below them drafting writes the
    draft tokens."""
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
    draft_parts: Sequence[int] = ()


@dataclass(slots=True)
class Proposal:
    """What `check` needs of `propose`."""

    window: Window
    """Of the tokens to check: all of them."""
    noise: torch.Tensor | None  # [sampled, k + 1, vocab]
    tokens: torch.Tensor  # [1 + k, rows], int64: the last committed token, then the draft's
    belief: torch.Tensor | None  # [rows, k], float32: cumulated log-probability, if trimmed


@dataclass(slots=True)
class Verdict:
    """What the target says of a proposal."""

    seen: torch.Tensor  # [rows], int64: draft tokens that it was shown, or more
    drafted: torch.Tensor  # [k, rows], int64
    chosen: torch.Tensor  # [rows, k + 1], int64
    """_NO_TOKEN where the target saw no token or its logits are no numbers."""

    def joined(self) -> torch.Tensor:  # [2 + 2 * k, rows], int64
        """All of it as one tensor, for one transfer; `read_back` takes it apart."""
        return torch.cat((self.seen[None], self.drafted, self.chosen.t()))


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
    on_host = group.table.device.type == "cpu"
    state = state_of(group, k)
    inputs = Inputs(
        upload(state, torch.int64, group.table.device),
        group.table,
        group.sampling,
        k,
        trimmed if trimmed is not None and trimmed < rows * k else None,
        Span.of(state[1], k + 2, group.table, shape),
        state[1] if on_host else None,
        group.parts,
        group.draft_parts,
    )
    verdict = check(target, inputs, propose(target, draft, inputs, shape, watch), watch)
    if on_host:
        parts = (verdict.seen, verdict.drafted, verdict.chosen)
        return _outcome(group, *[part.tolist() for part in parts])
    # One transfer, the step's only synchronisation.
    return read_back(group, verdict.joined())


def state_of(group: Group, k: int) -> list[list[int]]:
    """`Inputs.state`, line by line. A step begins one position before a row's last token, for the
    draft to catch up from."""
    contents = group.contents
    return [
        list(group.draft_lens),
        [len(content) - 2 for content in contents],
        [content[-2] if len(content) > 1 else 0 for content in contents],
        [content[-1] for content in contents],
        *[[0] * len(contents)] * k,
    ]


def read_back(group: Group, joined: torch.Tensor) -> Outcome:
    """What the rows commit by a joined verdict, which may have more rows than the group at its end;
    raises NotFinite."""
    seen, *lines = joined.tolist()
    k = len(lines) // 2
    return _outcome(group, seen, lines[:k], list(zip(*lines[k:], strict=True)))


def _outcome(
    group: Group,
    seen: Sequence[int],
    drafted: Sequence[Sequence[int]],
    chosen: Sequence[Sequence[int]],
) -> Outcome:
    """What the rows commit, within each row's own draft length."""
    committed, accepted, checked = [], [], []
    for row, draft_len in enumerate(group.draft_lens):
        tokens = chosen[row]
        limit = min(draft_len, seen[row])
        right = 0
        while right < limit and drafted[right][row] == tokens[right]:
            right += 1
        mine = list(tokens[: right + 1])
        if _NO_TOKEN in mine:
            raise NotFinite(
                f"row {row}: the logits after {len(group.contents[row])} tokens or a few more are"
                " not finite"
            )
        committed.append(mine)
        accepted.append(right)
        checked.append(limit)
    return Outcome(committed, accepted, checked)


def propose(
    target: PagedModel,
    draft: PagedModel | None,
    inputs: Inputs,
    shape: CacheShape,
    watch: Stopwatch,
) -> Proposal:
    """Draft k tokens per row."""
    k = inputs.k
    starts = inputs.state[1] if inputs.starts is None else inputs.starts
    layout = Layout(inputs.table, starts, k + 2, shape, inputs.span, inputs.parts)
    # After a step that accepted everything the draft lacks two positions, else one; feeding two
    # always keeps the shapes fixed and writes nothing new into the second. All windows are made
    # now, and not each before its pass: after a pass a processor would have to fetch the code anew.
    windows = layout.draft_windows(k, inputs.draft_parts)
    verified = layout.window(1, k + 2)
    tokens = inputs.state[2:]
    feeds = tokens[:, :, None].unbind(0)  # each [rows, 1]
    # Embeddings may be padded to different sizes; an id that only one model has is never proposed,
    # and the draft is fed its own last id in place of one that only the target has.
    shared = target.vocab if draft is None else min(target.vocab, draft.vocab)
    noise = None
    if inputs.sampling.any_sampled:
        # Logits at position p choose the token of position p + 1.
        noise = inputs.sampling.noise(layout.positions[:, 1:] + 1, target.vocab)
    belief = []
    drafting = watch.section("draft")
    for j, window in enumerate(windows):
        assert draft is not None, "drafting needs a draft"
        fed = feeds[j + 1] if j else tokens[:2].t()
        if draft.vocab > shared or target.vocab > shared:
            fed = fed.clamp(max=shared - 1)
        with drafting:
            logits = draft.forward(fed, window, logits_to_keep=1)
        if logits.shape[-1] > shared:
            logits = logits[..., :shared]
        here = None if noise is None else noise[:, j : j + 1]
        if inputs.verify_tokens is None:
            choose(logits, inputs.sampling, here, out=feeds[j + 2])
        else:
            token, rated = choose_and_rate(logits, inputs.sampling, here)
            feeds[j + 2].copy_(token)
            belief.append(rated)
    return Proposal(verified, noise, tokens[1:], torch.cat(belief, 1).cumsum(1) if belief else None)


def check(target: PagedModel, inputs: Inputs, proposal: Proposal, watch: Stopwatch) -> Verdict:
    """Have the target choose after each token that it is to see."""
    k, window, noise = inputs.k, proposal.window, proposal.noise
    tokens = proposal.tokens.t()
    rows = tokens.shape[0]
    if proposal.belief is None:
        with watch.section("verify"):
            logits = target.forward(tokens, window)
        chosen = _of_numbers(choose(logits, inputs.sampling, noise), logits, inputs.sampling)
        return Verdict(inputs.state[0], proposal.tokens[1:], chosen)
    assert inputs.verify_tokens is not None
    trim = trimmed(proposal.belief, inputs.state[0, :, None], inputs.verify_tokens)
    with watch.section("verify"):
        packed = tokens.reshape(-1).index_select(0, trim.cells)[None]
        logits = target.forward(packed, window.packed(trim.cells))
    if noise is not None:
        noise = noise.flatten(0, 1)[trim.cells][:, None]
    logits = logits.transpose(0, 1)
    sampling = inputs.sampling.take(trim.of_row)
    picked = _of_numbers(choose(logits, sampling, noise), logits, sampling)[:, 0]
    chosen = tokens.new_full((rows * (k + 1),), _NO_TOKEN).index_copy_(0, trim.cells, picked)
    return Verdict(trim.seen[:, 0], proposal.tokens[1:], chosen.view(rows, k + 1))


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
