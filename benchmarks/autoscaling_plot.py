"""Draws what `benchmarks.autoscaling` has measured. Knows only its JSON.

python -m benchmarks.autoscaling_plot JSON PICTURE
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def columns(lines: Sequence[str]) -> dict[str, list[float]]:
    """The values by the names in the first line."""
    names = lines[0].split(",")
    rows = [[float(value) for value in line.split(",")] for line in lines[1:]]
    return {name: [row[index] for row in rows] for index, name in enumerate(names)}


def plot(found: dict[str, Any], path: Path) -> None:
    """One picture of what the JSON holds: four panels over one time axis."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "lockstep", "svg.fonttype": "none"})
    from matplotlib import pyplot

    looks, times = columns(found["samples"]), columns(found["latency"])
    seconds = looks["s"]
    figure, (load, replicas, queue, wait) = pyplot.subplots(4, 1, figsize=(9, 10), sharex=True)
    load.plot(seconds, looks["asked_per_s"], label="asked for")
    load.plot(seconds, looks["committed_per_s"], label="committed")
    load.set_ylabel("tokens/s")
    replicas.step(seconds, looks["wanted"], where="post", label="wanted", ls=":")
    replicas.step(seconds, looks["serving"], where="post", label="serving")
    needed = [tokens / found["one_replica_tokens_per_s"] for tokens in looks["asked_per_s"]]
    replicas.plot(seconds, needed, label="tokens asked for / what one commits", alpha=0.4)
    replicas.set_ylabel("replicas")
    queue.plot(seconds, looks["outstanding"], label="outstanding tokens")
    queue.set_ylabel("tokens")
    for name, label in (("total", "whole answer"), ("first", "first token")):
        (line,) = wait.plot(times["s"], times[f"{name}_p50"], label=f"{label}, 50 %")
        p95 = times[f"{name}_p95"]
        wait.plot(times["s"], p95, ":", color=line.get_color(), label=f"{label}, 95 %")
    wait.set_yscale("log")
    wait.set_ylabel("seconds until")
    wait.set_xlabel("seconds; requests by their arrival")
    for axes in (load, replicas, queue, wait):
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(
        path, bbox_inches="tight", metadata={"Date": None} if path.suffix == ".svg" else None
    )


if __name__ == "__main__":
    plot(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
