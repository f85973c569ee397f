"""What is counted, into the metrics that each node of Ray exports."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from ray.util import metrics as ray_metrics

from cluster.metrics.sums import Sink
from cluster.metrics.table import METRICS


def ray_sink(model_name: str) -> Sink:
    """Call it in the process that will use the sink."""
    write = {"Counter": "inc", "Gauge": "set", "Histogram": "observe"}

    @functools.cache
    def writers(name: str) -> list[Callable[[float, Mapping[str, str]], None]]:
        metric = METRICS[name]
        options = {"boundaries": list(metric.bounds)} if metric.bounds else {}

        def writer(name: str, tags: tuple[str, ...], more: dict[str, str]) -> Any:
            keys = (*tags, *more)
            made = getattr(ray_metrics, metric.kind)(name, metric.help, tag_keys=keys, **options)
            made.set_default_tags(more)
            put = getattr(made, write[metric.kind])
            return lambda value, values: put(value, dict(zip(tags, values.values(), strict=True)))

        theirs = metric.vllm_tags or metric.tags
        return [
            writer(name, metric.tags, {}),
            *(writer(f"vllm_{other}", theirs, {"model_name": model_name}) for other in metric.vllm),
        ]

    def sink(name: str, value: float, tags: Mapping[str, str]) -> None:
        # Ray's counters take nothing that is not above 0.
        if value > 0 or METRICS[name].kind != "Counter":
            for put in writers(name):
                put(value, tags)

    return sink
