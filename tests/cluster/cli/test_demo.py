"""Proves: the demo's requests are what the model understands."""

from __future__ import annotations

from cluster.cli.demo import Answer
from protos import lockstep_pb2 as pb


def test_a_chat_model_is_asked_by_messages_and_the_tiny_pair_goes_on_with_a_text() -> None:
    turn = pb.ChatMessage(role="user", content="Why?")
    assert list(Answer("Why?", True).request(8).messages) == [turn]
    assert Answer("Why?", False).request(8) == pb.GenerateRequest(prompt="Why?", max_new_tokens=8)
