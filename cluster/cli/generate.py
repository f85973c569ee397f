"""What `lockstep generate` does: one prompt as a stream."""

from __future__ import annotations

import time
from typing import Any

import grpc
from google.protobuf.json_format import MessageToJson

from cluster.cli.client_flags import failure
from cluster.client import Client
from cluster.client.channel import Server
from cluster.local.console import console
from protos import lockstep_pb2 as pb


def generate(server: Server, prompt: str, options: dict[str, Any], as_json: bool) -> int:
    """Stream the answer to stdout, then one line of figures to stderr. Returns the exit status."""
    request = pb.GenerateRequest(prompt=prompt, **options)
    started_s = time.perf_counter()
    first_s = 0.0
    end = pb.End()
    texts: list[str] = []
    token_ids: list[int] = []
    try:
        with Client(server.address, server.api_key, server.tls) as client:
            for chunk in client.stream(request):
                first_s = first_s or time.perf_counter() - started_s
                texts.append(chunk.text)
                token_ids.extend(chunk.token_ids)
                if not as_json:
                    print(chunk.text, end="", flush=True)
                if chunk.HasField("end"):
                    end = chunk.end
    except grpc.RpcError as error:
        if texts and not as_json:
            print()
        console(stderr=True).print(failure(server, error))
        return 1
    except KeyboardInterrupt:
        print()
        return 130
    total_s = time.perf_counter() - started_s
    if as_json:
        response = pb.GenerateResponse(text="".join(texts), token_ids=token_ids, end=end)
        print(MessageToJson(response, preserving_proto_field_name=True, indent=None))
    else:
        print()
        console(stderr=True).print(figures(end, total_s, first_s), style="dim")
    return 0


def figures(end: pb.End, total_s: float, first_s: float) -> str:
    """One line: tokens, tokens/s, time to the first token, draft tokens accepted."""
    tokens, of = end.usage.completion_tokens, end.speculation
    return (
        f"{tokens} tokens in {total_s:.2f} s ({tokens / total_s:.1f} tokens/s), "
        f"first token after {first_s * 1000:.0f} ms, "
        f"{of.accepted_tokens / max(of.steps, 1):.2f} draft tokens accepted per step "
        f"({of.accepted_tokens / max(of.draft_tokens, 1):.0%} of {of.draft_tokens})"
    )
