"""A run's report as one HTML page: no script, nothing loaded, light and dark."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from cluster.bench import svg
from cluster.bench.compare import Comparison
from cluster.bench.figures import Distribution, first_token_times, histogram, latencies
from cluster.bench.report_json import Report

_STYLE = """
:root { color-scheme: light dark; --page: #fcfcfb; --ink: #1c1c1a; --soft: #63625d;
  --rule: #e3e2dd; --mark: #2a6fc9; --other: #b3b1a9; }
@media (prefers-color-scheme: dark) {
  :root { --page: #191918; --ink: #ededea; --soft: #a3a29b; --rule: #373733; --mark: #5c9cf0;
    --other: #6f6e68; } }
body { background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  margin: 0 auto; max-width: 74rem; padding: 2rem 1.25rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem; }
p { margin: .3rem 0; } .soft, figcaption { color: var(--soft); }
.tiles, .plots { display: grid; gap: 1rem; }
.tiles { grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); margin-top: 1.4rem; }
.tiles div { border-top: 2px solid var(--rule); padding-top: .5rem; }
.tiles b { display: block; font-size: 1.45rem; font-variant-numeric: tabular-nums; }
.plots { grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr)); gap: 1.6rem; }
figure { margin: 0; } svg { display: block; width: 100%; height: auto; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--rule); padding: .3rem .9rem .3rem 0; text-align: right;
  vertical-align: top; }
th { color: var(--soft); font-weight: 500; } th:first-child, td:first-child { text-align: left; }
.words td { text-align: left; }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
svg .x { text-anchor: middle; } svg .y, svg .name { text-anchor: end; }
svg .name, svg .value { fill: var(--ink); } .grid { stroke: var(--rule); }
.line { fill: none; stroke: var(--mark); stroke-width: 2; stroke-linejoin: round; }
.mark { fill: var(--mark); } .other { fill: var(--other); }
"""


def to_html(report: Report) -> str:
    """The page."""
    parts = [
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Lockstep benchmark</title><style>{_STYLE}</style></head><body>",
        "<h1>Lockstep benchmark</h1>",
        f'<p class="soft">{escape(report.created)}: {escape(str(report.settings["prompts"]))};'
        f" {escape(str(report.settings['arrivals']))}</p>",
        *(f"<p>{escape(note)}</p>" for note in report.notes),
        _tiles(report),
        "<h2>Load</h2>",
        '<div class="plots">',
        *_plots(report),
        "</div>",
        "<h2>Times</h2>",
        _times(report),
        "<h2>Speculation, groups, failures</h2>",
        _counts(report),
    ]
    if report.comparison is not None:
        parts += ["<h2>Comparison</h2>", _comparison(report.comparison)]
    elif report.not_compared:
        parts += ["<h2>Comparison</h2>", f"<p>There is none: {escape(report.not_compared)}</p>"]
    parts += [
        "<h2>Settings</h2>",
        _words(report.settings.items()),
        "<h2>Machine that sent the load</h2>",
        _words(report.machine.items()),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _tiles(report: Report) -> str:
    figures = report.summary
    tiles = {
        "tokens/s": number(figures.tokens_per_s),
        "requests/s": number(figures.requests_per_s),
        "first token, p50": _ms(figures.ttft_s.p50 if figures.ttft_s else None),
        "first token, p99": _ms(figures.ttft_s.p99 if figures.ttft_s else None),
        "per output token, p50": _ms(figures.token_s.p50 if figures.token_s else None),
        "of draft tokens accepted": percent(figures.acceptance),
        "tokens per row and step": number(figures.committed_per_step),
    }
    cells = "".join(f"<div><b>{value}</b>{escape(name)}</div>" for name, value in tiles.items())
    return f'<div class="tiles">{cells}</div>'


def _plots(report: Report) -> list[str]:
    figures = report.summary
    waited = sorted(latencies(report.records))
    steps = [
        (value, 100 * (n + up) / len(waited)) for n, value in enumerate(waited) for up in (0, 1)
    ]
    cdf = [(0.0, 0.0), *steps]
    speed = [((n + 0.5) * report.bin_s, value) for n, value in enumerate(report.timeline)]
    times = [1000 * value for value in first_token_times(report.records)]
    first = histogram(times, min(max(math.ceil(2 * math.sqrt(len(times))), 5), 24))
    positions = [(j, j + 1.0, 100 * share) for j, share in enumerate(figures.accepted_at)]
    return [
        _figure(
            "Latency: share of requests that took at most so long",
            svg.lines(cdf, "seconds", "% of requests", 100),
        ),
        _figure("Throughput over time", svg.lines(speed, "seconds since the start", "tokens/s")),
        _figure(
            "Time to first token",
            svg.columns([(a, b, float(n)) for a, b, n in first], "milliseconds", "requests"),
        ),
        _figure(
            "Acceptance by position: share of steps in which that draft token was accepted",
            svg.columns(
                positions,
                "position of the draft token",
                "% of steps",
                [(j + 0.5, str(j + 1)) for j in range(len(positions))],
                100,
            ),
        ),
    ]


def _times(report: Report) -> str:
    figures = report.summary
    rows: list[tuple[str, Distribution | None]] = [
        ("time to first token", figures.ttft_s),
        ("time per output token", figures.token_s),
        ("inter-token latency (between two arrivals)", figures.gap_s),
        ("latency", figures.latency_s),
        ("sent after the intended arrival", figures.late_s),
    ]
    header = ("milliseconds", "mean", "p50", "p90", "p95", "p99", "most")
    return _table(
        header,
        [
            (name, *("-",) * 6)
            if each is None
            else (
                name,
                *(
                    number(1000 * value)
                    for value in (each.mean, each.p50, each.p90, each.p95, each.p99, each.max)
                ),
            )
            for name, each in rows
        ],
    )


def _counts(report: Report) -> str:
    f = report.summary
    errors = ", ".join(f"{code} {count}" for code, count in sorted(f.errors.items())) or "none"
    rows = [
        ("requests", str(f.requests)),
        ("failed", f"{f.failed} ({errors})"),
        ("calls asked again by the client", str(f.retries)),
        ("requests that lost their place and were taken up again", str(f.recovered)),
        (
            "prompt tokens, of which found in a prefix cache",
            f"{f.prompt_tokens}, {f.cached_tokens}",
        ),
        ("new tokens", str(f.new_tokens)),
        ("seconds", number(f.elapsed_s)),
        ("draft tokens, of which accepted", f"{f.draft_tokens}, {percent(f.acceptance)}"),
        ("draft tokens per row and step", number(f.drafted_per_step)),
        ("accepted tokens per row and step", number(f.accepted_per_step)),
        ("committed tokens per row and step", number(f.committed_per_step)),
        ("spread of a group in tokens, mean", number(f.spread_mean)),
        ("padding: KV positions read beyond a row's own", percent(f.padding)),
    ]
    return _words(rows)


def _comparison(comparison: Comparison) -> str:
    ran = [each for each in comparison.contenders if each.tokens_per_s]
    bars = svg.bars(
        [(each.name, each.speed, each.name.startswith("Lockstep")) for each in ran], "tokens/s"
    )
    speeds = _table(
        ("tokens/s", "median", "each round", f"identical of {comparison.prompts}"),
        [
            (
                each.name,
                number(each.speed) if each.tokens_per_s else "-",
                ", ".join(f"{value:.0f}" for value in each.tokens_per_s) or each.does_not_run,
                str(each.identical) if each.tokens_per_s else "-",
            )
            for each in comparison.contenders
        ],
    )
    ratios = _table(
        ("ratio, within a round", "median", "each round"),
        [
            (each.name, f"{each.median:.2f}", ", ".join(f"{value:.2f}" for value in each.values))
            for each in comparison.ratios
        ],
    )
    said = (
        f"{comparison.prompts} prompts, {comparison.new_tokens} new tokens each, greedy, all in "
        "one process, in turns. Identical: to transformers' generate at batch 1, in every round."
    )
    if comparison.assistance:
        said += f" Assisted generation at its fastest setting: {comparison.assistance}."
    if comparison.left_out:
        said += f" {comparison.left_out}."
    return f'<p class="soft">{escape(said)}</p>{_figure("tokens/s", bars)}{speeds}{ratios}'


def _figure(caption: str, drawing: str) -> str:
    return f"<figure><figcaption>{escape(caption)}</figcaption>{drawing}</figure>"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _words(rows: Iterable[tuple[str, object]]) -> str:
    body = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape('-' if value is None else str(value))}</td></tr>"
        for name, value in rows
    )
    return f'<div class="wide"><table class="words">{body}</table></div>'


def number(value: float | None) -> str:
    """Three digits at least, "-" for what is not known."""
    if value is None:
        return "-"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{number(1000 * seconds)} ms"
