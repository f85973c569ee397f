"""Conversations that a target writes itself (Magpie, arXiv 2406.08464).

The target completes the user's turn of its own chat template, then answers. Every conversation has
a number, and its tokens follow from the number alone; they are kept in the order of the numbers. So
a drawing that was interrupted goes on to what an undisturbed one has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from replicas.errors import TrainingRefused
from replicas.training.conversations import Conversation, ConversationFolder, DrawCounts
from scheduler.messages import FinishReason, Request, Sampling

_MARK = "\ue000"
_NO_DEADLINE_S = 3e8
_TRIED_LEAST, _KEPT_LEAST = 200, 0.02
_PERIOD_MAX, _LOOP_TOKENS = 24, 72
"""A turn runs away whose last so many tokens repeat one piece of at most so many."""


class Output(Protocol):
    tokens: list[int]
    reason: FinishReason | None


class Engine(Protocol):
    """What runs requests: `cluster.local.engine.LocalEngine`."""

    outputs: dict[str, Any]
    results: list[Any]

    def submit(self, request: Request) -> Any: ...

    def cancel(self, request_id: str) -> None: ...

    def advance(self) -> bool: ...


@dataclass(frozen=True)
class TurnFrame:
    """What stands around the turns of a conversation, as ids."""

    before_user: tuple[int, ...]
    end_of_user: int
    """The token that ends the user's turn."""
    before_answer: tuple[int, ...]
    """From the end of the user's turn to where the assistant answers."""
    ends: tuple[int, ...]
    """Tokens that end the answer."""

    @classmethod
    def of(cls, tokenizer: Any, ends: tuple[int, ...]) -> TurnFrame:
        """Raises TrainingRefused for a template that does not say where turns begin and end."""
        if getattr(tokenizer, "chat_template", None) is None:
            raise TrainingRefused(
                "self-generated: the target has no chat template to write questions by; give"
                " conversations with --data, or a template with --chat-template"
            )
        turn = [{"role": "user", "content": _MARK}]
        text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        before, mark, after = text.partition(_MARK)
        ids = tokenizer(after, add_special_tokens=False)["input_ids"]
        if not mark or not ids or ids[0] not in tokenizer.all_special_ids + list(ends):
            raise TrainingRefused(
                "self-generated: the chat template ends the user's turn by no token of its own;"
                " give conversations with --data"
            )
        user = tokenizer(before, add_special_tokens=False)["input_ids"]
        return cls(tuple(user), ids[0], tuple(ids), ends)


@dataclass(frozen=True)
class DrawSettings:
    """How turns are drawn. The answers' temperatures take turns: most serving is greedy, and what
    a head sees then is the target's greedy text; the others bring variety."""

    question_tokens: int = 256
    answer_tokens: int = 512
    question_temperature: float = 0.9
    answer_temperatures: tuple[float, ...] = (0.0, 0.0, 0.7)
    top_k: int = 64
    """Noise for few tokens costs little; for all of a vocabulary, more than the target's pass."""
    seed: int = 0

    def question(self, number: int) -> Sampling:
        return Sampling(self.question_temperature, self.top_k, seed=self.seed + 2 * number)

    def answer(self, number: int) -> Sampling:
        temperature = self.answer_temperatures[number % len(self.answer_temperatures)]
        return Sampling(temperature, self.top_k, seed=self.seed + 2 * number + 1)


@dataclass
class _Turn:
    output: Any
    question: tuple[int, ...] | None = None
    """None while the target writes it."""


def runs_away(tokens: list[int]) -> bool:
    """Whether the last tokens repeat one piece over and over."""
    tail = tokens[-_LOOP_TOKENS:]
    if len(tail) < _LOOP_TOKENS:
        return False
    return any(tail[period:] == tail[:-period] for period in range(1, _PERIOD_MAX + 1))


def _name(number: int, question: bool) -> str:
    """Of a request."""
    return f"{'question' if question else 'answer'} {number}"


class Drawing:
    """Draws conversations into a folder, as many at once as the engine takes."""

    def __init__(
        self,
        engine: Engine,
        rows: int,
        frame: TurnFrame,
        folder: ConversationFolder,
        settings: DrawSettings,
        part_tokens: int = 20_000,
    ) -> None:
        self._engine, self._rows, self._frame = engine, rows, frame
        self._folder, self._settings, self._part_tokens = folder, settings, part_tokens
        self.counts = folder.counts()
        self._begun = self._settled = self.counts.tried
        """Numbers of the next to begin, and of the first that has not come to its end."""
        self._turns: dict[int, _Turn] = {}
        self._done: dict[int, Conversation | str] = {}
        self._kept: list[Conversation] = []
        self._seen = {each.ids[: each.answer] for each in folder}

    def run(
        self, conversations: int, stopped: Callable[[], bool] = lambda: False
    ) -> Iterator[DrawCounts]:
        """Until so many are kept; what was counted, after each batch of the engine. Raises
        OSError, and TrainingRefused for a target that writes none that can be kept."""
        while self.counts.kept < conversations and not stopped():
            while len(self._turns) < self._rows:
                self._begin(self._begun)
                self._begun += 1
            assert self._engine.advance(), "an engine with requests has a batch"
            self._engine.results.clear()
            self._forget()
            self._collect(conversations)
            if sum(len(each.ids) for each in self._kept) >= self._part_tokens:
                self._write()
            counts = self.counts
            if counts.tried >= _TRIED_LEAST and counts.kept < _KEPT_LEAST * counts.tried:
                raise TrainingRefused(
                    f"self-generated: the target writes hardly a conversation: {counts.said()};"
                    " give conversations with --data"
                )
            yield counts
        self._write()

    def _begin(self, number: int) -> None:
        sampling, most = self._settings.question(number), self._settings.question_tokens
        ends = (self._frame.end_of_user, *self._frame.ends)
        self._turns[number] = _Turn(
            self._submit(number, self._frame.before_user, sampling, most, ends)
        )

    def _submit(
        self,
        number: int,
        prompt: tuple[int, ...],
        sampling: Sampling,
        most: int,
        ends: tuple[int, ...],
    ) -> Any:
        request = Request(
            _name(number, number not in self._turns),
            prompt,
            most,
            sampling,
            tuple(dict.fromkeys(ends)),
            timeout_s=_NO_DEADLINE_S,
        )
        return self._engine.submit(request)

    def _collect(self, conversations: int) -> None:
        """Take what has ended, and keep at most so many."""
        for number, turn in list(self._turns.items()):
            tokens, reason = turn.output.tokens, turn.output.reason
            if reason is None and not runs_away(tokens):
                continue
            if reason is None:
                self._engine.cancel(_name(number, turn.question is None))
                self._end(number, "runaways")
            elif turn.question is None:
                self._answer(number, turn, tokens, reason)
            elif reason is FinishReason.STOP or len(tokens) == self._settings.answer_tokens:
                self._end(number, Conversation((*turn.question, *tokens), len(turn.question)))
            else:
                raise TrainingRefused(f"self-generated: {turn.output.message or reason}")
        while self._settled in self._done and self.counts.kept < conversations:
            self._settle(self._done.pop(self._settled))
            self._settled += 1

    def _answer(self, number: int, turn: _Turn, tokens: list[int], reason: FinishReason) -> None:
        if reason is not FinishReason.STOP:
            self._end(number, "runaways")
            return
        if len(tokens) < 2:
            self._end(number, "empty")
            return
        turn.question = (*self._frame.before_user, *tokens[:-1], *self._frame.before_answer)
        sampling, most = self._settings.answer(number), self._settings.answer_tokens
        turn.output = self._submit(number, turn.question, sampling, most, self._frame.ends)

    def _forget(self) -> None:
        """Outputs that have ended and that no turn waits for."""
        wanted = {id(turn.output) for turn in self._turns.values()}
        outputs = self._engine.outputs
        for key in [key for key, output in outputs.items() if id(output) not in wanted]:
            if outputs[key].reason is not None:
                del outputs[key]

    def _end(self, number: int, what: Conversation | str) -> None:
        del self._turns[number]
        self._done[number] = what

    def _settle(self, what: Conversation | str) -> None:
        if isinstance(what, str):
            setattr(self.counts, what, getattr(self.counts, what) + 1)
            return
        question = what.ids[: what.answer]
        if question in self._seen:
            self.counts.duplicates += 1
            return
        self._seen.add(question)
        self._kept.append(what)
        self.counts.kept += 1
        self.counts.tokens += len(what.ids)
        self.counts.answer_tokens += what.answer_tokens

    def _write(self) -> None:
        if self._kept:
            self._folder.append(self._kept, self.counts)
            self._kept = []
