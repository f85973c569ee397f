"""Runs of one pair on one device: what was reached, what could be, whether outputs are equal."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from time import perf_counter

from benchmarks.ceilings import ModelWork, Rates, Work
from cluster.bench.transformers_runs import Transformers
from cluster.local_engine import LocalEngine
from replicas.pair import Pair
from replicas.replica import Replica
from scheduler.config import SchedulerConfig
from scheduler.messages import Request

Key = tuple[str, int, int]
"""Mode, batch size, draft length."""

GENERATE_BATCH = 8
"""Rows of a batch of transformers' `generate`."""
REQUESTS_LEAST = 2
"""Requests of a run at the smallest batch sizes."""


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
    """Tokens per second if nothing but memory traffic took time."""
    matrix_ceiling: float | None
    """The same for operations."""
    over_plain: float | None
    """Against draft length 0 of the same mode and batch size, within a round."""
    identical: int
    compared: int
    """Outputs equal to the mode's own at the smallest batch and draft length 0, of how many."""


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
    """The replicas of all modes and what they have computed."""

    def __init__(self, pair: Pair, rates: Rates, requests: list[Request]) -> None:
        self._target = ModelWork.of(pair.target)
        self._draft = None if pair.draft is None else ModelWork.of(pair.draft)
        self._rates = rates
        self._requests = requests
        self._samples: dict[Key, list[Sample]] = {}
        self._outputs: dict[Key, list[list[int]]] = {}

    def lockstep(self, mode: str, replica: Replica, batch: int, draft_len: int) -> None:
        """Run as many requests as rows (a few more at small batches), all at once."""
        requests = self._requests[: max(batch, REQUESTS_LEAST)]
        engine = LocalEngine(replica, SchedulerConfig(rows_max=batch, draft_len=draft_len))
        start = perf_counter()
        outputs = engine.generate(requests)
        seconds = perf_counter() - start
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
        self._note((mode, batch, draft_len), sample, [output.tokens for output in outputs])

    def generate(self, pair: Pair) -> None:
        """transformers' own `generate` over the same target, with its own attention."""
        requests = self._requests[:GENERATE_BATCH]
        used = pair.target.config._attn_implementation
        pair.target.set_attn_implementation("sdpa")
        try:
            plain = Transformers(pair.target, None)
            start = perf_counter()
            outputs = plain.batched(requests, GENERATE_BATCH)
            seconds = perf_counter() - start
        finally:
            pair.target.set_attn_implementation(used)
        rate = sum(map(len, outputs)) / seconds
        self._note(("transformers", GENERATE_BATCH, 0), Sample(rate, rate), outputs)

    def _note(self, key: Key, sample: Sample, outputs: list[list[int]]) -> None:
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
        both = self._compared((mode, batch, draft_len))
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
            identical=sum(a == b for a, b in both),
            compared=len(both),
        )

    def _compared(self, key: Key) -> list[tuple[list[int], list[int]]]:
        """Outputs beside those of the smallest other run of the mode without speculation.

        transformers', which has one run, stand beside the first mode's.
        """
        mode = key[0]
        if sum(other[0] == mode for other in self._outputs) == 1:
            mode = next(iter(self._outputs))[0]
        plain = sorted(other for other in self._outputs if (other[0], other[2]) == (mode, 0))
        both = []
        for i, tokens in enumerate(self._outputs[key]):
            for other in plain:
                if other != key and i < len(self._outputs[other]):
                    both.append((tokens, self._outputs[other][i]))
                    break
        return both

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
