"""Proves that the conversations that a target writes follow from their numbers alone, however many
are drawn at once and wherever a drawing was interrupted, and that what is dropped is counted."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from replicas.errors import TrainingRefused
from replicas.training import Conversation, ConversationFolder, Drawing, DrawSettings, TurnFrame
from scheduler.messages import FinishReason, Request

END, HEADER, ANSWER = 1, (5, 6), (1, 7)
FRAME = TurnFrame(HEADER, END, ANSWER, (END,))
SETTINGS = DrawSettings(question_tokens=90, answer_tokens=200)


@dataclass
class ScriptedEngine:
    """Writes a token of every request in each step: which follow from the prompt and the seed."""

    outputs: dict[str, Any] = field(default_factory=dict)
    results: list[Any] = field(default_factory=list)
    texts: dict[str, list[int]] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)

    def submit(self, request: Request) -> Any:
        rng = Random(f"{request.prompt} {request.sampling}")
        kind = rng.random()
        length = rng.randrange(2, 12)
        text = [rng.randrange(10, 14) for _ in range(length)]
        if kind < 0.1:
            text = [11, 12] * 200  # repeats itself
        elif kind < 0.2:
            text = [rng.randrange(10, 60) for _ in range(400)]  # has no end
        else:
            text.append(END)
        self.texts[request.id], self.requests[request.id] = text, request
        output = SimpleNamespace(tokens=[], reason=None, message="")
        self.outputs[request.id] = output
        return output

    def cancel(self, request_id: str) -> None:
        self.outputs[request_id].reason = FinishReason.CANCELLED

    def advance(self) -> bool:
        for name, output in self.outputs.items():
            if output.reason is not None:
                continue
            output.tokens.append(self.texts[name][len(output.tokens)])
            if output.tokens[-1] in self.requests[name].stop_token_ids:
                output.reason = FinishReason.STOP
            elif len(output.tokens) == self.requests[name].max_new_tokens:
                output.reason = FinishReason.LENGTH
        return True


def drawn(folder: Path, rows: int, number: int = 40, steps: int = 10**9) -> ConversationFolder:
    made = ConversationFolder(folder)
    engine = ScriptedEngine()
    drawing = Drawing(engine, rows, FRAME, made, SETTINGS, part_tokens=100)
    for _ in drawing.run(number):
        steps -= 1
        if not steps:
            return made  # killed
    assert len(engine.outputs) <= 2 * rows, "outputs that have ended are forgotten"
    return made


def test_conversations_do_not_depend_on_how_many_are_drawn_at_once(tmp_path: Path) -> None:
    one = drawn(tmp_path / "1", 1)
    for rows in (3, 16):
        several = drawn(tmp_path / str(rows), rows)
        assert list(several) == list(one)
        assert several.counts() == one.counts()


def test_a_drawing_that_was_killed_goes_on_to_the_same(tmp_path: Path) -> None:
    whole = drawn(tmp_path / "whole", 8)
    for steps in (5, 60, 200, 300):
        interrupted = tmp_path / f"{steps}"
        drawn(interrupted, 8, steps=steps)
        assert list(drawn(interrupted, 8)) == list(whole)


def test_duplicates_and_runaways_are_dropped_and_counted(tmp_path: Path) -> None:
    folder = drawn(tmp_path, 8)
    counts, found = folder.counts(), list(folder)
    assert counts.kept == len(found) == 40
    assert counts.tokens == sum(len(each.ids) for each in found)
    assert counts.answer_tokens == sum(each.answer_tokens for each in found)
    assert counts.runaways
    assert counts.duplicates
    questions = [each.ids[: each.answer] for each in found]
    assert len(set(questions)) == len(questions)
    for each in found:
        assert each.ids[: len(HEADER)] == HEADER
        assert each.ids[each.answer - len(ANSWER) : each.answer] == ANSWER
        # An answer that has no end and does not repeat itself is cut at its limit.
        assert each.ids[-1] == END or each.answer_tokens == SETTINGS.answer_tokens


def test_a_target_that_never_ends_a_turn_is_refused(tmp_path: Path) -> None:
    class Endless(ScriptedEngine):
        def submit(self, request: Request) -> Any:
            output = super().submit(request)
            self.texts[request.id] = [11] * 400
            return output

    drawing = Drawing(Endless(), 64, FRAME, ConversationFolder(tmp_path), SETTINGS)
    with pytest.raises(TrainingRefused, match=r"hardly a conversation.*--data"):
        for _ in drawing.run(10):
            pass


@pytest.mark.parametrize("wide", [False, True])
def test_a_folder_returns_what_was_put_in(tmp_path: Path, wide: bool) -> None:
    most = 200_000 if wide else 60_000
    rng, folder = Random(0), ConversationFolder(tmp_path)
    made = [
        Conversation(tuple(rng.randrange(most) for _ in range(rng.randrange(4, 30))), 2)
        for _ in range(9)
    ]
    counts = folder.counts()
    for begin in (0, 3, 6):
        counts.kept += 3
        folder.append(made[begin : begin + 3], counts)
    assert list(ConversationFolder(tmp_path)) == made
    assert ConversationFolder(tmp_path).counts().kept == 9
