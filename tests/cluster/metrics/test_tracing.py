"""Proves: a call is one trace over frontend, pool and replica, whose stages lie in order within it;
a caller's trace is continued, and decides; spans reach what speaks OTLP, and hold no text.
"""

from __future__ import annotations

import http.server
import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cluster.config import TraceConfig
from cluster.frontend.http_api.app import http_app
from cluster.metrics.tracing import Tracer
from tests.cluster.frontend.http_rig import post
from tests.cluster.frontend.rig import PROMPT, PROMPT_IDS, frontend

STAGES = [
    "frontend: admit and tokenize",
    "pool: wait for a replica",
    "replica: prefill and first step",
    "replica: steps",
]
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0"


async def spans(share: float, traceparent: str = "", **fields: object) -> Sequence[ReadableSpan]:
    """Of one call of 8 tokens, in the order of their begin."""
    exporter = InMemorySpanExporter()
    tracer = Tracer(TraceConfig(share=share), "m", exporter)
    headers = {"traceparent": traceparent} if traceparent else {}
    async with frontend(step_s=0.005, tracer=tracer) as made:
        asked = {"prompt": PROMPT, "max_tokens": 8} | fields
        await post(http_app(made.service), "completions", headers, **asked)
    return sorted(exporter.get_finished_spans(), key=lambda span: span.start_time or 0)


async def test_the_stages_of_a_call_follow_each_other_within_it() -> None:
    found = await spans(1.0)
    [root] = [span for span in found if span.parent is None]
    stages = [span for span in found if span is not root]
    assert [span.name for span in stages] == STAGES
    assert {span.context.trace_id for span in found} == {root.context.trace_id}
    assert {span.parent.span_id for span in stages if span.parent} == {root.context.span_id}
    times = [(span.start_time, span.end_time) for span in stages]
    assert times[0][0] == root.start_time
    assert times[-1][1] == root.end_time
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(times))
    assert root.attributes is not None
    assert root.attributes["gen_ai.usage.input_tokens"] == len(PROMPT_IDS)
    assert root.attributes["gen_ai.usage.output_tokens"] == 8
    assert len(root.attributes["lockstep.replicas"]) == 1
    assert PROMPT not in str([span.to_json() for span in found])


@pytest.mark.parametrize(("flag", "share", "number"), [("1", 0.0, 5), ("0", 1.0, 0)])
async def test_the_callers_trace_decides(flag: str, share: float, number: int) -> None:
    found = await spans(share, PARENT + flag)
    assert len(found) == number
    assert {format(span.context.trace_id, "032x") for span in found} <= {PARENT.split("-")[1]}


async def test_a_share_of_0_and_a_broken_header_trace_nothing_more() -> None:
    assert await spans(0.0) == []
    assert await spans(0.0, "00-xyz") == []
    assert len(await spans(1.0, "00-xyz")) == 5


@contextmanager
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """Takes traces by OTLP over HTTP."""
    taken: list[ExportTraceServiceRequest] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            taken.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", taken
    server.shutdown()
    thread.join()
    server.server_close()


async def test_spans_are_sent_by_the_time_the_frontend_has_closed() -> None:
    with collector() as (endpoint, taken):
        tracer = Tracer(TraceConfig(endpoint=endpoint, share=1.0), "m")
        async with frontend(tracer=tracer) as made:
            await post(http_app(made.service), "completions", prompt=PROMPT, max_tokens=2)
    names = [
        span.name
        for request in taken
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    assert sorted(names) == sorted([*STAGES, "request"])
