"""One trace per call, in OpenTelemetry's form: what the frontend, the pool and the replicas did.

The frontend makes all spans when a call has ended, of what the pool has told it. So nothing travels
with a batch, and a call that is not traced costs nothing. A caller's trace is continued: its
`traceparent` (W3C Trace Context) says whether, else a share of the calls is traced.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from cluster.config import ConfigError, TraceConfig
from cluster.metrics.calls import CallRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_NS = 1_000_000_000


class Tracer:
    """Without an endpoint it does nothing."""

    def __init__(
        self, config: TraceConfig, model_name: str, exporter: SpanExporter | None = None
    ) -> None:
        """`exporter`: in place of the one that sends to `config.endpoint`. Raises ConfigError where
        the packages that send are not installed."""
        self._tracer: Any = None
        self._provider: Any = None
        self._model_name = model_name
        if config.endpoint is None and exporter is None:
            return
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

            if exporter is None:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

                exporter = OTLPSpanExporter(config.endpoint)
        except ImportError as error:
            raise ConfigError(
                f"trace.endpoint: {error}; install the extra: pip install 'lockstep[trace]'"
            ) from None
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(config.share)),
            resource=Resource.create({"service.name": "lockstep"}),
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("lockstep")

    def record(self, call: CallRecord) -> None:
        if self._tracer is None:
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        now_ns = time.time_ns()

        def at(moment_s: float) -> int:
            return now_ns - round((call.ended_s - moment_s) * _NS)

        parent = TraceContextTextMapPropagator().extract({"traceparent": call.traceparent})
        root = self._tracer.start_span(
            "request",
            context=parent,
            kind=SpanKind.SERVER,
            attributes=self._attributes(call),
            start_time=at(call.arrived_s),
        )
        if root.is_recording():
            within = set_span_in_context(root)
            for name, begin_s, end_s in _stages(call):
                span = self._tracer.start_span(name, context=within, start_time=at(begin_s))
                span.end(at(end_s))
            if call.status != "OK":
                root.set_status(Status(StatusCode.ERROR, call.status))
        root.end(now_ns)

    def close(self) -> None:
        """Send what waits: blocking, seconds at most."""
        if self._provider is not None:
            self._provider.shutdown()

    def _attributes(self, call: CallRecord) -> dict[str, Any]:
        """By OpenTelemetry's conventions for generative AI where they have a name."""
        usages = call.usages
        return {
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.id": call.request_id,
            "gen_ai.usage.input_tokens": call.prompt_tokens,
            "gen_ai.usage.output_tokens": call.new_tokens,
            "lockstep.status": call.status,
            "lockstep.cached_tokens": call.cached_tokens,
            "lockstep.draft_tokens": sum(usage.draft_tokens for usage in usages),
            "lockstep.accepted_tokens": sum(usage.accepted_tokens for usage in usages),
            "lockstep.steps": sum(usage.steps for usage in usages),
            "lockstep.recovered": sum(usage.recovered for usage in usages),
            "lockstep.replicas": call.replicas,
        }


def _stages(call: CallRecord) -> Iterator[tuple[str, float, float]]:
    """Name, begin and end of each one that the call has reached."""
    submitted_s, first_s = call.submitted_s, call.first_token_s
    yield "frontend: admit and tokenize", call.arrived_s, submitted_s or call.ended_s
    if not submitted_s:
        return
    placed_s = min(submitted_s + call.queued_s, first_s or call.ended_s)
    yield "pool: wait for a replica", submitted_s, placed_s
    yield "replica: prefill and first step", placed_s, first_s or call.ended_s
    if first_s:
        yield "replica: steps", first_s, call.ended_s
