"""A replica without Ray: `Replica.step(batch) -> StepResult` over one target/draft pair.

Holds the residents: their tokens, how far each model's KV cache reaches, their blocks. Decides
nothing: which rows run, when and how far ahead is the pool's business.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter

import torch

from replicas.attention import FLEX, GATHER, Place, choose_attention
from replicas.calibration import calibrate
from replicas.config import ReplicaConfig
from replicas.eqspec import Group, step
from replicas.graphs import Limits, StepRunner
from replicas.memory import MemoryPlan, check_memory, pair_shape, plan_memory
from replicas.model import PagedModel
from replicas.paged_cache import BlockAllocator, PagedCache
from replicas.pair import Pair, PairRefused, load_pair, read_pair, resolve_device
from replicas.parts import coarser, part_rows, positions_in_place, positions_read
from replicas.prefill import PASS_COST_TOKENS, prefill
from replicas.prefix import Chain, SharedBlocks, root_key
from replicas.resident import Resident, Tally, commit
from replicas.sampling import sampling_batch
from replicas.stopwatch import Stopwatch
from replicas.windows import CacheShape
from scheduler.config import DRAFT_LEN_MAX
from scheduler.messages import (
    Batch,
    BatchKind,
    PrefillRow,
    ReplicaSpec,
    RowResult,
    StepResult,
    StepRow,
    StepTimes,
)


class Replica:
    """One incarnation's models, caches and residents. Not thread-safe: one thread calls it."""

    def __init__(self, pair: Pair, config: ReplicaConfig, plan: MemoryPlan | None = None) -> None:
        """Without a plan memory is divided by what is free now."""
        if config.torch_threads is not None:
            torch.set_num_threads(config.torch_threads)
        if pair.device.type == "cuda":
            # Recordings and timing events are made on the thread's current device.
            torch.cuda.set_device(pair.device)
        models = [pair.target] + ([pair.draft] if pair.draft is not None else [])
        plan = plan or plan_memory(config, pair_shape(pair), pair.device, loaded=True)
        blocks = plan.kv_blocks
        paged = [
            PagedModel(
                model,
                PagedCache(
                    shape.layers,
                    shape.kv_heads,
                    shape.head_dim,
                    blocks,
                    config.block_size,
                    pair.dtype,
                    pair.device,
                ),
            )
            for model, shape in zip(models, plan.pair.models, strict=True)
        ]
        self._models = paged
        self._target = paged[0]
        self._draft = paged[1] if pair.draft is not None else None
        self._device = pair.device
        self._shape = CacheShape(config.block_size, pair.context_len, pair.dtype)
        self._chunk = config.prefill_chunk_tokens
        self._work = plan.work
        self._shared = SharedBlocks(blocks, config.block_size) if config.prefix_sharing else None
        self._blocks = self._shared or BlockAllocator(blocks, config.block_size)
        self._identity = (pair.target_name, pair.draft_name, config.dtype, config.block_size)
        self._residents: dict[str, Resident] = {}
        for model, name in zip(paged, (pair.target_name, pair.draft_name), strict=False):
            self._try_out(model, name, config.fuse_layers, plan.packed)
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            # Weights that were joined leave holes too small for what comes.
            torch.cuda.empty_cache()
        draft_len_max = plan.draft_len_max(DRAFT_LEN_MAX)
        fixed_shapes = config.graphs == "on" or (config.graphs == "auto" and on_gpu)
        sizes = (plan.work.rows, plan.work.draft_len, plan.work.pass_tokens)
        place = Place(blocks, self._shape, *sizes, fixed_shapes)
        self.attention = choose_attention(paged, config, place)
        """Of target and draft: `gather`, `flex` or `varlen`."""
        self.broken: Exception | None = None
        """One device breaks with its process."""
        self._runner: StepRunner | None = None
        if fixed_shapes:
            limits = Limits(plan.work.rows, plan.work.draft_len, plan.work.context_len)
            self._runner = StepRunner(
                self._target,
                self._draft,
                self._shape,
                limits,
                plan.work.recordings or config.graphs_max,
                plan.buffers.pool,
            )
        in_place = self.attention["target"] != GATHER
        # FlexAttention reads whole blocks, varlen attention as many positions as it is told.
        whole_blocks = self.attention["target"] == FLEX
        self._read_unit = (config.block_size if whole_blocks else 1) if in_place else None
        self._part_positions: tuple[int | None, int | None] = (None, None)
        if self._runner is None:
            # Steps of fixed shapes read all rows as one.
            draft_positions = self._draft.part_positions if self._draft else None
            self._part_positions = (self._target.part_positions, draft_positions)
        self.spec = ReplicaSpec(
            kv_blocks=blocks,
            block_size=config.block_size,
            context_len=pair.context_len,
            vocab_size=pair.vocab_size,
            embedding_size=self._target.vocab,
            draft_len_max=draft_len_max,
            rows_max=plan.rows_max,
            prefix_sharing=config.prefix_sharing,
            trims_drafts=self._target.packs,
            reads_apart=in_place or self._part_positions[0] is not None,
            target=pair.target_name,
            draft=pair.draft_name,
            device=str(pair.device),
            dtype=config.dtype,
            attention=self.attention["target"],
        )

    @classmethod
    def load(cls, config: ReplicaConfig) -> Replica:
        """Load the pair that `config` names and try some batches out; raises what `load_pair` and
        `plan_memory` raise, and PairRefused for a model whose attention is not the plain one."""
        assert config.tensor_parallel == 1, "several devices: replicas.parallel.load_replica"
        files = read_pair(config)
        check_memory(config, files, resolve_device(config.device))
        replica = cls(load_pair(config, files), config)
        if config.calibrate:
            timings = calibrate(replica, *replica.planned)
            replica.spec = dataclasses.replace(replica.spec, timings=timings)
        return replica

    def _try_out(self, model: PagedModel, name: str, fuse: bool, pack: bool) -> None:
        """One forward pass: what cannot be served is refused now."""
        try:
            model.try_out(self._shape, fuse, pack)
        except Exception as error:
            raise PairRefused(f"{name}: a trial forward pass failed: {error}") from error

    @torch.inference_mode()
    def step(self, batch: Batch, interrupted: Callable[[], bool] = lambda: False) -> StepResult:
        """Run one batch. If it raises, the residents are as they were before it, but that the rows
        of a prefill are resident no more.

        `interrupted` is asked after each step; a batch ends early once it says so.
        """
        if batch.kind is BatchKind.PREFILL:
            return self._prefill(batch)
        return self._speculate(batch, interrupted)

    def release(self, sequence_ids: Iterable[str]) -> None:
        """Forget the residents and free their blocks; unknown ids are ignored."""
        for sequence_id in sequence_ids:
            if sequence_id in self._residents:
                self._publish(sequence_id)
                del self._residents[sequence_id]
            self._blocks.release(sequence_id)

    @property
    def planned(self) -> tuple[int, int]:
        """Rows and draft tokens of the batches that its memory is planned for."""
        return self._work.rows, self._work.draft_len

    @property
    def residents(self) -> tuple[str, ...]:
        return tuple(self._residents)

    @property
    def free_blocks(self) -> int:
        return self._blocks.free_blocks

    def check_integrity(self) -> None:
        """Blocks are whole, and every resident's draft KV lies within its content."""
        self._blocks.check_integrity()
        for resident in self._residents.values():
            assert 0 <= resident.draft_kv <= len(resident.content) - 1
            assert resident.tokens_left >= 0
            assert 0 <= resident.to_fill < len(resident.content)

    # ------------------------------------------------------------------ prefill

    def _prefill(self, batch: Batch) -> StepResult:
        start = perf_counter()
        watch = Stopwatch(self._device)
        begins: dict[str, int] = {}
        try:
            for rows in self._waves(batch.prefill):
                ids = [row.sequence_id for row in rows]
                spans = [self._span(row) for row in rows]
                with watch.section("prefill"):
                    self._fill(self._models, ids, spans)
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
                for sequence_id, (begin, end) in zip(ids, spans, strict=True):
                    begins[sequence_id] = begin
                    resident = self._residents[sequence_id]
                    resident.to_fill = len(resident.content) - 1 - end
                    if self._draft is not None:
                        resident.draft_kv = max(resident.draft_kv, end)
                    self._publish(sequence_id)
        except BaseException:
            self.release(row.sequence_id for row in batch.prefill)
            raise
        return StepResult(
            batch_id=batch.id,
            replica_id=batch.replica_id,
            rows=tuple(
                RowResult(row.sequence_id, reused=begins[row.sequence_id] if row.tokens else 0)
                for row in batch.prefill
            ),
            times=StepTimes(prefill_s=watch.seconds("prefill"), total_s=perf_counter() - start),
        )

    def _waves(self, rows: Sequence[PrefillRow]) -> list[list[PrefillRow]]:
        """The rows in the order in which they are filled, those of one wave together: who shares
        the prefix of another row of the batch comes second, and finds it."""
        if self._shared is None or len(rows) == 1:
            return [list(rows)]
        block_size = self._shape.block_size
        keys, fills = [], []
        for row in rows:
            chain = Chain(root_key(self._identity, row.salt), block_size)
            blocks = max(len(row.tokens) - 2, 0) // block_size
            keys.append(chain.keys(row.tokens, blocks))
            fills.append(blocks if row.until is None else min(row.until // block_size, blocks))
        least = PASS_COST_TOKENS.get(self._device.type, PASS_COST_TOKENS["cuda"]) // block_size
        second = self._shared.followers(keys, fills, least)
        first = [row for index, row in enumerate(rows) if index not in second]
        return [first, [rows[index] for index in second]] if second else [first]

    def _span(self, row: PrefillRow) -> tuple[int, int]:
        """The KV positions [begin, end) that this batch fills of a row, which is resident now."""
        resident = self._residents.get(row.sequence_id)
        assert bool(row.tokens) == (resident is None), (
            f"{row.sequence_id}: resident already, or not"
        )
        resident = resident or self._admit(row)
        most = len(resident.content) - 1
        begin = most - resident.to_fill
        end = most if row.until is None else row.until
        assert row.tokens or row.begin == begin, (
            f"{row.sequence_id}: the pool fills from {row.begin},"
            f" {begin} of {most} positions are filled"
        )
        assert end <= most, f"{row.sequence_id}: {end} positions of {most}"
        return begin, max(begin, end)

    def _admit(self, row: PrefillRow) -> Resident:
        """A new resident, with the KV of its prefix if blocks of it are here."""
        block_size = self._shape.block_size
        chain = Chain(root_key(self._identity, row.salt), block_size)
        resident = Resident(
            content=list(row.tokens),
            tokens_left=row.tokens_left,
            sampling=row.sampling,
            stop_token_ids=frozenset(row.stop_token_ids),
            chain=chain,
        )
        found = 0
        if self._shared is not None:
            keys = chain.keys(row.tokens, resident.settled // block_size)
            found = self._shared.adopt(row.sequence_id, keys) * block_size
        resident.to_fill = len(row.tokens) - 1 - found
        if self._draft is not None:
            resident.draft_kv = found
        self._own(row.sequence_id, row.blocks, len(row.tokens))
        self._residents[row.sequence_id] = resident
        return resident

    def _publish(self, sequence_id: str) -> None:
        """Let others find the full blocks that are valid and that this row writes no more."""
        if self._shared is None:
            return
        resident = self._residents[sequence_id]
        valid = min(resident.settled, len(resident.content) - 1 - resident.to_fill)
        if self._draft is not None:
            valid = min(valid, resident.draft_kv)
        blocks = valid // self._shape.block_size
        self._shared.publish(sequence_id, resident.chain.keys(resident.content, blocks))

    def _own(self, sequence_id: str, blocks: int, positions: int) -> None:
        """Give the sequence its blocks; the pool has set them aside and says how many."""
        room = blocks * self._shape.block_size
        assert room >= positions, f"{sequence_id}: {positions} positions, room for {room}"
        self._blocks.grow(sequence_id, room)

    def _frozen(self, sequence_id: str) -> int:
        return 0 if self._shared is None else self._shared.frozen(sequence_id)

    def _fill(
        self, models: Sequence[PagedModel], ids: list[str], spans: list[tuple[int, int]]
    ) -> None:
        """In passes of as many rows and tokens as memory was planned for."""
        for sequence_id, (begin, _) in zip(ids, spans, strict=True):
            assert begin >= self._frozen(sequence_id), f"{sequence_id}: would write shared blocks"
        for begin in range(0, len(ids), self._work.rows_most):
            some = ids[begin : begin + self._work.rows_most]
            prefill(
                models,
                contents=[self._residents[sequence_id].content for sequence_id in some],
                spans=spans[begin : begin + len(some)],
                table=self._blocks.table(some, self._device),
                shape=self._shape,
                chunk=max(1, min(self._chunk, self._work.pass_tokens // len(some))),
            )

    # ------------------------------------------------------------------ speculate

    def _speculate(self, batch: Batch, interrupted: Callable[[], bool]) -> StepResult:
        start = perf_counter()
        watch = Stopwatch(self._device)
        ids = [row.sequence_id for row in batch.rows]
        rows = [self._ready(row, batch.steps) for row in batch.rows]
        before = [(resident.tokens_left, resident.draft_kv) for resident in rows]
        tallies = [Tally() for _ in rows]
        table = self._blocks.table(ids, self._device)
        # A target that cannot leave tokens out checks all of them: slower, and as right.
        verify = batch.verify_tokens if self._target.packs else None
        sampling = sampling_batch(
            tuple(resident.sampling for resident in rows),
            self._device,
            whole=verify is not None or self._runner is not None,
            static=self._runner is not None,
        )
        part_positions, draft_part_positions = self._part_positions
        own = read = done = 0
        try:
            for done in range(1, batch.steps + 1):  # noqa: B007, the count outlives the loop
                caps = [
                    min(row.draft_len, resident.tokens_left - 1) if verify != 0 else 0
                    for row, resident in zip(batch.rows, rows, strict=True)
                ]
                k = max(caps)
                if k > 0:
                    self._catch_up(ids, rows, watch)
                lengths = [len(resident.content) for resident in rows]
                parts = part_rows(lengths, part_positions)
                own += sum(lengths) + len(rows) * k
                draft_parts = coarser(lengths, parts, draft_part_positions)
                contents = [resident.content for resident in rows]
                group = Group(contents, caps, sampling, table, verify, parts, draft_parts)
                if self._runner is None:
                    outcome = step(self._target, self._draft, group, self._shape, watch)
                else:
                    outcome = self._runner.step(group, watch)
                read += self._positions_read(lengths, k, parts)
                ended = False
                for index, (resident, tally) in enumerate(zip(rows, tallies, strict=True)):
                    tally.draft_tokens += caps[index]
                    commit(resident, tally, outcome, index, k)
                    ended |= resident.finished(outcome.committed[index])
                if ended or interrupted():
                    break
        except BaseException:
            for row, resident, (tokens_left, draft_kv) in zip(
                batch.rows, rows, before, strict=True
            ):
                del resident.content[row.length :]
                resident.tokens_left = tokens_left
                resident.draft_kv = min(draft_kv, row.length - 1)
            raise
        return StepResult(
            batch_id=batch.id,
            replica_id=batch.replica_id,
            rows=tuple(
                RowResult(
                    sequence_id=row.sequence_id,
                    tokens=tuple(resident.content[row.length :]),
                    steps=done,
                    draft_tokens=tally.draft_tokens,
                    accepted_at=tally.accepted_at(batch.draft_len),
                    tried_at=tally.tried_at(batch.draft_len),
                )
                for row, resident, tally in zip(batch.rows, rows, tallies, strict=True)
            ),
            steps=done,
            times=StepTimes(
                draft_s=watch.seconds("draft"),
                verify_s=watch.seconds("verify"),
                prefill_s=watch.seconds("catch_up"),
                total_s=perf_counter() - start,
            ),
            kv_positions_own=own,
            kv_positions_read=read,
        )

    def _positions_read(self, lengths: Sequence[int], k: int, parts: Sequence[int]) -> int:
        """KV positions that the target has read in a step that drafted up to k tokens per row."""
        unit = self._read_unit
        if self._runner is not None:
            return self._runner.positions_read(lengths, unit)
        if unit is None:
            return positions_read(lengths, parts) + len(lengths) * k
        return positions_in_place((length + k for length in lengths), unit)

    def _ready(self, row: StepRow, steps: int) -> Resident:
        """The row's resident, as the pool says it is, with the blocks that so many steps need."""
        resident = self._residents[row.sequence_id]
        assert len(resident.content) == row.length, (
            f"{row.sequence_id}: the pool says {row.length} tokens,"
            f" {len(resident.content)} are here"
        )
        assert resident.to_fill == 0, f"{row.sequence_id} is filled in part only"
        assert self._frozen(row.sequence_id) <= resident.settled, "it would write shared blocks"
        assert resident.tokens_left > 0, f"{row.sequence_id} has reached its limit"
        assert row.draft_len == 0 or self._draft is not None, "drafting needs a draft"
        # The last token committed has no KV entry yet.
        most = min(steps * (row.draft_len + 1), resident.tokens_left)
        self._own(row.sequence_id, row.blocks, row.length + most - 1)
        return resident

    def _catch_up(self, ids: list[str], rows: list[Resident], watch: Stopwatch) -> None:
        """Fill the draft's KV of rows that steps without drafting left behind."""
        assert self._draft is not None
        behind = [
            (sequence_id, resident)
            for sequence_id, resident in zip(ids, rows, strict=True)
            if resident.draft_kv < len(resident.content) - 2
        ]
        if behind:
            spans = [(resident.draft_kv, len(resident.content) - 2) for _, resident in behind]
            with watch.section("catch_up"):
                self._fill([self._draft], [sequence_id for sequence_id, _ in behind], spans)
            for (_, resident), (_, end) in zip(behind, spans, strict=True):
                resident.draft_kv = end
