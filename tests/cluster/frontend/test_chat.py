"""Proves: a conversation is made a prompt by the target's own chat template, as transformers does,
and is answered like the same tokens; a target without a template, and what a template refuses, are
errors that name the field.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cluster.frontend.calls import ChatPrompt
from cluster.frontend.target_text import TargetText
from protos import lockstep_pb2 as pb
from replicas.config import ReplicaConfig
from scheduler.errors import InvalidRequest
from tests.cluster.fakes import load_fake_text
from tests.cluster.frontend.http_rig import ENCODER, TEXT, TURNS, messages
from tests.cluster.frontend.rig import Context, frontend


def test_a_template_of_a_file_takes_the_place_of_the_targets(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("{{ messages[0].content }}")
    text = TargetText.load(ReplicaConfig(target="tiny", chat_template=str(path)))
    prompt = ChatPrompt([{"role": "user", "content": "hello there"}])
    assert text.encode_chat(prompt) == text.encode("hello there")


async def test_a_conversation_is_answered_like_the_tokens_of_its_template() -> None:
    async with frontend(text=TEXT) as made:
        asked = pb.GenerateRequest(messages=messages(TURNS), max_new_tokens=30)
        answer = await made.Generate(asked, Context())
        rendered = "".join(f"<s>{role}: {content}\n" for role, content in TURNS)
        ids = ENCODER(rendered + "<s>assistant:", add_special_tokens=False)["input_ids"]
        plain = pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=ids), max_new_tokens=30)
        same = await made.Generate(plain, Context())
        assert (answer.text, answer.token_ids) == (same.text, same.token_ids)
        assert answer.end.usage.prompt_tokens == len(ids)


def test_the_tokenizers_own_end_of_text_ends_a_turn() -> None:
    assert TEXT.end_of_turn_ids == (ENCODER.eos_token_id,)
    assert replace(TEXT, eos_token_ids=(7, 1)).end_of_turn_ids == (7, 1)


def test_a_target_without_a_template_says_what_to_send() -> None:
    with pytest.raises(InvalidRequest, match=r"^messages: .*no chat template; send prompt"):
        load_fake_text(ReplicaConfig()).encode_chat(ChatPrompt([{"role": "user", "content": "x"}]))


def test_what_a_template_refuses_is_said() -> None:
    with pytest.raises(InvalidRequest, match=r"^messages: .*unknown role tool"):
        TEXT.encode_chat(ChatPrompt([{"role": "tool", "content": "x"}]))
