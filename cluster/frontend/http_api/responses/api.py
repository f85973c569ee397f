"""The routes of Responses: create, also in the background; retrieve, cancel, delete."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from grpc import StatusCode

from cluster.frontend.calls import Delta, GenerateCall
from cluster.frontend.http_api.bodies import IgnoredNames, taken
from cluster.frontend.http_api.bodies.responses import ResponsesRequest, Turn, items_of, turns_of
from cluster.frontend.http_api.edge import check_model, checked_caller, read_body
from cluster.frontend.http_api.openai_api import CallResponse
from cluster.frontend.http_api.responses.answer import ResponsesAnswer
from cluster.frontend.http_api.responses.store import Kept, ResponseStore
from cluster.frontend.service import FrontendService
from cluster.frontend.status_codes import Refusal, Refused
from scheduler.errors import InvalidRequest

log = logging.getLogger("lockstep.frontend")


def responses_router(service: FrontendService, unknown: IgnoredNames) -> APIRouter:
    router, bytes_max = APIRouter(), service.config.frontend.message_bytes_max
    check = partial(
        taken,
        ResponsesRequest,
        refuse_unknown=service.config.server.unknown_fields == "refuse",
    )
    store = ResponseStore()

    def found(request: Request, name: str, field: str = "response_id") -> Kept:
        """Raises Refused."""
        kept = store.get(name, _tenant(service, request))
        if kept is None:
            message = f"{field}: Response with id '{name}' not found."
            raise Refused(Refusal(StatusCode.NOT_FOUND, message, field=field))
        return kept

    @router.post("/v1/responses")
    async def create(request: Request) -> Response:
        caller = checked_caller(service, request)
        tenant = _tenant(service, request)
        with service.refusals():
            given = await read_body(request, bytes_max, check)
            unknown.note(given.ignored)
            served = check_model(service, given.body.model)
            asked: ResponsesRequest = given.body.as_served(served, service.config.server)
            before: Sequence[Turn] = ()
            if asked.previous_response_id is not None:
                before = found(request, asked.previous_response_id, "previous_response_id").turns
            turns = [*before, *asked.turns]

            def keep(response: dict[str, Any]) -> None:
                if asked.store:
                    said = turns_of(items_of(response["output"]))
                    store.put(Kept(tenant, response, [*turns, *said]))

            shape = ResponsesAnswer(asked, service.text, keep)
            call = asked.to_call(caller, request.headers.get("x-request-id", ""), before)
            call = replace(call, request_id=call.request_id or shape.id)
        if not asked.background:
            return CallResponse(service, call, shape, given.headers)
        kept = Kept(tenant, shape.response("queued"), turns)
        store.put(kept)
        kept.task = asyncio.create_task(_answer_later(service, call, shape, store, kept))
        return JSONResponse(kept.response, headers=given.headers)

    @router.get("/v1/responses/{name}")
    async def retrieve(request: Request, name: str) -> Response:
        checked_caller(service, request)
        with service.refusals():
            return JSONResponse(found(request, name).response)

    @router.delete("/v1/responses/{name}")
    async def delete(request: Request, name: str) -> Response:
        checked_caller(service, request)
        with service.refusals():
            kept = found(request, name)
            if kept.task is not None:
                kept.task.cancel()
            store.drop(name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    @router.post("/v1/responses/{name}/cancel")
    async def cancel(request: Request, name: str) -> Response:
        checked_caller(service, request)
        with service.refusals():
            kept = found(request, name)
            if not kept.response["background"]:
                raise InvalidRequest("response_id", "Cannot cancel a synchronous response.")
            if kept.task is not None and kept.response["status"] in ("queued", "in_progress"):
                kept.task.cancel()
                kept.response["status"] = "cancelled"
        return JSONResponse(kept.response)

    return router


def _tenant(service: FrontendService, request: Request) -> str:
    """The name of the key that came with a request; empty without keys."""
    caller = checked_caller(service, request)
    with service.refusals():
        entry = service.admission.check(caller)
    return "" if entry is None else entry.name


async def _answer_later(
    service: FrontendService,
    call: GenerateCall,
    shape: ResponsesAnswer,
    store: ResponseStore,
    kept: Kept,
) -> None:
    """Answers a call that nobody waits for; `kept` says how far it is."""
    deltas = list[Delta]()
    try:
        async with service.open(call) as answer:
            shape.begin(answer)
            kept.response["status"] = "in_progress"
            async for delta in answer:
                if delta.end is not None and delta.end.refusal is not None:
                    raise Refused(delta.end.refusal)
                deltas.append(delta)
        if store.get(shape.id, kept.tenant) is kept:
            for delta in deltas:
                shape.events(delta)
            shape.finished()  # takes its place
    except Refused as refused:
        message = shape.asked.renamed(refused.refusal).message
        kept.response |= {
            "status": "failed",
            "error": {"code": "server_error", "message": message},
        }
    except Exception:
        log.exception("a response in the background failed")
        error = {"code": "server_error", "message": "an error in the server, which has logged it"}
        kept.response |= {"status": "failed", "error": error}
