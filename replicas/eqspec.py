"""One EQSPEC step: the draft proposes, the target checks all rows at once, each row commits.

The method is that of "Batch Speculative Decoding Done Right" (arXiv 2510.22876). The ragged-tensor
problem it solves by unpadding and re-padding is index arithmetic here: rows keep their own lengths
in a paged cache, and a rejected token is overwritten by the next step.

Invariant before and after a step: a row of content length n has valid target KV for n - 1
positions; its last token has none yet. Its draft KV is valid for at least n - 2 positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from replicas.model import PagedModel
from replicas.paged_cache import CacheShape, Layout
from replicas.sampling import SamplingBatch, choose
from replicas.stopwatch import Stopwatch


@dataclass(frozen=True)
class Group:
    """The rows of one step."""

    contents: Sequence[Sequence[int]]
    """All content tokens per row; at least one. Read, never changed."""
    draft_lens: Sequence[int]
    """Draft tokens per row, each at most k."""
    sampling: SamplingBatch
    table: torch.Tensor  # [rows, blocks], int64


def step(
    target: PagedModel,
    draft: PagedModel | None,
    group: Group,
    shape: CacheShape,
    watch: Stopwatch,
) -> tuple[list[list[int]], list[int]]:
    """Run one step; returns the committed tokens and the number of accepted ones, per row.

    A row commits its accepted tokens plus one token of the target's own: 1 .. draft_len + 1.
    """
    k = max(group.draft_lens)
    # Embeddings may be padded to different sizes; an id that only one model has is never proposed,
    # and the draft is fed its own last id in place of one that only the target has.
    shared = target.vocab if draft is None else min(target.vocab, draft.vocab)
    device = group.table.device
    # The layout begins one position before the last token, for the draft to catch up from.
    starts = [len(content) - 2 for content in group.contents]
    layout = Layout(group.table, starts, k + 2, shape)
    tails = [(content[-2] if len(content) > 1 else 0, content[-1]) for content in group.contents]
    tail = torch.tensor(tails, dtype=torch.int64, device=device)  # [rows, 2]
    # Logits at position p choose the token of position p + 1.
    noise = group.sampling.noise(layout.positions[:, 1:] + 1, target.vocab)
    proposed = tail[:, 1:]  # [rows, 1 + drafted so far], from the last committed token on
    for j in range(k):
        assert draft is not None, "drafting needs a draft"
        # After a step that accepted everything the draft lacks two positions, else one; feeding
        # two always keeps the shapes fixed and writes nothing new into the second.
        window = layout.window(0, 2) if j == 0 else layout.window(j + 1, j + 2)
        fed = tail if j == 0 else proposed[:, -1:]
        with watch.section("draft"):
            logits = draft.forward(fed.clamp(max=shared - 1), window, logits_to_keep=1)
        token = choose(
            logits[..., :shared], group.sampling, None if noise is None else noise[:, j : j + 1]
        )
        proposed = torch.cat((proposed, token), dim=1)
    with watch.section("verify"):
        logits = target.forward(proposed, layout.window(1, k + 2))
    chosen = choose(logits, group.sampling, noise)  # [rows, k + 1]
    right = (proposed[:, 1:] == chosen[:, :k]).cumprod(dim=1).sum(dim=1, keepdim=True)
    # One transfer, the step's only synchronisation.
    table = torch.cat((right, chosen), dim=1).tolist()
    accepted = [min(row[0], limit) for row, limit in zip(table, group.draft_lens, strict=True)]
    committed = [row[1 : a + 2] for row, a in zip(table, accepted, strict=True)]
    return committed, accepted
