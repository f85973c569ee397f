"""A replica without Ray: `Replica.step(batch) -> StepResult` over one target and its drafter.

Holds the residents: their tokens, how far the target's KV cache reaches, their blocks. Decides
nothing: which rows run, when and how far ahead is the pool's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any

import torch

from replicas.calibration import calibrated, probe
from replicas.config import ReplicaConfig
from replicas.cuda import GraphedModel, buckets
from replicas.decoding import DecodingRows, RowState, load_grammars
from replicas.drafters import Drafter, DraftRequest, DraftSource, Observation
from replicas.eqspec import step
from replicas.fingerprint import fingerprint
from replicas.grammars import Grammars
from replicas.kv_cache import BlockAllocator, OutOfBlocks, TokenRange
from replicas.memory import MemoryPlan, check_memory
from replicas.models import ForwardOptions, Model, Output, build_model, prefill, resolve_device
from replicas.pair import Pair, load_pair, read_pair
from replicas.residents import Resident, Residents, Tally
from replicas.sampling import SamplingBatch
from replicas.stopwatch import Stopwatch
from scheduler.config import DRAFT_LEN_MAX
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
        self.blocks = BlockAllocator(plan.kv_blocks, config.block_size)
        """Who has which KV blocks, of the target and of a draft model."""
        name, blocks = pair.target_name, plan.kv_blocks
        target, built = build_model(
            pair.target, name, config, blocks, pair.context_len, plan.prepack
        )
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
            context_len=pair.context_len,
            vocab_size=pair.vocab_size,
            embedding_size=self.target.vocab,
            **_drafting(config, plan, drafter, pair.draft),
            rows_max=plan.rows_max,
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
            table = self.blocks.table([name], self._device)
            prefill(self.target, [content], [(0, last)], table, self._work.pass_tokens)
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
                for sequence_id, (begin, end) in zip(ids, ranges, strict=True):
                    begins[sequence_id] = begin
                    resident = self._residents[sequence_id]
                    resident.to_prefill = len(resident.content) - 1 - end
                    self._residents.publish(sequence_id)
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
        table = self.blocks.table(ids, self._device)
        drafter, most = self.drafter, self._work.pass_tokens
        tells = any(resident.tells_of_prompt for resident in residents)

        def on_pass(rows: list[int], parts: list[TokenRange], out: Output) -> None:
            if drafter is not None:
                some = [ids[row] for row in rows], [contents[row] for row in rows]
                hidden = out.aux_hidden_states
                drafter.observe(Observation(*some, parts, table[rows], aux_hidden_states=hidden))
            first = 0
            for row, (begin, end) in zip(rows, parts, strict=True) if tells else ():
                assert out.logits is not None
                logits = out.logits[first : first + end - begin]
                logprobs = residents[row].prompt_logprobs(logits, begin)
                extras.setdefault(ids[row], []).extend(logprobs)
                first += end - begin

        if tells:
            most = min(most, LOGITS_MOST)
        options = ForwardOptions(logits=tells, aux_layers=self.aux_layers)
        prefill(self.target, contents, ranges, table, most, options, on_pass)

    # ------------------------------------------------------------------ speculate

    def _speculate(self, batch: Batch, interrupted: Callable[[], bool]) -> StepResult:
        start = perf_counter()
        watch = Stopwatch(self._device)
        ids = [row.sequence_id for row in batch.rows]
        rows = [self._ready(row, batch.steps) for row in batch.rows]
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
            for _ in range(batch.steps):
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
        return resident


def _drafting(
    config: ReplicaConfig, plan: MemoryPlan, drafter: Drafter | None, source: DraftSource | None
) -> dict[str, Any]:
    """What a ReplicaSpec says of the drafter."""
    if drafter is None:
        return {"draft_len_max": 0}
    said = config.drafting
    most = plan.draft_len_max(said.num_speculative_tokens or DRAFT_LEN_MAX)
    if source is not None and source.draft_len_max is not None:
        most = min(most, source.draft_len_max)
    return {
        "draft": drafter.name,
        "drafter": said.method,
        "draft_len_max": most,
        "draft_len": None if said.adaptive else most,
    }
