"""A replica without Ray: `Replica.step(batch) -> StepResult` over one target and its drafter.

Holds the residents: their tokens, how far the target's KV cache reaches, their blocks. Decides
nothing: which rows run, when and how far ahead is the pool's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from time import perf_counter

import torch

from replicas.calibration import calibrated, probe
from replicas.config import ReplicaConfig
from replicas.cuda import GraphedModel, buckets
from replicas.decoding import DecodingRows, RowState, load_grammars
from replicas.drafters import Drafter, DraftRequest, DraftsAhead, Observation
from replicas.eqspec import step
from replicas.fingerprint import fingerprint
from replicas.grammars import Grammars
from replicas.kv_cache import (
    BlockAllocator,
    OutOfBlocks,
    TokenRange,
    divided_into_passes,
    first_table,
)
from replicas.memory import MemoryPlan, check_memory
from replicas.models import NONE, ForwardOptions, Model, Output, build_model, fill, resolve_device
from replicas.pair import Pair, drafting, load_pair, read_pair
from replicas.residents import Resident, Residents, Tally
from replicas.sampling import SamplingBatch
from replicas.stopwatch import Stopwatch
from scheduler.decoding import TokenLogprobs
from scheduler.messages import (
    Batch,
    BatchKind,
    ReplicaSpec,
    RowFailure,
    RowResult,
    StepResult,
    StepRow,
    StepTimes,
)

PREFIX_GAIN_TOKENS = {"cpu": 48, "cuda": 2048}
"""Tokens of a prefill that a shared prefix must spare before it is worth a pass of its own."""
LOGITS_MOST = 256
"""Tokens of a pass whose logits are wanted: they take far more memory than all else of it."""


class Replica:
    """One incarnation's models, caches and residents. Not thread-safe: one thread calls it."""

    def __init__(
        self,
        pair: Pair,
        config: ReplicaConfig,
        plan: MemoryPlan | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        """Without a plan memory is divided by what is free now; a drafter takes the place of the
        one that `config` names."""
        if config.torch_threads is not None:
            torch.set_num_threads(config.torch_threads)
        if pair.device.type == "cuda":
            # Recordings and timing events are made on the thread's current device.
            torch.cuda.set_device(pair.device)
        plan = plan or pair.plan(config)
        self._device = pair.device
        self._patient = config.tensor_parallel > 1
        """Ranks must do the same: none leaves a row out of a step by its own clock."""
        self._work = plan.work
        self.blocks = BlockAllocator(plan.cache_blocks, config.block_size, plan.groups)
        """Who has which KV blocks, of the target and of a draft model."""
        name, sizes = pair.target_name, (plan.cache_blocks, pair.context_len, plan.prepack)
        target, built = build_model(pair.target, name, config, *sizes, groups=plan.groups)
        self.drafter = drafter = drafter or pair.drafter(config, plan)
        """None: it drafts nothing."""
        dtype = str(pair.dtype).removeprefix("torch.")
        identity = (name, drafter.name if drafter else "", dtype, config.block_size)
        self._residents = Residents(self.blocks, drafter, identity, config.prefix_sharing)
        self.target: Model = target
        if config.fixed_shapes(pair.device):
            most = plan.work.draft_len
            widths = [1 + k for k in (0, *buckets(most))] if most else [1]
            self.target = GraphedModel(target, plan.work.rows, widths, self.aux_layers)
        self.broken: Exception | None = None
        """One device breaks with its process."""
        self.grammars: Grammars | None = None
        """Of the target's tokens; None: no request may have a grammar."""
        self.spec = ReplicaSpec(
            kv_blocks=plan.kv_blocks,
            block_size=config.block_size,
            kv_groups=plan.kv_groups,
            context_len=pair.context_len,
            vocab_size=pair.vocab_size,
            embedding_size=self.target.vocab,
            **drafting(config, plan, drafter, pair.draft),
            rows_max=plan.rows_max,
            overlaps=isinstance(drafter, DraftsAhead),
            prefix_sharing=config.prefix_sharing,
            target=name,
            device=str(pair.device),
            dtype=dtype,
            arithmetic=built,
            fingerprint=fingerprint(target, config),
        )
        if pair.device.type == "cuda":
            torch.cuda.empty_cache()  # what loading took is there for others again

    @classmethod
    def load(cls, config: ReplicaConfig) -> Replica:
        """Load the pair that `config` names and try some batches out; raises what `load_pair` and
        `plan_memory` raise, and PairRefused for a model whose attention is not the plain one."""
        assert config.tensor_parallel == 1, "several devices: replicas.parallel.load_replica"
        pair = read_pair(config)
        check_memory(config, pair.shape, resolve_device(config.device))
        replica = cls(load_pair(config, pair), config)
        replica.grammars = load_grammars(config, replica.spec.embedding_size)
        if config.calibrate:
            replica.spec = calibrated(replica, *replica.planned, replica.aux_layers)
        return replica

    @torch.inference_mode()
    def step(self, batch: Batch, interrupted: Callable[[], bool] = lambda: False) -> StepResult:
        """Run one batch. If it raises, the residents are as they were before it, but that the rows
        of a prefill are resident no more.

        `interrupted` is asked after each step; a batch ends early once it says so.
        """
        if batch.kind is BatchKind.PREFILL:
            return self._prefill(batch)
        return self._speculate(batch, interrupted)

    def draft_ahead(self, batch: Batch) -> None:
        """If it can, draft for a batch while others run; any thread may call it, before `step`."""
        if isinstance(self.drafter, DraftsAhead) and batch.draft_len:
            self._residents.draft_ahead(batch.rows, self.drafter, self.target.vocab)

    def release(self, sequence_ids: Iterable[str]) -> None:
        """Forget the residents and free their blocks; unknown ids are ignored."""
        self._residents.leave(sequence_ids)

    def probe(self) -> None:
        """Try small batches, a prefill and a step; raises what they raise. Without a free block
        nothing is tried."""
        with suppress(OutOfBlocks):
            probe(self)

    @property
    def planned(self) -> tuple[int, int]:
        """Rows and draft tokens of the batches that its memory is planned for."""
        return self._work.rows, self._work.draft_len

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers of the target whose hidden states the drafter wants to see."""
        return () if self.drafter is None else self.drafter.aux_layers

    @property
    def residents(self) -> tuple[str, ...]:
        return tuple(self._residents)

    @property
    def free_blocks(self) -> int:
        return self.blocks.free_blocks

    def check_integrity(self) -> None:
        """Blocks are whole, and what is still to fill lies within a resident's content."""
        self._residents.check_integrity()

    @torch.inference_mode()
    def logits(self, content: Sequence[int]) -> torch.Tensor:  # [vocab]
        """The target's logits after this content, on blocks that are given back, to compare ways
        of computing. Raises OutOfBlocks."""
        name = "logits of a content"
        last = len(content) - 1
        self.blocks.grow(name, len(content))
        try:
            for one_pass in divided_into_passes([(0, last)], self._work.pass_tokens):
                _, (_, end) = one_pass[0]
                self._one_pass([name], [content], one_pass)
                self.blocks.slide(name, end)
            self.blocks.reach(name, len(content))
            table = self.blocks.table([name], self._device)
            layout = self.target.backend.step_layout(table, [last], 1).window(0, 1)
            tokens = torch.tensor(content[-1:], device=self._device)
            logits = self.target.forward(tokens, layout).logits
        finally:
            self.blocks.release(name)
        assert logits is not None
        return logits[0]

    # ------------------------------------------------------------------ prefill

    def _prefill(self, batch: Batch) -> StepResult:
        start = perf_counter()
        watch = Stopwatch(self._device)
        least = PREFIX_GAIN_TOKENS[self._device.type]
        begins: dict[str, int] = {}
        extras: dict[str, list[TokenLogprobs]] = {}
        try:
            for rows in self._residents.waves(batch.prefill, least):
                ids = [row.sequence_id for row in rows]
                ranges = [self._residents.range_of(row) for row in rows]
                for sequence_id in ids:
                    self._row_state(sequence_id)  # its grammar is compiled meanwhile
                with watch.section("prefill"):
                    self._fill_cache(ids, ranges, extras)
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
                begins |= {
                    sequence_id: begin for sequence_id, (begin, _) in zip(ids, ranges, strict=True)
                }
        except BaseException:
            self.release(row.sequence_id for row in batch.prefill)
            raise
        return StepResult(
            batch_id=batch.id,
            replica_id=batch.replica_id,
            rows=tuple(
                RowResult(
                    row.sequence_id,
                    reused=begins[row.sequence_id] if row.tokens else 0,
                    extras=tuple(extras.get(row.sequence_id, ())),
                )
                for row in batch.prefill
            ),
            times=StepTimes(prefill_s=watch.seconds("prefill"), total_s=perf_counter() - start),
        )

    def _fill_cache(
        self, ids: list[str], ranges: list[TokenRange], extras: dict[str, list[TokenLogprobs]]
    ) -> None:
        """Fill the target's cache, show the drafter what was computed, and add to `extras` what
        rows want to be told of their prompts."""
        for sequence_id, (begin, _) in zip(ids, ranges, strict=True):
            assert begin >= self.blocks.frozen(sequence_id), f"{sequence_id}: shared blocks"
        residents = [self._residents[sequence_id] for sequence_id in ids]
        contents = [resident.content for resident in residents]
        tells = any(resident.tells_of_prompt for resident in residents)
        most = min(self._work.pass_tokens, LOGITS_MOST) if tells else self._work.pass_tokens
        options = ForwardOptions(logits=tells, aux_layers=self.aux_layers)
        for one_pass in divided_into_passes(ranges, most):
            table, out = self._one_pass(ids, contents, one_pass, options)
            rows, parts = [row for row, _ in one_pass], [part for _, part in one_pass]
            if self.drafter is not None:
                some = [ids[row] for row in rows], [contents[row] for row in rows]
                seen = (*some, parts, first_table(table))
                hidden = out.aux_hidden_states
                self.drafter.observe(Observation(*seen, aux_hidden_states=hidden))
            first = 0
            for row, (begin, end) in one_pass:
                if tells:
                    assert out.logits is not None
                    logits = out.logits[first : first + end - begin]
                    logprobs = residents[row].prompt_logprobs(logits, begin)
                    extras.setdefault(ids[row], []).extend(logprobs)
                    first += end - begin
                residents[row].to_prefill = len(contents[row]) - 1 - end
                self._residents.publish(ids[row])
                self._residents.settle(ids[row])

    def _one_pass(
        self,
        ids: Sequence[str],
        contents: Sequence[Sequence[int]],
        one_pass: Sequence[tuple[int, TokenRange]],
        options: ForwardOptions = NONE,
    ) -> tuple[torch.Tensor, Output]:
        """Fill these ranges of the target's cache; the rows' block tables, and what was wanted."""
        for row, (_, end) in one_pass:
            self.blocks.reach(ids[row], end)
        table = self.blocks.table([ids[row] for row, _ in one_pass], self._device)
        return table, fill(self.target, contents, one_pass, table, options)

    # ------------------------------------------------------------------ speculate

    def _speculate(self, batch: Batch, interrupted: Callable[[], bool]) -> StepResult:
        start = perf_counter()
        watch = Stopwatch(self._device)
        ids = [row.sequence_id for row in batch.rows]
        most = self.blocks.steps_most(batch.steps, batch.draft_len)
        rows = [self._ready(row, most) for row in batch.rows]
        before = [resident.tokens_left for resident in rows]
        tallies = [Tally(batch.draft_len) for _ in rows]
        table = self.blocks.table(ids, self._device)
        sampling = SamplingBatch.of([resident.sampling for resident in rows], self._device)
        steps = 0
        failures: dict[int, RowFailure] = {}
        hooks: DecodingRows | None = None
        try:
            if any(resident.decoding is not None for resident in rows):
                states = [self._row_state(sequence_id) for sequence_id in ids]
                hooks = DecodingRows(states, self._patient)
            for _ in range(most):
                caps = [
                    min(row.draft_len, resident.tokens_left - 1)
                    for row, resident in zip(batch.rows, rows, strict=True)
                ]
                contents = [resident.content for resident in rows]
                of_step = DraftRequest(ids, contents, caps, sampling, table)
                outcome = step(self.target, self.drafter, of_step, hooks, watch)
                failures = outcome.failures
                ended = bool(failures)
                for index, (resident, tally) in enumerate(zip(rows, tallies, strict=True)):
                    if index in outcome.absent:
                        continue
                    tokens, accepted = outcome.committed[index], outcome.accepted[index]
                    tally.note(caps[index], outcome.drafted[index], accepted)
                    resident.commit(tokens)
                    ended |= resident.finished(tokens)
                steps += len(outcome.absent) < len(rows)
                if ended or interrupted():
                    break
        except BaseException:
            for row, resident, tokens_left in zip(batch.rows, rows, before, strict=True):
                resident.roll_back(row.length, tokens_left)
            if self.drafter is not None:
                self.drafter.rollback(ids, [row.length for row in batch.rows])
            raise
        for sequence_id in ids:
            self._residents.settle(sequence_id)
        return StepResult(
            batch_id=batch.id,
            replica_id=batch.replica_id,
            rows=tuple(
                tally.result(
                    row.sequence_id,
                    resident.content[row.length :],
                    () if hooks is None else hooks.extras[index],
                    failures.get(index),
                )
                for index, (row, resident, tally) in enumerate(
                    zip(batch.rows, rows, tallies, strict=True)
                )
            ),
            steps=steps,
            times=StepTimes(
                draft_s=watch.seconds("draft"),
                verify_s=watch.seconds("verify"),
                prefill_s=watch.seconds("catch_up"),
                hidden_s=watch.seconds("hidden"),
                total_s=perf_counter() - start,
            ),
        )

    def _row_state(self, sequence_id: str) -> RowState | None:
        """None where the request asks for nothing."""
        return self._residents[sequence_id].row_state(self.grammars, self.drafter is not None)

    def _ready(self, row: StepRow, steps: int) -> Resident:
        """The row's resident, as the pool says it is, with the blocks that so many steps need."""
        resident = self._residents[row.sequence_id]
        assert len(resident.content) == row.length, (
            f"{row.sequence_id}: the pool says {row.length} tokens,"
            f" {len(resident.content)} are here"
        )
        assert resident.to_prefill == 0, f"{row.sequence_id} is filled in part only"
        assert self.blocks.frozen(row.sequence_id) <= resident.settled, "shared blocks"
        assert resident.tokens_left > 0, f"{row.sequence_id} has reached its limit"
        assert row.draft_len == 0 or self.drafter is not None, "drafting needs a drafter"
        # The last token committed has no KV entry yet.
        most = min(steps * (row.draft_len + 1), resident.tokens_left)
        self._residents.own(row.sequence_id, row.blocks, row.length + most - 1)
        self.blocks.reach(row.sequence_id, row.length + most - 1)
        return resident
