"""One drafter for all ranks of a replica: rank 0 proposes, the others get its tokens.

The other ranks hold no drafter. What else the drafter decides there, because it decides which
blocks are shared, comes with rank 0's messages: its name, its layers, how far its caches reach.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from replicas.drafters import Drafter, DraftRequest, Observation, Proposal
from replicas.stopwatch import Stopwatch


class LeadingDrafter:
    """Rank 0's drafter; sends the other ranks what it proposes."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.name, self.aux_layers = drafter.name, drafter.aux_layers
        self.begin, self.end = drafter.begin, drafter.end
        self.observe, self.rollback = drafter.observe, drafter.rollback
        self.valid = drafter.valid

    def propose(self, request: DraftRequest, watch: Stopwatch) -> Proposal:
        proposal = self._drafter.propose(request, watch)
        k = max(proposal.lens)
        lens = torch.tensor(proposal.lens, device=proposal.tokens.device)[None]
        drafts = torch.cat((lens, proposal.tokens[:k]))
        drafts = pad(drafts, (0, 0, 0, request.k - k))  # [1 + request.k, rows], int64
        dist.broadcast(drafts, src=0)
        return Proposal(drafts[1 : 1 + k], proposal.lens)


class FollowingDrafter:
    """Another rank's: has no drafts of its own."""

    def __init__(self, name: str, aux_layers: tuple[int, ...]) -> None:
        """Those of rank 0's."""
        self.name, self.aux_layers = name, aux_layers
        self.reach: dict[str, int | None] = {}
        """What rank 0's drafter says of the rows that are released now; empty at any other time:
        in a prefill it has seen all that the target has computed."""

    def begin(self, row: str, tokens: Sequence[int], salt: str, prefilled: int) -> None: ...

    def end(self, row: str) -> None: ...

    def observe(self, observed: Observation) -> None: ...

    def rollback(self, rows: Sequence[str], lengths: Sequence[int]) -> None: ...

    def valid(self, row: str) -> int | None:
        return self.reach.get(row)

    def propose(self, request: DraftRequest, watch: Stopwatch) -> Proposal:
        rows, device = len(request.ids), request.table.device
        drafts = torch.empty((1 + request.k, rows), dtype=torch.int64, device=device)
        dist.broadcast(drafts, src=0)
        lens = drafts[0].tolist()
        return Proposal(drafts[1 : 1 + max(lens)], lens)
