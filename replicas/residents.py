"""The sequences on a replica and their KV blocks: what is computed and what others share.

Knows no model: the drafter is told of a row's life, and computes nothing here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch

from replicas.decoding import RowState, token_logprobs
from replicas.drafters import Drafter, DraftRequest, DraftsAhead
from replicas.grammars import Grammars
from replicas.kv_cache import BlockAllocator, Chain, TokenRange, first_table
from replicas.sampling import SamplingBatch
from scheduler.decoding import Decoding, TokenLogprobs
from scheduler.messages import PrefillRow, RowFailure, RowResult, Sampling, StepRow


@dataclass
class Resident:
    """A sequence whose KV cache is here. Target KV is valid for len(content) - 1 positions, but for
    `to_prefill` while it is being prefilled."""

    content: list[int]
    tokens_left: int
    sampling: Sampling
    stop_token_ids: frozenset[int]
    chain: Chain
    """Keys of its blocks."""
    decoding: Decoding | None = None
    state: RowState | None = None
    """What `decoding` makes of the content; None: not made yet."""
    to_prefill: int = 0
    """KV positions that prefill batches are still to fill; 0 before any step."""

    @property
    def settled(self) -> int:
        """Positions before all that a step may write: a drafter may begin one before the last
        token."""
        return max(len(self.content) - 2, 0)

    @property
    def tells_of_prompt(self) -> bool:
        """Whether the request wants to be told of its prompt."""
        return self.decoding is not None and self.decoding.prompt_logprobs is not None

    def prompt_logprobs(
        self,
        logits: torch.Tensor,  # [positions, vocab]
        begin: int,
    ) -> tuple[TokenLogprobs, ...]:
        """What the request is told of its prompt, of the tokens after the positions from `begin`
        on; nothing if it wants nothing."""
        if self.decoding is None or self.decoding.prompt_logprobs is None:
            return ()
        end = min(begin + len(logits) + 1, self.decoding.prompt_tokens)
        tokens = self.content[begin + 1 : end]
        return token_logprobs(logits[: len(tokens)], tokens, self.decoding.prompt_logprobs)

    def row_state(self, grammars: Grammars | None, drafts: bool) -> RowState | None:
        """None where the request asks for nothing. `drafts`: there is a drafter."""
        if self.decoding is not None and self.state is None:
            ends = self.stop_token_ids
            self.state = RowState(self.decoding, self.content, ends, grammars, drafts)
        return self.state

    def roll_back(self, length: int, tokens_left: int) -> None:
        """Make it what it was when its content had this length."""
        del self.content[length:]
        self.tokens_left = tokens_left
        self.state = None

    def commit(self, tokens: list[int]) -> None:
        self.content.extend(tokens)
        self.tokens_left -= len(tokens)

    def finished(self, committed: list[int]) -> bool:
        """Whether it has ended with these tokens, the last that it committed."""
        return self.tokens_left == 0 or not self.stop_token_ids.isdisjoint(committed)


class Tally:
    """What became of a row's draft tokens over the steps of a batch; see `RowResult`."""

    def __init__(self, draft_len: int) -> None:
        self.steps = self.asked_tokens = self.draft_tokens = 0
        self.accepted: list[int] = []
        self.accepted_at, self.tried_at = [0] * draft_len, [0] * draft_len

    def note(self, asked: int, drafted: int, accepted: int) -> None:
        """Of a step: draft tokens asked for, drafted and right."""
        self.steps += 1
        self.asked_tokens += asked
        self.draft_tokens += drafted
        self.accepted.append(accepted)
        for at in range(accepted):
            self.accepted_at[at] += 1
        for at in range(min(accepted + 1, asked)):
            self.tried_at[at] += 1

    def result(
        self,
        sequence_id: str,
        tokens: Sequence[int],
        extras: Sequence[TokenLogprobs],
        failure: RowFailure | None,
    ) -> RowResult:
        """Of the row, which has committed these tokens."""
        return RowResult(
            sequence_id,
            tuple(tokens),
            steps=self.steps,
            draft_tokens=self.draft_tokens,
            accepted_at=tuple(self.accepted_at),
            tried_at=tuple(self.tried_at),
            asked_tokens=self.asked_tokens,
            extras=tuple(extras),
            failure=failure,
            accepted=tuple(self.accepted),
        )


class Residents(dict[str, Resident]):
    """Residents by their sequence's id, and the blocks of all."""

    def __init__(
        self,
        blocks: BlockAllocator,
        drafter: Drafter | None,
        identity: Sequence[object],
        sharing: bool,
    ) -> None:
        """`identity`: of what computes KV; `sharing`: rows of equal beginnings share blocks."""
        super().__init__()
        self._blocks = blocks
        self._drafter = drafter
        self._identity = identity
        self._sharing = sharing
        self._ahead = 0 if drafter is None or not drafter.aux_layers else 1
        """Tokens behind a block that what is cached of it depends on."""

    def leave(self, sequence_ids: Iterable[str]) -> None:
        """Forget these and free their blocks; unknown ids are ignored."""
        for sequence_id in sequence_ids:
            if sequence_id in self:
                self.publish(sequence_id)
                del self[sequence_id]
                if self._drafter is not None:
                    self._drafter.end(sequence_id)
            self._blocks.release(sequence_id)

    def check_integrity(self) -> None:
        """Blocks are whole, and what is still to fill lies within a resident's content."""
        self._blocks.check_integrity()
        for resident in self.values():
            assert resident.tokens_left >= 0
            assert 0 <= resident.to_prefill < len(resident.content)

    def waves(self, rows: Sequence[PrefillRow], least_tokens: int) -> list[list[PrefillRow]]:
        """The rows in the order in which they are filled, those of one wave together: a row that
        shares the prefix of another one of the batch comes second, and finds it, if that spares
        more than `least_tokens`."""
        if not self._sharing or len(rows) == 1:
            return [list(rows)]
        size = self._blocks.block_size
        first, second, spared = list[PrefillRow](), list[PrefillRow](), 0
        coming: set[bytes] = set()
        """Keys of the blocks that the first rows fill."""
        for row in rows:
            blocks = max(len(row.tokens) - 2, 0) // size
            filled = blocks if row.until is None else min(row.until // size, blocks)
            keys = self._chain(row).keys(row.tokens, filled)
            missing = keys[self._blocks.found(keys) :]
            shared = sum(1 for _ in takewhile(coming.__contains__, missing))
            spared += shared
            (second if shared else first).append(row)
            if not shared:
                coming.update(keys)
        return [first, second] if spared > least_tokens // size else [list(rows)]

    def range_of(self, row: PrefillRow) -> TokenRange:
        """The KV positions [begin, end) that this batch fills of a row, which is resident now."""
        resident = self.get(row.sequence_id)
        assert bool(row.tokens) == (resident is None), (
            f"{row.sequence_id}: resident already, or not"
        )
        resident = resident or self._admit(row)
        most = len(resident.content) - 1
        begin = most - resident.to_prefill
        end = most if row.until is None else row.until
        assert row.tokens or row.begin == begin, (
            f"{row.sequence_id}: the pool fills from {row.begin},"
            f" {begin} of {most} positions are filled"
        )
        assert end <= most, f"{row.sequence_id}: {end} positions of {most}"
        return begin, max(begin, end)

    def _admit(self, row: PrefillRow) -> Resident:
        """A new resident, with the KV of its prefix if blocks of it are here."""
        chain = self._chain(row)
        resident = Resident(
            content=list(row.tokens),
            tokens_left=row.tokens_left,
            sampling=row.sampling,
            stop_token_ids=frozenset(row.stop_token_ids),
            chain=chain,
            decoding=row.decoding,
        )
        found = 0
        # What is told of the prompt is computed with it.
        if self._sharing and not resident.tells_of_prompt:
            keys = chain.keys(row.tokens, resident.settled // self._blocks.block_size)
            found = self._blocks.adopt(row.sequence_id, keys) * self._blocks.block_size
        resident.to_prefill = len(row.tokens) - 1 - found
        if self._drafter is not None:
            self._drafter.begin(row.sequence_id, row.tokens, row.salt, found)
        self.own(row.sequence_id, row.blocks, len(row.tokens))
        self[row.sequence_id] = resident
        return resident

    def _chain(self, row: PrefillRow) -> Chain:
        return Chain(self._identity, row.salt, self._blocks.block_size, self._ahead)

    def publish(self, sequence_id: str) -> None:
        """Let others find the full blocks that are valid and that this row writes no more."""
        if not self._sharing:
            return
        resident = self[sequence_id]
        valid = min(resident.settled, len(resident.content) - 1 - resident.to_prefill)
        drafted = None if self._drafter is None else self._drafter.valid(sequence_id)
        if drafted is not None:
            valid = min(valid, drafted)
        blocks = valid // self._blocks.block_size
        self._blocks.publish(sequence_id, resident.chain.keys(resident.content, blocks))

    def draft_ahead(self, rows: Sequence[StepRow], drafter: DraftsAhead, vocab: int) -> None:
        """Ask the drafter for what the first step of these rows will ask it for, unless their
        blocks do not last for it: those are taken in the order of the batches. No batch that is
        begun holds the rows. `vocab`: of the target."""
        device = drafter.device
        found = [self.get(row.sequence_id) for row in rows]
        residents = [resident for resident in found if resident is not None]
        lengths = [len(resident.content) for resident in residents]
        if lengths != [row.length for row in rows] or any(each.to_prefill for each in residents):
            return
        caps = [
            min(row.draft_len, resident.tokens_left - 1)
            for row, resident in zip(rows, residents, strict=True)
        ]
        ids = [row.sequence_id for row in rows]
        ends = zip(ids, lengths, caps, strict=True)
        if max(caps) <= 0 or any(self._blocks.room(id) < length + cap for id, length, cap in ends):
            return
        sampling = SamplingBatch.of([resident.sampling for resident in residents], device)
        starts = torch.tensor(lengths, device=device)[:, None] - 1
        noise = sampling.noise_after(starts + torch.arange(1 + max(caps), device=device))
        contents = [resident.content for resident in residents]
        table = first_table(self._blocks.table(ids, device))
        drafter.draft_ahead(DraftRequest(ids, contents, caps, sampling, table, noise, vocab))

    def settle(self, sequence_id: str) -> None:
        """Commits are final: give up what no later pass reads."""
        resident = self[sequence_id]
        filled = len(resident.content) - 1 - resident.to_prefill
        self._blocks.slide(sequence_id, min(resident.settled, filled))

    def own(self, sequence_id: str, blocks: int, positions: int) -> None:
        """Give the sequence its blocks; the pool has set them aside and says how many."""
        room = blocks * self._blocks.block_size
        assert room >= positions, f"{sequence_id}: {positions} positions, room for {room}"
        self._blocks.grow(sequence_id, room)
