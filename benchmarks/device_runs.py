"""Runs of one pair on one device: what was reached, what could be, whether outputs are equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

from benchmarks.ceilings import ModelWork, Rates, Work
from cluster.bench.transformers_runs import Transformers
from cluster.local_engine import LocalEngine
from replicas.models.pair import Pair
from replicas.replica import Replica
from scheduler.config import SchedulerConfig
from scheduler.messages import Request

Key = tuple[str, int, int]
"""Mode, batch size, draft length."""

TRANSFORMERS = "transformers"
"""The mode of `generate`."""
GENERATE_BATCH = 8
"""Rows of a batch of transformers' `generate`."""
REQUESTS_LEAST = 2
"""Requests of a run at the smallest batch sizes."""


@dataclass(frozen=True)
class Made:
    """One output."""

    tokens: list[int]
    rows: int
    """Of the largest group that it was ever in: what its run was given is a bound of it only."""


@dataclass(frozen=True)
class Agreement:
    """Outputs that were compared with others of the same requests, and those that were equal."""

    identical: int
    compared: int
    identical_across: int
    compared_across: int
    """Of them those whose groups were of another size than the other's: what batch independence
    is tested on. The rest compares draft lengths or repeats a run."""


@dataclass(frozen=True)
class Run:
    """One mode, batch size and draft length; times are medians over the rounds."""

    mode: str
    batch: int
    draft_len: int
    tokens_per_s: float
    """Of the steps alone, prefill left out; of transformers over the whole run."""
    all_tokens_per_s: float
    """Prefill and scheduler included."""
    step_ms: float | None
    committed: float | None
    """Tokens per row and step."""
    draft_share: float | None
    verify_share: float | None
    """Shares of the steps' time."""
    bandwidth_ceiling: float | None
    """Tokens per second if nothing but memory traffic took time: of the steps, as `tokens_per_s`;
    of transformers over the whole run."""
    matrix_ceiling: float | None
    """The same for operations."""
    over_plain: float | None
    """Against draft length 0 of the same mode and batch size, within a round."""
    outputs: Agreement
    """With the mode's own without speculation: alone, or else at the smallest batch."""


@dataclass(frozen=True)
class Prefill:
    """Prompts filled into an empty cache."""

    mode: str
    tokens: int
    tokens_per_s: float
    bandwidth_ceiling: float
    matrix_ceiling: float


@dataclass(frozen=True)
class Sample:
    """One round of a run."""

    tokens_per_s: float
    all_tokens_per_s: float
    step_ms: float | None = None
    committed: float | None = None
    draft_share: float | None = None
    verify_share: float | None = None
    work_per_token: Work | None = None
    prefill_tokens_per_s: float = 0.0
    prefill_work: Work | None = None


class Bench:
    """What the replicas of modes have computed, and how fast; holds none of them."""

    def __init__(self, pair: Pair, rates: Rates, requests: list[Request]) -> None:
        self._target = ModelWork.of(pair.target)
        self._draft = None if pair.draft is None else ModelWork.of(pair.draft)
        self._rates = rates
        self._requests = requests
        self._samples: dict[Key, list[Sample]] = {}
        self._outputs: dict[Key, list[Made]] = {}
        self._alone: dict[str, list[Made]] = {}

    def lockstep(self, mode: str, replica: Replica, batch: int, draft_len: int) -> None:
        """Run as many requests as rows (a few more at small batches), all at once."""
        requests = self._requests[: max(batch, REQUESTS_LEAST)]
        engine = LocalEngine(replica, SchedulerConfig(rows_max=batch, draft_len=draft_len))
        start = perf_counter()
        outputs = engine.generate(requests)
        seconds = perf_counter() - start
        made = outputs_made(engine, requests)
        stepped = [result for result in engine.results if result.steps]
        filled = [result for result in engine.results if not result.steps]
        rows = [row for result in stepped for row in result.rows]
        steps = sum(result.steps for result in stepped)
        # A step drafts as far as the row that may go furthest.
        drafted = sum(max(row.draft_tokens for row in result.rows) for result in stepped)
        positions = sum(result.kv_positions_own for result in stepped)
        committed = sum(len(row.tokens) for row in rows)
        row_steps = sum(row.steps for row in rows)
        checked = row_steps + sum(row.draft_tokens for row in rows)
        work = self._target.decode(steps, checked, positions)
        if self._draft is not None and drafted:
            work += self._draft.decode(
                drafted, checked - row_steps, positions * drafted / max(steps, 1)
            )
        in_steps = sum(result.times.total_s for result in stepped)
        in_fills = sum(result.times.total_s for result in filled)
        lengths = [len(request.prompt) - 1 for request in requests]
        fill = self._target.prefill(lengths)
        if self._draft is not None:
            fill += self._draft.prefill(lengths)
        sample = Sample(
            tokens_per_s=committed / in_steps,
            all_tokens_per_s=sum(len(output.tokens) for output in outputs) / seconds,
            step_ms=1e3 * in_steps / steps,
            committed=committed / row_steps,
            draft_share=sum(result.times.draft_s for result in stepped) / in_steps,
            verify_share=sum(result.times.verify_s for result in stepped) / in_steps,
            work_per_token=Work(work.bytes / committed, work.operations / committed),
            prefill_tokens_per_s=sum(lengths) / in_fills,
            prefill_work=Work(fill.bytes / sum(lengths), fill.operations / sum(lengths)),
        )
        self._note((mode, batch, draft_len), sample, made)

    def alone(self, mode: str, replica: Replica, requests: int) -> None:
        """Run the first so many requests one after the other, each prefilled and decoded by itself
        and without speculation, for the mode's outputs to be compared with. Not timed."""
        made = self._alone[mode] = []
        for request in self._requests[:requests]:
            engine = LocalEngine(replica, SchedulerConfig(rows_max=1, draft_len=0))
            engine.generate([request])
            made += outputs_made(engine, [request])
        print(f"{mode:14} alone: {len(made)} requests to compare with", flush=True)

    def generate(self, pair: Pair) -> None:
        """transformers' own `generate` over the same target, with its own attention."""
        requests = self._requests[:GENERATE_BATCH]
        used = pair.target.config._attn_implementation
        pair.target.set_attn_implementation("sdpa")
        ours = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
        torch.backends.cuda.enable_cudnn_sdp(True)  # as it would run without Lockstep
        try:
            plain = Transformers(pair.target, None)
            start = perf_counter()
            outputs = plain.batched(requests, GENERATE_BATCH)
            seconds = perf_counter() - start
        finally:
            torch.backends.cuda.enable_cudnn_sdp(ours)
            pair.target.set_attn_implementation(used)
        tokens = sum(map(len, outputs))
        work = generate_work(
            self._target,
            [len(request.prompt) for request in requests],
            max(request.max_new_tokens for request in requests),
        )
        sample = Sample(
            tokens_per_s=tokens / seconds,
            all_tokens_per_s=tokens / seconds,
            work_per_token=Work(work.bytes / tokens, work.operations / tokens),
        )
        made = [Made(output, len(requests)) for output in outputs]
        self._note((TRANSFORMERS, GENERATE_BATCH, 0), sample, made)

    def _note(self, key: Key, sample: Sample, outputs: list[Made]) -> None:
        self._samples.setdefault(key, []).append(sample)
        self._outputs[key] = outputs
        mode, batch, draft_len = key
        print(
            f"{mode:14} batch {batch:3}  k {draft_len}  {sample.tokens_per_s:8.0f} tokens/s",
            flush=True,
        )

    def forget(self) -> None:
        """Drop all that was noted: the first round warms up."""
        self._samples.clear()

    def runs(self) -> list[Run]:
        return [self._run(*key) for key in self._samples]

    def _run(self, mode: str, batch: int, draft_len: int) -> Run:
        samples = self._samples[mode, batch, draft_len]
        plain = self._samples.get((mode, batch, 0))
        ratios = [
            a.tokens_per_s / b.tokens_per_s for a, b in zip(samples, plain or [], strict=False)
        ]
        works = [sample.work_per_token for sample in samples if sample.work_per_token]

        def mid(name: str) -> float | None:
            values = [getattr(sample, name) for sample in samples]
            return None if None in values else median(values)

        return Run(
            mode=mode,
            batch=batch,
            draft_len=draft_len,
            tokens_per_s=median(sample.tokens_per_s for sample in samples),
            all_tokens_per_s=median(sample.all_tokens_per_s for sample in samples),
            step_ms=mid("step_ms"),
            committed=mid("committed"),
            draft_share=mid("draft_share"),
            verify_share=mid("verify_share"),
            bandwidth_ceiling=1 / works[0].bandwidth_s(self._rates) if works else None,
            matrix_ceiling=1 / works[0].matrix_s(self._rates) if works else None,
            over_plain=median(ratios) if ratios else None,
            outputs=agreement((mode, batch, draft_len), self._outputs, self._alone),
        )

    def prefills(self) -> list[Prefill]:
        """Of each mode the run with the most prompts."""
        largest: dict[str, tuple[int, list[Sample]]] = {}
        for (mode, batch, _), samples in self._samples.items():
            if samples[0].prefill_work and batch > largest.get(mode, (0, []))[0]:
                largest[mode] = (batch, samples)
        out = []
        for mode, (batch, samples) in largest.items():
            work = samples[0].prefill_work
            assert work is not None
            out.append(
                Prefill(
                    mode=mode,
                    tokens=sum(
                        len(request.prompt) - 1
                        for request in self._requests[: max(batch, REQUESTS_LEAST)]
                    ),
                    tokens_per_s=median(sample.prefill_tokens_per_s for sample in samples),
                    bandwidth_ceiling=1 / work.bandwidth_s(self._rates),
                    matrix_ceiling=1 / work.matrix_s(self._rates),
                )
            )
        return out


def outputs_made(engine: LocalEngine, requests: Sequence[Request]) -> list[Made]:
    """What the engine has made of these requests."""
    rows: dict[str, int] = {}
    for result in engine.results:
        for row in result.rows if result.steps else ():
            rows[row.sequence_id] = max(rows.get(row.sequence_id, 0), len(result.rows))
    return [Made(engine.outputs[request.id].tokens, rows[request.id]) for request in requests]


def agreement(
    key: Key, outputs: Mapping[Key, Sequence[Made]], alone: Mapping[str, Sequence[Made]]
) -> Agreement:
    """A run's outputs beside those of the same mode without speculation: of the request alone, or
    else of the smallest other run that had it.

    transformers' stand beside the first mode's.
    """
    mode = key[0] if key[0] != TRANSFORMERS else next(iter(outputs))[0]
    plain = sorted(other for other in outputs if (other[0], other[2]) == (mode, 0) and other != key)
    references = [alone.get(mode, ()), *(outputs[other] for other in plain)]
    both = [
        (made, next(reference[i] for reference in references if i < len(reference)))
        for i, made in enumerate(outputs[key])
        if any(i < len(reference) for reference in references)
    ]
    across = [(made, other) for made, other in both if made.rows != other.rows]
    return Agreement(
        identical=sum(made.tokens == other.tokens for made, other in both),
        compared=len(both),
        identical_across=sum(made.tokens == other.tokens for made, other in across),
        compared_across=len(across),
    )


def generate_work(target: ModelWork, prompts: Sequence[int], new_tokens: int) -> Work:
    """Of one batch of prompts of these lengths and so many new tokens each, from the first pass to
    the last: that over the prompts yields the first tokens. Padding is left out."""
    passes = new_tokens - 1
    positions = sum(length + n for length in prompts for n in range(1, new_tokens))
    first = target.prefill(prompts, outputs=True)
    return first + target.decode(passes, passes * len(prompts), positions)
