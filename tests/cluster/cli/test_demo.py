"""Proves: the demo's answers fit on the screen, and its requests are what the model understands."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from cluster.cli.demo import QUESTIONS, Answer, show
from protos import lockstep_pb2 as pb


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (120, 40), (200, 50), (30, 10)])
def test_eight_answers_fit_on_the_screen(width: int, height: int) -> None:
    answers = [Answer(question, True, "word " * 200 + "the end") for question in QUESTIONS]
    console = Console(width=width, height=height, file=io.StringIO(), record=True)
    console.print(show(answers, width, height))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    if height >= 24:
        assert len(lines) < height
        assert sum(line.count("the end") for line in lines) == len(answers)


def test_a_chat_model_is_asked_by_messages_and_the_tiny_pair_goes_on_with_a_text() -> None:
    turn = pb.ChatMessage(role="user", content="Why?")
    assert list(Answer("Why?", True).request(8).messages) == [turn]
    assert Answer("Why?", False).request(8) == pb.GenerateRequest(prompt="Why?", max_new_tokens=8)
