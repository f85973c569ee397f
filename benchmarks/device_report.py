"""What a device benchmark has found: its figures, its tables, its JSON file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.device_modes import ALONE, ATTENTIONS, DETERMINISTIC, USUAL, WAITING, Outcome
from benchmarks.device_runs import GENERATE_BATCH, TRANSFORMERS, Bench, Prefill, Run
from benchmarks.report import table, write_json


@dataclass
class Report:
    """All that has been found so far."""

    path: Path | None
    about: dict[str, Any]
    """What does not change from mode to mode."""
    modes: dict[str, Outcome]
    benches: dict[str, Bench] = field(default_factory=dict)
    """Of the modes that have figures; those of `generate` are in the usual mode's."""

    @property
    def runs(self) -> list[Run]:
        return [run for bench in self.benches.values() for run in bench.runs()]

    @property
    def prefills(self) -> list[Prefill]:
        return [prefill for bench in self.benches.values() for prefill in bench.prefills()]

    def write(self) -> None:
        """Put a whole file in the place of the last one, so that there is always a whole one."""
        if self.path is None:
            return
        part = self.path.with_name(f"{self.path.name}.part")
        write_json(
            part,
            {
                "complete": all(one.state != WAITING for one in self.modes.values()),
                **self.about,
                "modes": {mode: asdict(outcome) for mode, outcome in self.modes.items()},
                "figures": figures(self.runs, USUAL),
                "prefill": [asdict(prefill) for prefill in self.prefills],
                "runs": [asdict(run) for run in self.runs],
            },
        )
        part.replace(self.path)

    def show(self) -> None:
        """Print all tables."""
        print(run_table(self.runs))
        print(mode_table(self.modes))
        if self.prefills:
            names = list(asdict(self.prefills[0]))
            print(table(names, [list(asdict(each).values()) for each in self.prefills]))
        print(table(("figure", "value"), list(figures(self.runs, USUAL).items())))


def figures(runs: Sequence[Run], usual: str) -> dict[str, float]:
    """What a reader asks first; shares are of the lower ceiling."""
    by_key = {(run.mode, run.batch, run.draft_len): run for run in runs}
    out: dict[str, float] = {}
    for batch in sorted({run.batch for run in runs}):
        plain = by_key.get((usual, batch, 0))
        if plain and plain.bandwidth_ceiling and plain.matrix_ceiling:
            lower = min(plain.bandwidth_ceiling, plain.matrix_ceiling)
            out[f"k = 0 at batch {batch}, share of the ceiling"] = plain.tokens_per_s / lower
        spec = [r for r in runs if r.mode == usual and r.batch == batch and r.draft_len > 0]
        if spec and plain:
            best = max(spec, key=lambda run: run.over_plain or 0.0)
            out[f"speculation (k = {best.draft_len}) over k = 0, batch {batch}"] = (
                best.over_plain or 0.0
            )
        for mode in ATTENTIONS:
            for run in (r for r in runs if r.mode == mode and r.batch == batch):
                same = by_key.get((usual, batch, run.draft_len))
                if same:
                    out[f"{mode} over {usual}, batch {batch}, k = {run.draft_len}"] = (
                        run.tokens_per_s / same.tokens_per_s
                    )
        slow = by_key.get((DETERMINISTIC, batch, 0))
        if slow and plain:
            out[f"deterministic over {usual}, batch {batch}, k = 0"] = (
                slow.tokens_per_s / plain.tokens_per_s
            )
    for mode in ALONE:
        own = [run.outputs for run in runs if run.mode == mode]
        across = sum(outputs.compared_across for outputs in own)
        if across:
            out[f"{mode}: outputs compared with another batch size"] = float(across)
            out[f"{mode}: share of them identical"] = (
                sum(outputs.identical_across for outputs in own) / across
            )
    theirs = by_key.get((TRANSFORMERS, GENERATE_BATCH, 0))
    ours = [r.all_tokens_per_s for r in runs if r.mode == usual and r.batch == GENERATE_BATCH]
    if theirs and ours:
        out[f"over transformers' generate, batch {GENERATE_BATCH}"] = (
            max(ours) / theirs.all_tokens_per_s
        )
    return out


def run_table(runs: Sequence[Run]) -> str:
    """One line per run; the shares of the two ceilings stand in brackets. The last column counts
    only outputs compared with those of groups of another size."""

    def beside(ceiling: float | None, rate: float) -> str:
        return "" if ceiling is None else f"{ceiling:.0f} ({rate / ceiling:.0%})"

    return table(
        (
            "mode",
            "batch",
            "k",
            "tokens/s",
            "ms/step",
            "tokens/row/step",
            "bandwidth ceiling",
            "matrix ceiling",
            "over k = 0",
            "with prefill",
            "identical",
            "of another batch size",
        ),
        [
            (
                run.mode,
                run.batch,
                run.draft_len,
                run.tokens_per_s,
                "" if run.step_ms is None else run.step_ms,
                "" if run.committed is None else run.committed,
                beside(run.bandwidth_ceiling, run.tokens_per_s),
                beside(run.matrix_ceiling, run.tokens_per_s),
                "" if run.over_plain is None else run.over_plain,
                run.all_tokens_per_s,
                f"{run.outputs.identical}/{run.outputs.compared}",
                f"{run.outputs.identical_across}/{run.outputs.compared_across}",
            )
            for run in runs
        ],
    )


def mode_table(modes: Mapping[str, Outcome]) -> str:
    """One line per mode: what became of it, and what it ran with."""
    return table(
        (
            "mode",
            "state",
            "attention",
            "steps unrecorded",
            "GPU memory, GB",
            "message",
        ),
        [
            (
                mode,
                one.state,
                one.attention,
                len(one.unrecorded),
                "" if one.memory_gb is None else one.memory_gb,
                one.message.replace("|", "\\|"),
            )
            for mode, one in modes.items()
        ],
    )
