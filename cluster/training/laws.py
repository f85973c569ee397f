"""What more tokens, a larger head and a larger batch bring: heads of several capacities, each
measured after several token counts, and log-linear fits through them (arXiv 2505.07858).

The token counts of a capacity are points of one run at a constant rate, from each of which a short
fall of the rate begins. What was measured lies in `laws.json`, and a run that goes on skips it;
`laws.svg` is its picture.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

from cluster.bench.plots import MARK, Plot, line, to_svg
from cluster.training.job import MANY, Job
from cluster.training.report import expected, latency_table
from replicas.training import DRAFT_LEN, FeatureFolder, Fit, Item, Point, Training, fit
from scheduler.messages import ReplicaSpec

CAPACITIES = (0.25, 1.0, 2.0)
"""Widths of the head's MLP, of the target's."""
SHARES = (0.125, 0.25, 0.5, 1.0)
"""Token counts, of the longest run."""
FALL = 0.15
"""Steps over which the rate falls, of those before."""
_ROWS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Laws:
    points: list[Point]
    by_tokens: Fit
    """Of both, and so are the sentences."""
    by_parameters: Fit
    gains: list[tuple[int, float]]
    """Rows, and tokens/s over those without drafts at the best draft length."""
    batch_r2: float
    said: list[str]


def measure_laws(job: Job, minutes: float) -> Laws:
    """`minutes`: of training, all capacities together. Raises what `Job.run` raises, and ValueError
    for points that tell nothing."""
    out, found = job.settings.out, {}
    file = out / "laws.json"
    job.settings.check_out(file, *out.glob("laws-*.pt"))
    if file.is_file():
        found = json.loads(file.read_text(encoding="utf-8"))
    job.check()
    out.mkdir(parents=True, exist_ok=True)
    folder, _, _ = job.conversations()
    features = job.features(folder)
    train, held_out = job.divided(folder)
    inner = job.inner
    widths = [max(8, round(share * inner) // 8 * 8) for share in CAPACITIES]
    spec: ReplicaSpec | None = None
    steps = found.get("steps") or _steps(job, features, train, folder, widths, minutes)
    found["steps"] = steps
    for width in widths:
        of_width = Job(
            replace(job.settings, intermediate_size=width), job.replica, job.say, job.note
        )
        start = of_width.start(folder, features, train)
        settings = replace(of_width.train_settings(), steps=10**9)
        training = Training(start.head(job.target).to(job.device), features, train, settings)
        last = out / f"laws-{width}.pt"
        if last.is_file():
            training.load(last)
        for share in SHARES:
            until = max(4, round(share * steps))
            name = f"{width} {share}"
            if name in found:
                continue
            saved = monotonic()
            try:
                while training.progress.step < until:
                    training.step()
                    job.note(f"width {width} (steps)", training.progress.step, steps)
                    if monotonic() - saved >= 60 * job.settings.checkpoint_minutes:
                        training.save(last)
                        saved = monotonic()
            finally:
                training.save(last)
            fallen = max(2, round(FALL * until))
            whole = until + fallen
            falling = Training(
                start.head(job.target).to(job.device),
                features,
                train,
                replace(settings, steps=whole, decay=fallen / whole),
            )
            falling.load(last)
            for _ in range(fallen):
                falling.step()
            of_width.write(falling, start)
            prompts = of_width.prompts(held_out, MANY)
            acceptance, spec = of_width.measured(prompts, calibrate=True)
            parameters = sum(each.numel() for each in falling.head.parameters())
            found[name] = asdict(Point(falling.progress.tokens, parameters, acceptance.accepted))
            found["gains"] = gains(spec, acceptance.by_position)
            _write(file, found)
            job.say(f"width {width}, {falling.progress.tokens:,} tokens: {acceptance.said()}")
    points = [Point(**each) for name, each in found.items() if " " in name]
    laws = laws_of(points, [(rows, gain) for rows, gain in found["gains"]], spec)
    _write(file, {**found, "said": laws.said, "r2": [laws.by_tokens.r2, laws.by_parameters.r2]})
    try:
        file.with_suffix(".svg").write_text(picture(laws), encoding="utf-8")
    except ImportError as error:
        job.say(str(error))
    return laws


def picture(laws: Laws) -> str:
    """As SVG. Raises ImportError without matplotlib."""
    return to_svg([[_by_tokens(laws), line(laws.gains, "Over no drafts", "batch", "times")]])


def _by_tokens(laws: Laws) -> Plot:
    def draw(axes: Any) -> None:
        capacities = sorted({point.parameters for point in laws.points})
        for parameters, style in zip(capacities, (":", "--", "-"), strict=False):
            of = sorted(
                (point.tokens, point.accepted)
                for point in laws.points
                if point.parameters == parameters
            )
            label = f"{parameters / 1e6:.1f} M parameters"
            axes.plot(*zip(*of, strict=True), color=MARK, linestyle=style, marker=".", label=label)
        axes.set(title="Accepted per step", xlabel="tokens guessed at", ylabel="draft tokens")
        axes.set_xscale("log", base=2)
        axes.legend(frameon=False)

    return draw


def laws_of(
    points: Sequence[Point], of_batch: Sequence[tuple[int, float]], spec: ReplicaSpec | None
) -> Laws:
    """The fits, and what they say in sentences."""
    both = fit(points, "tokens", "parameters")
    largest = max(point.tokens for point in points)
    by_parameters = fit([p for p in points if p.tokens > 0.9 * largest], "parameters")
    batch = fit([Point(rows, 1, gain) for rows, gain in of_batch], "tokens")
    best = max(points, key=lambda point: (point.tokens, point.accepted))
    said = [f"accepted tokens by tokens and parameters together: R2 {both.r2:.3f}"]
    for name, what in (("tokens", "tokens"), ("parameters", "parameters")):
        more, width = both.doubled(name)
        speed = _faster(spec, best.accepted, more)
        said.append(f"twice the {what}: {more:+.3f} (+-{width:.3f}) accepted tokens{speed}")
    said.append(
        f"twice the batch: {batch.doubled('tokens')[0]:+.3f} of the gain over no drafts,"
        f" R2 {batch.r2:.3f}"
    )
    return Laws(list(points), both, by_parameters, list(of_batch), batch.r2, said)


def gains(spec: ReplicaSpec, shares: Sequence[float]) -> list[tuple[int, float]]:
    """Tokens/s with the best draft length over those without drafts, by rows."""
    table, found = latency_table(spec), []
    for rows in _ROWS:
        plain, fastest, _ = expected(table, shares, rows)
        found.append((rows, fastest / plain))
    return found


def shares_of(accepted: float) -> list[float]:
    """The chance per draft token, the same for each, by which so many of DRAFT_LEN are accepted."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        whole = sum(middle**length for length in range(1, DRAFT_LEN + 1))
        low, high = (middle, high) if whole < accepted else (low, middle)
    return [low] * DRAFT_LEN


def _faster(spec: ReplicaSpec | None, accepted: float, more: float, rows: int = 8) -> str:
    if spec is None or not spec.trials:
        return ""
    table = latency_table(spec)
    before, after = (
        expected(table, shares_of(each), rows)[1] for each in (accepted, accepted + more)
    )
    return f", {after / before - 1:+.1%} tokens/s at batch {rows}"


def _steps(
    job: Job,
    features: FeatureFolder,
    train: Sequence[Item],
    folder: object,
    widths: Sequence[int],
    minutes: float,
) -> int:
    """Of the longest run of each capacity, by the time of a few steps of the middle one."""
    start = job.start(folder, features, train)  # type: ignore[arg-type]
    tried = Training(start.head(job.target).to(job.device), features, train, job.train_settings())
    tried.step()
    begun = monotonic()
    for _ in range(3):
        tried.step()
    step_s = (monotonic() - begun) / 3
    each = 1 + FALL * sum(SHARES)
    return max(32, round(60 * minutes / (step_s * each * len(widths))))


def _write(path: Path, found: dict[str, object]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    part.rename(path)
