"""Structures are checked, and chat templates rendered, in child processes with bounds."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

from cluster.config import FrontendConfig
from cluster.frontend.bounded import Bounds, Child, Children, Run, TooMuch, WorkRefused
from cluster.frontend.prompts import ChatPrompt
from cluster.frontend.structure import Structure
from cluster.frontend.target_text import TargetText
from scheduler.errors import InvalidRequest

_VERDICTS_MAX = 256
_VERDICT_BYTES_MAX = 16 << 20
"""Of the grammars that are kept, in all."""
_RENDERED = 8
"""So many times the longest prompt a template may make of it: it may escape what it is told."""


@dataclass(frozen=True, slots=True)
class _Verdict:
    """On one structure and the tokens that are committed."""

    grammar: str = ""
    allows_committed: bool = True
    refusal: str = ""
    """Why the structure cannot be used."""

    def grammar_for(self, field: str) -> str:
        """Raises InvalidRequest."""
        if self.refusal:
            raise InvalidRequest(field, self.refusal)
        if not self.allows_committed:
            raise InvalidRequest("committed_token_ids", f"{field} does not allow these tokens")
        return self.grammar


class _Verdicts:
    """Those that were asked for last, by the hash of what they are on."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, _Verdict] = OrderedDict()
        self._bytes = 0

    def get(self, key: bytes) -> _Verdict | None:
        verdict = self._kept.get(key)
        if verdict is not None:
            self._kept.move_to_end(key)
        return verdict

    def put(self, key: bytes, verdict: _Verdict) -> None:
        if key in self._kept:
            return
        self._kept[key] = verdict
        self._bytes += len(verdict.grammar)
        while len(self._kept) > _VERDICTS_MAX or self._bytes > _VERDICT_BYTES_MAX:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= len(oldest.grammar)


class BoundedWork:
    """What a frontend, or a model without one, does in child processes.

    Belongs to no event loop while no work is under way; `..._now` needs none. All raise
    InvalidRequest and Overloaded, which are the caller's, ChildrenFailed and ChildrenClosed.
    """

    def __init__(self, text: TargetText, config: FrontendConfig) -> None:
        self._text = text
        self._verdicts = _Verdicts()
        self._target: IO[bytes] | None = None
        limits = (config.bounded_s_max, config.bounded_mb_max)
        self._templates = Children(
            lambda bounds: Child("rendering", None, bounds),
            Bounds(*limits, result_bytes=_RENDERED * config.prompt_bytes_max),
            config.requests_max,
        )
        self._structures = Children(
            lambda bounds: Child("checking", self._described_target(), bounds),
            Bounds(*limits, result_bytes=_VERDICT_BYTES_MAX),
            config.requests_max,
        )

    def start(self) -> None:
        """Starts in advance what calls may need. Raises OSError."""
        if self._text.chat_template is not None:
            self._templates.start()
        if self._text.grammars is not None:
            self._structures.start()

    def close(self) -> None:
        """Ends the processes, and what waits for them by ChildrenClosed."""
        self._templates.close()
        self._structures.close()

    @property
    def pids(self) -> list[int]:
        """Of the processes that run."""
        return self._templates.pids + self._structures.pids

    async def rendered(self, prompt: ChatPrompt, tenant: str = "") -> str:
        """The text that the chat template makes of a conversation."""
        work = self._template_work(prompt)
        with _refusals_of_template():
            made = await self._templates.at_turn(tenant, lambda run: run(work))
        return made.decode("utf-8", "surrogatepass")

    def rendered_now(self, prompt: ChatPrompt) -> str:
        work = self._template_work(prompt)
        with _refusals_of_template():
            made = self._templates.run_now(work)
        return made.decode("utf-8", "surrogatepass")

    async def grammar(
        self, structure: Structure, committed: Sequence[int] = (), tenant: str = ""
    ) -> str:
        """As a replica wants it, if it allows the committed tokens.

        Verdicts are kept: a structure that is sent again costs nothing, refused or not.
        """
        work, key = self._structure_work(structure, committed)
        verdict = self._verdicts.get(key)
        if verdict is None:
            check = partial(self._checked, work, key)
            verdict = await self._structures.at_turn(tenant, check)
        return verdict.grammar_for(structure.field)

    def grammar_now(self, structure: Structure) -> str:
        work, key = self._structure_work(structure, ())
        verdict = self._verdicts.get(key)
        if verdict is None:
            try:
                verdict = _Verdict(*json.loads(self._structures.run_now(work)))
            except WorkRefused as refused:
                verdict = _Verdict(refusal=str(refused))
            self._verdicts.put(key, verdict)
        return verdict.grammar_for(structure.field)

    async def _checked(self, work: bytes, key: bytes, run: Run) -> _Verdict:
        verdict = self._verdicts.get(key)  # Another call may have had it while this one waited.
        if verdict is None:
            try:
                verdict = _Verdict(*json.loads(await run(work)))
            except WorkRefused as refused:
                verdict = _Verdict(refusal=str(refused))
            self._verdicts.put(key, verdict)
        return verdict

    def _template_work(self, prompt: ChatPrompt) -> bytes:
        turns, told = self._text.told_template(prompt)
        try:
            return json.dumps([[turns], told], default=_as_dict).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest("messages", f"must be JSON: {error}") from None

    def _structure_work(
        self, structure: Structure, committed: Sequence[int]
    ) -> tuple[bytes, bytes]:
        """The work, and its hash."""
        if self._text.grammars is None:
            raise InvalidRequest(structure.field, "llguidance cannot read the target's tokenizer")
        # A token that is none is refused later, like one of a call without a structure.
        vocab = self._text.spec.vocab_size
        known = list(committed) if all(0 <= token < vocab for token in committed) else []
        work = json.dumps([structure.described, known]).encode()
        return work, hashlib.sha256(work).digest()

    def _described_target(self) -> IO[bytes]:
        """What children must know of the target to check structures, once for all of them."""
        if self._target is None:
            self._target = tempfile.TemporaryFile()  # noqa: SIM115  # open while children may start
            self._target.write(json.dumps(self._text.described).encode())
            self._target.flush()
        return self._target


@contextmanager
def _refusals_of_template() -> Iterator[None]:
    """Raises InvalidRequest."""
    try:
        yield
    except TooMuch as error:
        reason = f"the target's chat template {error}"
    except WorkRefused as error:
        reason = f"the target's chat template refuses them: {error}"
    else:
        return
    raise InvalidRequest("messages", reason)


def _as_dict(value: object) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a value is of the type {type(value).__name__}")
