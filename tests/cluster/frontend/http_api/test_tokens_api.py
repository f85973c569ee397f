"""Proves: /tokenize and /detokenize make tokens of texts and conversations, and texts of tokens, as
a call would, for the model and within the sizes that a call may have. Tokens have names also where
llguidance cannot read the tokenizer; no request waits for the names to be made.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cluster.config_sources import from_args
from cluster.frontend.bounded import BoundedWork
from cluster.frontend.structure import Structure
from cluster.frontend.target_text import TargetText
from replicas import grammars
from scheduler.errors import InvalidRequest
from tests.cluster.fakes import CONTEXT
from tests.cluster.frontend.http_rig import ENCODER, TEXT, beginning, http, http_frontend, post
from tests.cluster.frontend.rig import CONFIG, PROMPT, PROMPT_IDS

TURNS = [{"role": "user", "content": "the fox?"}]
TOOL = {"type": "function", "function": {"name": "look"}}
FEW = from_args(
    {"frontend": {"prompt_bytes_max": 40}, "scheduler": {"prompt_tokens_max": 9}, "target": "tiny"}
)


async def test_texts_become_tokens_and_tokens_texts() -> None:
    async with http_frontend(replicas=0, text=TEXT) as app:
        found = (await post(app, "/tokenize", prompt=PROMPT, return_token_strs=True)).json
        assert found["tokens"] == PROMPT_IDS
        assert "".join(found["token_strs"]) == PROMPT
        assert (await post(app, "/tokenize", prompt="")).json["count"] == 0
        talk = await post(app, "/tokenize", messages=TURNS, model="tiny")
        assert talk.json["count"] > len(PROMPT_IDS)
        back = await post(app, "/detokenize", tokens=PROMPT_IDS, model=None)
        assert back.json == {"prompt": PROMPT}
        assert (await http(app, path="/version")).json["version"]


async def test_special_tokens_tools_and_options_of_the_template() -> None:
    async with http_frontend(replicas=0, text=replace(TEXT, encoder=beginning())) as app:

        async def tokens(**fields: Any) -> list[int]:
            found: list[int] = (await post(app, "/tokenize", **fields)).json["tokens"]
            return found

        assert await tokens(prompt=PROMPT) == [0, *PROMPT_IDS]
        assert await tokens(prompt=PROMPT, add_special_tokens=False) == PROMPT_IDS
        plain = await tokens(messages=TURNS)
        offered = await tokens(messages=TURNS, tools=[TOOL])
        options = {"documents": "x"}
        assert len(offered) > len(plain)
        assert await tokens(messages=TURNS, chat_template_kwargs={"answer": 42}) == plain
        own = await post(app, "/tokenize", messages=TURNS, chat_template_kwargs=options)
        assert own.error["param"] == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": "x", "messages": TURNS}, "prompt"),
        ("tokenize", {"prompt": "x", "tools": [TOOL]}, "tools"),
        ("tokenize", {"messages": TURNS, "tools": [TOOL]}, "tools"),
        ("tokenize", {"messages": TURNS, "add_special_tokens": True}, "add_special_tokens"),
        ("tokenize", {"prompt": "x" * 41}, "prompt"),
        ("tokenize", {"messages": [{"role": "user", "content": "x" * 41}]}, "messages"),
        ("tokenize", {"messages": []}, "messages"),
        ("tokenize", {"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ("tokenize", {"prompt": "x", "model": "other"}, "model"),
        ("detokenize", {"tokens": [5], "model": "other"}, "model"),
        ("detokenize", {"tokens": [99999]}, "tokens"),
        ("detokenize", {"tokens": [-1]}, "tokens"),
        ("detokenize", {"tokens": [5] * 10}, "tokens"),
    ],
    ids=str,
)
async def test_what_a_call_may_not_ask_is_refused(
    path: str, fields: dict[str, Any], param: str
) -> None:
    async with http_frontend(replicas=0, text=TEXT, config=FEW) as app:
        answer = await post(app, f"/{path}", **fields)
        assert (answer.status, answer.error["param"]) == (404 if param == "model" else 400, param)


def test_the_tokenizers_own_end_of_text_ends_a_turn() -> None:
    assert TEXT.end_of_turn_ids == (ENCODER.eos_token_id,)
    assert replace(TEXT, eos_token_ids=(7, 1)).end_of_turn_ids == (7, 1)


# --------------------------------------------------------------------------- names of tokens


async def test_tokens_that_llguidance_cannot_read_have_names_and_no_structures() -> None:
    """They are words and the rest of words, as BERT's."""
    names = ["[UNK]", "</s>", "one", "two", "##s", "three"]
    vocab = {name: number for number, name in enumerate(names)}
    made = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.decoder = decoders.WordPiece()
    text = TargetText(made, (1,), CONTEXT, PreTrainedTokenizerFast(tokenizer_object=made))
    tokens = text.encode("one twos three")
    assert [text.token_bytes(token) for token in tokens] == [b" one", b" two", b"s", b" three"]
    with pytest.raises(InvalidRequest, match=r"^regex: llguidance cannot read"):
        await BoundedWork(text, CONFIG.frontend).grammar(Structure("regex", ["a+"]))


async def test_no_request_waits_for_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    made_of: list[object] = []

    class Counted(grammars.Grammars):
        def __init__(self, *args: Any) -> None:
            made_of.append(args)
            super().__init__(*args)

    monkeypatch.setattr(grammars, "Grammars", Counted)
    async with http_frontend() as app:
        assert len(made_of) == 1
        await post(app, "completions", prompt=PROMPT, echo=True, logprobs=1, max_tokens=1)
        assert len(made_of) == 1
