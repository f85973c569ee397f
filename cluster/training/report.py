"""What a training has come to: a model card, and a page with pictures, nothing loaded.

Expected tokens per second come from the times of a replica's trials on this machine and from the
acceptance that was measured.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cluster.bench.plots import MARK, Plot, columns, line, to_svg
from cluster.bench.report import Table, machine, number, percent
from cluster.training.job import FEW, MANY, NEW_TOKENS, Job, Outcome
from replicas.training import DRAFT_LEN, Acceptance
from scheduler.draft_length import LatencyTable
from scheduler.messages import BatchKind, ReplicaSpec

ROWS = (1, 2, 4, 8, 16, 32)
KV_PER_ROW = 256
"""Positions that a row's step reads, in what is expected."""
_PAGE = Path(__file__).with_name("page.html")


def latency_table(spec: ReplicaSpec) -> LatencyTable:
    """Of the replica's own trials."""
    table = LatencyTable()
    for batch, result in spec.trials:
        if batch.kind is BatchKind.SPECULATE and result.steps:
            kv = sum(row.length for row in batch.rows)
            times, steps = result.times, result.steps
            rest_s = (times.total_s - times.prefill_s - times.draft_s) / steps
            table.observe_step(len(batch.rows), batch.draft_len, kv, times.draft_s / steps, rest_s)
    return table


def expected(table: LatencyTable, shares: Sequence[float], rows: int) -> tuple[float, float, int]:
    """Tokens/s of so many rows without drafts, with the best draft length, and that length.
    `shares`: of draft token j, the chance that it is right if all before it are."""
    kv, speeds = rows * KV_PER_ROW, []
    committed, chance = 1.0, 1.0
    for draft_len in range(len(shares) + 1):
        speeds.append(rows * committed / max(table.step_s(rows, draft_len, kv), 1e-9))
        if draft_len < len(shares):
            chance *= shares[draft_len]
            committed += chance
    best = max(range(len(speeds)), key=speeds.__getitem__)
    return speeds[0], speeds[best], best


def write_report(out: Path, command: str, job: Job, outcome: Outcome) -> None:
    """`README.md`, `report.html` and `training.json` beside the head. Without matplotlib the page
    has no pictures, and says so. Raises OSError."""
    table = latency_table(outcome.spec)
    speeds = [(rows, *expected(table, outcome.acceptance.by_position, rows)) for rows in ROWS]
    data = {
        "command": command,
        "plan": asdict(outcome.plan),
        "history": outcome.history,
        "acceptance": asdict(outcome.acceptance),
        "coverage": outcome.coverage,
        "parameters": outcome.parameters,
        "seconds": outcome.seconds,
        "expected": speeds,
        "machine": machine(),
    }
    (out / "training.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    (out / "README.md").write_text(_card(command, job, outcome, speeds), encoding="utf-8")
    (out / "report.html").write_text(_page(command, job, outcome, speeds), encoding="utf-8")


def _facts(command: str, job: Job, outcome: Outcome) -> list[tuple[str, str]]:
    plan = outcome.plan
    measured = job.settings.prompts or "held-out conversations"
    return [
        ("method", plan.method),
        ("target", plan.target),
        ("command", command),
        ("data", f"{job.settings.data or 'self-generated'}: {outcome.data}"),
        ("steps, of tokens", f"{plan.train.steps}, {plan.train.batch_tokens * plan.workers}"),
        ("hours of training", f"{outcome.seconds / 3600:.2f}"),
        ("parameters", f"{outcome.parameters / 1e6:.1f} million"),
        ("draft vocabulary", f"{plan.draft_vocab}, {outcome.coverage:.1%} of the answers' tokens"),
        ("accepted draft tokens per step", f"{outcome.acceptance.accepted:.3f} of {DRAFT_LEN}"),
        (
            "measured by",
            f"real steps, greedy, batch {FEW}, {NEW_TOKENS} new tokens of {MANY} of {measured}",
        ),
    ]


def _card(
    command: str, job: Job, outcome: Outcome, speeds: Sequence[tuple[int, float, float, int]]
) -> str:
    name = job.settings.out.name
    rows = "\n".join(f"| {fact} | {value} |" for fact, value in _facts(command, job, outcome))
    curve = "\n".join(
        f"| {point['tokens']:,} | {point['loss']:.3f} | {point['held_out_loss']:.3f}"
        f" | {point['accepted']:.3f} |"
        for point in outcome.history
    )
    shares = "\n".join(
        f"| {position} | {share:.1%} |"
        for position, share in enumerate(outcome.acceptance.by_position, 1)
    )
    fast = "\n".join(
        f"| {rows} | {number(plain)} | {number(best)} | {k} |" for rows, plain, best, k in speeds
    )
    method = job.method
    library = "library_name: speculators\n" if method.speculators else ""
    speculative = json.dumps({"method": method.name, "model": name})
    serve = f"lockstep serve {outcome.plan.target} --speculative-config '{speculative}'"
    return f"""---
{library}base_model: {outcome.plan.target}
tags: [{method.name}, speculative-decoding]
---
# {name}: {method.title} for {outcome.plan.target}

    {serve}

| | |
|---|---|
{rows}

| tokens guessed at | loss | held out | accepted per step |
|---|---|---|---|
{curve}

| draft token | right, if all before it are |
|---|---|
{shares}

Expected on the machine of the training, tokens/s:

| batch | without drafts | with the head | best draft length |
|---|---|---|---|
{fast}
"""


def _page(
    command: str, job: Job, outcome: Outcome, speeds: Sequence[tuple[int, float, float, int]]
) -> str:
    from jinja2 import Environment

    try:
        pictures = to_svg(_plots(outcome.history, outcome.acceptance, speeds))
    except ImportError as error:
        pictures = f"<p>{error}</p>"
    header = ("batch", "without drafts, tokens/s", "with the head", "draft length")
    rows = [(f"{n}", number(plain), number(best), f"{k}") for n, plain, best, k in speeds]
    words = [(name, str(value)) for name, value in machine().items()]
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_PAGE.read_text(encoding="utf-8")).render(
        title=f"A head for {outcome.plan.target}",
        plots=pictures,
        tables=[
            Table("Training", (), _facts(command, job, outcome)),
            Table(f"Expected, {KV_PER_ROW} positions per row", header, rows),
            Table(
                "Acceptance by position",
                (),
                [
                    (f"{position}", percent(share))
                    for position, share in enumerate(outcome.acceptance.by_position, 1)
                ],
            ),
            Table("Machine", (), words),
        ],
    )


def _plots(
    history: Sequence[dict[str, Any]],
    acceptance: Acceptance,
    speeds: Sequence[tuple[int, float, float, int]],
) -> list[list[Plot]]:
    def curve(name: str) -> list[tuple[float, float]]:
        return [(point["tokens"], point[name]) for point in history]

    shares = [100 * share for share in acceptance.by_position]
    return [
        [
            line(curve("held_out_loss"), "Loss, held out", "tokens guessed at", "nats"),
            line(curve("accepted"), "Accepted per step", "tokens guessed at", "draft tokens"),
        ],
        [
            columns(shares, "Right by position", "draft token", "% of steps", 100),
            _two_lines(speeds),
        ],
    ]


def _two_lines(speeds: Sequence[tuple[int, float, float, int]]) -> Plot:
    def draw(axes: Any) -> None:
        rows = [each[0] for each in speeds]
        axes.plot(rows, [each[1] for each in speeds], color=MARK, linestyle=":", label="no drafts")
        axes.plot(rows, [each[2] for each in speeds], color=MARK, label="with the head")
        axes.set(title="Expected tokens/s", xlabel="batch", ylabel="tokens/s", ylim=(0, None))
        axes.legend(frameon=False)

    return draw
