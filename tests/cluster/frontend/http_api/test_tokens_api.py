"""Proves: /tokenize and /detokenize make tokens of texts and conversations, and texts of tokens, as
a call would, for the model and within the sizes that a call may have. Tokens have names also where
llguidance cannot read the tokenizer; no request waits for the names to be made. Such a call counts
against its key as any other, and they are worked on one by one, off the event loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cluster.config_sources import from_args
from cluster.frontend import service
from cluster.frontend.admission.keys import add
from cluster.frontend.bounded_work import BoundedWork
from cluster.frontend.structure import Structure
from cluster.frontend.target_text import TargetText
from replicas import grammars
from scheduler.errors import InvalidRequest
from tests.cluster.fakes import CONTEXT
from tests.cluster.frontend.http_rig import ENCODER, TEXT, beginning, http, http_frontend, post
from tests.cluster.frontend.rig import CONFIG, PROMPT, PROMPT_IDS
from tests.cluster.wire import until

TURNS = [{"role": "user", "content": "the fox?"}]
TOOL = {"type": "function", "function": {"name": "look"}}
FEW = from_args(
    {
        "frontend": {"prompt_bytes_max": 40},
        "scheduler": {"prompt_tokens_max": 9},
        "replica.target": "tiny",
    }
)


async def test_texts_become_tokens_and_tokens_texts() -> None:
    async with http_frontend(replicas=0, text=TEXT) as app:
        found = (await post(app, "/tokenize", prompt=PROMPT, return_token_strs=True)).json
        assert found["tokens"] == PROMPT_IDS
        names = [TEXT.tokenizer.id_to_token(token) for token in PROMPT_IDS]
        assert found["token_strs"] == names
        empty = (await post(app, "/tokenize", prompt="")).json
        assert (empty["count"], empty["token_strs"]) == (0, None)
        talk = await post(app, "/tokenize", messages=TURNS, model="tiny")
        assert talk.json["count"] > len(PROMPT_IDS)
        back = await post(app, "/detokenize", tokens=PROMPT_IDS, model=None)
        assert back.json == {"prompt": PROMPT}
        assert (await http(app, path="/version")).json["version"]


async def test_tools_count_in_a_prompt_also_where_no_form_of_calls_is_known() -> None:
    async with http_frontend(replicas=0, text=TEXT) as app:
        counts = [
            (await post(app, "/tokenize", messages=TURNS, **more)).json["count"]
            for more in ({}, {"tools": [TOOL]})
        ]
        assert counts[0] == counts[1], "the template tells of no tools"


async def test_a_checkout_that_is_not_installed_serves_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", unknown)
    async with http_frontend(replicas=0, text=TEXT) as app:
        assert (await http(app, path="/version")).json["version"] == "0+source"


async def test_special_tokens_tools_and_options_of_the_template() -> None:
    async with http_frontend(replicas=0, text=replace(TEXT, encoder=beginning())) as app:

        async def tokens(**fields: Any) -> list[int]:
            found: list[int] = (await post(app, "/tokenize", **fields)).json["tokens"]
            return found

        assert await tokens(prompt=PROMPT) == [0, *PROMPT_IDS]
        assert await tokens(prompt=PROMPT, add_special_tokens=False) == PROMPT_IDS
        plain = await tokens(messages=TURNS)
        assert await tokens(messages=TURNS, add_special_tokens=True) == [0, *plain]
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
        ("tokenize", {"prompt": "x", "continue_final_message": True}, "continue_final_message"),
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


# --------------------------------------------------------------------------- what they count for


class Held:
    """Stands for the tokenizer: counts who is in it, and lets nobody out before it is told to."""

    def __init__(self, real: Callable[..., tuple[int, ...]]) -> None:
        self.free = threading.Event()
        self.inside = self.most = 0
        self.loop_thread = threading.get_ident()
        self._real = real

    def __call__(self, text: TargetText, *args: Any) -> tuple[int, ...]:
        assert threading.get_ident() != self.loop_thread
        self.inside += 1
        self.most = max(self.most, self.inside)
        assert self.free.wait(60)
        self.inside -= 1
        return self._real(text, *args)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    made = Held(TargetText.tokens)
    # A class's attribute would be no method of its objects.
    monkeypatch.setattr(TargetText, "tokens", lambda text, *args: made(text, *args))
    return made


async def test_calls_take_turns_off_the_event_loop(held: Held) -> None:
    async with http_frontend(replicas=0, text=TEXT) as app:
        asking = [asyncio.ensure_future(post(app, "/tokenize", prompt=PROMPT)) for _ in range(10)]
        await until(lambda: held.inside > 0)
        held.free.set()
        assert {(await answer).status for answer in asking} == {200}
        assert held.most == 1


async def test_a_call_counts_as_one_in_flight(held: Held, tmp_path: Path) -> None:
    headers = {"authorization": f"Bearer {add(tmp_path / 'keys', 'alice', requests_max=1)}"}
    config = from_args({"replica.target": "tiny", "auth": {"keys_file": str(tmp_path / "keys")}})
    async with http_frontend(replicas=0, text=TEXT, config=config) as app:
        asking = asyncio.ensure_future(post(app, "/tokenize", headers, prompt=PROMPT))
        await until(lambda: held.inside > 0)
        for path, fields in (
            ("/tokenize", {"prompt": PROMPT}),
            ("/detokenize", {"tokens": PROMPT_IDS}),
            ("/v1/completions", {"prompt": PROMPT}),
        ):
            answer = await post(app, path, headers, **fields)
            assert answer.status == 429
            assert "retry-after" in answer.headers
        held.free.set()
        assert (await asking).status == 200
        assert (await post(app, "/detokenize", headers, tokens=PROMPT_IDS)).status == 200


@pytest.mark.parametrize(
    ("path", "fields"),
    [("/tokenize", {"prompt": PROMPT * 10}), ("/detokenize", {"tokens": PROMPT_IDS * 10})],
)
async def test_tokens_count_against_the_keys_rate(
    path: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    key = add(tmp_path / "keys", "alice", tokens_per_minute=15)
    headers = {"authorization": f"Bearer {key}"}
    config = from_args({"replica.target": "tiny", "auth": {"keys_file": str(tmp_path / "keys")}})
    async with http_frontend(replicas=0, text=TEXT, config=config) as app:
        assert (await post(app, path, headers, **fields)).status == 200
        answer = await post(app, path, headers, **fields)
        assert answer.status == 429
        assert "tokens_per_minute of key alice" in answer.error["message"]
        assert int(answer.headers["retry-after"]) > 0


async def test_only_so_many_calls_wait(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_TURNS_MAX", 2)
    async with http_frontend(replicas=0, text=TEXT) as app:
        asking = [asyncio.ensure_future(post(app, "/tokenize", prompt=PROMPT)) for _ in range(3)]
        await until(lambda: any(answer.done() for answer in asking))
        held.free.set()
        found = sorted([(await answer).status for answer in asking])
        assert found == [200, 200, 429]


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
