"""Proves: a target whose tokenizer llguidance cannot read is served, its tokens are named by what
they add to a text, and structures are refused by name; no request waits for the names to be made.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fastapi import FastAPI
from grpc import StatusCode
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cluster.frontend.grpc_api.api import GrpcApi
from cluster.frontend.http_api.app import http_app
from cluster.frontend.target_text import TargetText
from protos import lockstep_pb2 as pb
from replicas import decoding
from tests.cluster.fakes import CONTEXT, VOCAB
from tests.cluster.frontend.http_api.test_http import http_frontend
from tests.cluster.frontend.http_api.test_openai import post
from tests.cluster.frontend.http_api.test_tokens_api import post as post_tokens
from tests.cluster.frontend.rig import PROMPT, PROMPT_IDS, Context, frontend
from tests.cluster.frontend.tools.test_tools import ASKED, HERMES_TEMPLATE, TOOLS

WORDS = "one two ##s three"


def words_alone() -> TargetText:
    """Its tokens are words and the rest of words, as BERT's."""
    names = ["[UNK]", "</s>", *WORDS.split()]
    names += [f"w{number}" for number in range(VOCAB - len(names))]
    vocab = {name: number for number, name in enumerate(names)}
    made = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.decoder = decoders.WordPiece()
    encoder = PreTrainedTokenizerFast(tokenizer_object=made, chat_template=HERMES_TEMPLATE)
    return TargetText(made, (1,), CONTEXT, encoder)


@asynccontextmanager
async def served() -> AsyncIterator[tuple[GrpcApi, FastAPI]]:
    async with frontend(text=words_alone()) as made:
        yield made, http_app(made.service)


async def test_tokens_that_llguidance_cannot_read_have_names() -> None:
    names = [" one", " two", "s", " three"]
    async with served() as (_made, app):
        asked = {"prompt": "one twos three", "echo": True, "logprobs": 1, "max_tokens": 1}
        answer = await post(app, "completions", **asked)
        assert answer.json["choices"][0]["logprobs"]["tokens"][:4] == names
        told = await post_tokens(app, "/tokenize", prompt=asked["prompt"], return_token_strs=True)
        assert told.json["token_strs"] == names


REQUIRED = {"tools": TOOLS, "tool_choice": "required"}


async def test_structures_over_such_tokens_are_refused_by_name() -> None:
    async with served() as (made, app):
        over_http: list[tuple[dict[str, Any], str]] = [
            ({"response_format": {"type": "json_object"}}, "response_format"),
            ({"structured_outputs": {"regex": "a+"}}, "structured_outputs"),
            (REQUIRED, "tools"),
        ]
        for fields, param in over_http:
            answer = await post(app, "chat/completions", messages=ASKED, **fields)
            assert (answer.status, answer.error["param"]) == (400, param)
        context = Context()
        await made.Generate(pb.GenerateRequest(prompt="one", regex="a+"), context)
        assert context.code is StatusCode.INVALID_ARGUMENT
        assert context.details.startswith("regex: ")


async def test_no_request_waits_for_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    made_of: list[object] = []

    class Grammars(decoding.Grammars):
        def __init__(self, *args: Any) -> None:
            made_of.append(args)
            super().__init__(*args)

    monkeypatch.setattr(decoding, "Grammars", Grammars)
    async with http_frontend() as app:
        assert len(made_of) == 1
        fields = {"prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 1}
        answer = await post(app, "completions", **fields)
        assert len(answer.json["choices"][0]["logprobs"]["tokens"]) >= len(PROMPT_IDS)
        assert len(made_of) == 1
