"""The page at `/metrics`: Prometheus's text format, by our names and by vLLM's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric as Family,
)
from prometheus_client.registry import Collector

from cluster.metrics.sums import Sum
from cluster.metrics.table import METRICS, Metric

CONTENT_TYPE = CONTENT_TYPE_LATEST
_OURS = ("shard",)
_VLLM = ("model_name", "engine")
"""The labels that every sample has; vLLM calls what shares the requests an engine."""


def exposition(shards: Mapping[int, Sequence[Sum]], model_name: str) -> bytes:
    """`shards`: what the pool of each has counted, by its number."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Page(shards, model_name))
    return generate_latest(registry)


class _Page(Collector):
    def __init__(self, shards: Mapping[int, Sequence[Sum]], model_name: str) -> None:
        self._shards = shards
        self._model_name = model_name

    def collect(self) -> Iterator[Family]:
        by_name: dict[str, list[tuple[int, Sum]]] = {name: [] for name in METRICS}
        for shard, sums in self._shards.items():
            for each in sums:
                by_name[each.name].append((shard, each))
        for name, metric in METRICS.items():
            samples = by_name[name]
            if not metric.tags:
                # What has not happened yet is there, as 0.
                told = {shard for shard, _ in samples}
                zeros = (0,) * (len(metric.bounds) + 1)
                missing = [shard for shard in self._shards if shard not in told]
                samples += [(shard, Sum(name, (), 0.0, zeros)) for shard in missing]
            yield _family(
                name, metric, (*metric.tags, *_OURS), [((str(n),), each) for n, each in samples]
            )
            tags = metric.vllm_tags or metric.tags
            shared = [((self._model_name, str(n)), each) for n, each in samples]
            for other in metric.vllm:
                yield _family(f"vllm:{other}", metric, (*tags, *_VLLM), shared)


def _family(
    name: str,
    metric: Metric,
    labels: Sequence[str],
    samples: Iterable[tuple[tuple[str, ...], Sum]],
) -> Family:
    if metric.kind == "Histogram":
        histogram = HistogramMetricFamily(name, metric.help, labels=labels)
        bounds = [*map(str, map(float, metric.bounds)), "+Inf"]
        for rest, each in samples:
            counts = zip(bounds, accumulate(each.buckets), strict=True)
            histogram.add_metric((*each.tags, *rest), list(counts), each.value)
        return histogram
    kind = CounterMetricFamily if metric.kind == "Counter" else GaugeMetricFamily
    family = kind(name, metric.help, labels=labels)
    for rest, each in samples:
        family.add_metric((*each.tags, *rest), each.value)
    return family
