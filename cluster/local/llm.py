"""A model in this process: prompts in, completions out, with speculation and without a cluster.

llm = LLM("smollm2", speculative_config={"method": "suffix"})
for completion in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
    print(completion.text)
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass as validated

from cluster.frontend.admission.control import Caller
from cluster.frontend.bounded_work import BoundedWork
from cluster.frontend.calls import GenerateCall, check_call
from cluster.frontend.prompts import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from cluster.frontend.requests import RequestFactory
from cluster.frontend.structure import Structure
from cluster.frontend.target_text import TargetText
from cluster.frontend.text import TextStream
from cluster.local.arguments import TEN_YEARS_S, Arguments
from cluster.local.console import Bars
from cluster.local.engine import LocalEngine, Output
from replicas.parallel import load_replica
from scheduler.config import SchedulerConfig
from scheduler.decoding import TokenLogprobs
from scheduler.errors import InvalidRequest, LockstepError
from scheduler.messages import FinishReason, Request, Usage


@validated(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class SamplingParams:
    """How a completion is written; the names of the gRPC request, which says more of each. What is
    no value of a field's type, or no field, raises pydantic's ValidationError, which names it.

    Ranges, beyond which InvalidRequest names the field: temperature in [0, 1e6]; top_k in
    [0, 2**31), 0 keeps all; top_p in (0, 1]; min_p in [0, 1]; seed in [0, 2**63);
    repetition_penalty above 0; frequency_penalty and presence_penalty in [-2, 2]; biases in
    [-100, 100]; logprobs and prompt_logprobs in [0, max_logprobs], or -1; min_tokens in
    [0, max_tokens]. Of json_schema, regex, choice and grammar at most one.
    """

    max_tokens: int = 256
    """0 with prompt_logprobs, where only those are asked for."""
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: str | Sequence[str] = ()
    allowed_token_ids: Sequence[int] = ()
    logprobs: int | None = None
    logprob_token_ids: Sequence[int] = ()
    prompt_logprobs: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    choice: str | Sequence[str] | None = None
    grammar: str | None = None

    def to_call(self, prompt: Prompt) -> GenerateCall:
        """Raises InvalidRequest."""
        names = ("json_schema", "regex", "choice", "grammar")
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) > 1:
            raise InvalidRequest(given[1], f"{given[0]} is given as well")
        structure = None
        if given:
            structure = Structure(given[0], _several(getattr(self, given[0])))  # type: ignore[arg-type]
        others = {
            name: _several(getattr(self, name))
            for name in self.__dataclass_fields__
            if name not in (*names, "max_tokens")
        }
        for word in others["bad_words"]:
            word.encode()  # A tokenizer does not say what is wrong with one that is no UTF-8.
        return GenerateCall(
            caller=Caller(),
            prompts=(prompt,),
            max_new_tokens=self.max_tokens,
            structure=structure,
            **others,
        )


def _several(given: Any) -> Any:
    """One text as a list of texts, anything else as it is."""
    return (given,) if isinstance(given, str) else given


def _prompt(index: int, given: Any) -> Prompt:
    """Of a text or of token ids. Raises InvalidRequest, which names the prompt."""
    if isinstance(given, str):
        return TextPrompt(given)
    try:
        # Those of a numpy array, too.
        ids = None if isinstance(given, bytes | Mapping) else tuple(map(operator.index, given))
    except TypeError:
        ids = None
    if ids is None:
        raise InvalidRequest(f"prompt {index}", "must be a text or a list of token ids")
    return TokenPrompt(ids)


@dataclass(frozen=True)
class Completion:
    """What was written for one prompt."""

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: str
    """`stop` or `length`."""
    usage: Usage
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs]


class PromptFailed(LockstepError):
    """A prompt could not be finished; the message names it and says why."""

    def __init__(self, prompt: int, reason: str, completions: list[Completion | None]) -> None:
        super().__init__(f"prompt {prompt}: {reason}")
        self.completions = completions
        """In the order of the prompts; None for each that failed."""


class LLM:
    """A target and its drafter in this process. Not thread-safe."""

    def __init__(
        self,
        model: str = "demo",
        *,
        speculative_config: Mapping[str, Any] | None = None,
        rows_max: int | None = None,
        max_logprobs: int = SchedulerConfig().max_logprobs,
        seed: int | None = None,
        revision: str | None = None,
        **replica: Any,
    ) -> None:
        """`model`: as `lockstep serve --target` takes it, `revision` too. `replica`: settings of
        the section `replica`, as `dtype` or `context_len`, also by the names of other servers, as
        `max_model_len`. `rows_max`: rows of a step. `max_logprobs`: log-probabilities that a
        prompt may ask for at each token; -1: no limit, and -1 asks for the whole vocabulary.
        `seed`: prompt i of a call samples with seed + i where its `sampling_params` name none;
        without it each draws one.

        Raises ConfigError, and what loading raises.
        """
        given = Arguments(
            model, speculative_config, rows_max, max_logprobs, seed, revision, replica
        )
        with given.named():
            self._config = given.settings()
            self._text = TargetText.load(self._config.replica)
            self._bounded = BoundedWork(self._text, self._config.frontend)
            self._replica = load_replica(self._config.planned_replica)
        self._factory = RequestFactory(self._text, self._config)
        self._number = 0

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = True,
    ) -> list[Completion]:
        """Completions in the order of the prompts, which are texts or token ids.

        `sampling_params`: for all, or one for each. Raises InvalidRequest, which names the prompt,
        and PromptFailed.
        """
        made = [_prompt(index, prompt) for index, prompt in enumerate(_several(prompts))]
        return self._run(made, sampling_params, progress)

    def chat(
        self,
        conversations: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = True,
    ) -> list[Completion]:
        """The assistant's next turn of one conversation or of several, each a list of turns with
        `role` and `content`. Raises as `generate`."""
        one = bool(conversations) and isinstance(conversations[0], Mapping)
        several: Any = [conversations] if one else conversations
        for index, turns in enumerate(several):
            if not isinstance(turns, Sequence) or not all(isinstance(it, Mapping) for it in turns):
                raise InvalidRequest(f"prompt {index}", "must be a list of turns")
        return self._run([ChatPrompt(turns) for turns in several], sampling_params, progress)

    def _run(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        progress: bool,
    ) -> list[Completion]:
        if params is None or isinstance(params, SamplingParams):
            every = [params or SamplingParams()] * len(prompts)
        else:
            every = list(params)
        if not all(isinstance(asked, SamplingParams) for asked in every):
            raise InvalidRequest("sampling_params", "must be SamplingParams, or a list of them")
        if len(every) != len(prompts):
            raise InvalidRequest("sampling_params", f"{len(every)} for {len(prompts)} prompts")
        engine = LocalEngine(self._replica, self._config.scheduler, isolates=True)
        try:
            written = self._written(engine, prompts, every, progress)
        finally:
            # The next call's engine takes all blocks for free, and rows may be left: of an
            # interrupt, or with a batch that was under way when a stop string ended them.
            if self._replica.broken is None:
                self._replica.release(self._replica.residents)
        completions = [writing.completion() for writing in written]
        if None in completions:
            failed = completions.index(None)
            reason = written[failed].output.message or str(engine.error)
            raise PromptFailed(failed, reason, completions) from engine.error
        return completions  # type: ignore[return-value]

    def _written(
        self,
        engine: LocalEngine,
        prompts: Sequence[Prompt],
        every: Sequence[SamplingParams],
        progress: bool,
    ) -> list[_Writing]:
        written = []
        seed = self._factory.drawn_seed()
        for index, (prompt, asked) in enumerate(zip(prompts, every, strict=True)):
            try:
                call = replace(asked.to_call(prompt), drawn_seed=seed + index)
                request = self._request(call, prompt)
                output = engine.submit(request)
            except InvalidRequest as error:
                names = {"prompt": prompt.field, "max_new_tokens": "max_tokens"}
                name = f"prompt {index}: {names.get(error.field, error.field)}"
                raise InvalidRequest(name, error.reason) from None
            except UnicodeEncodeError as error:
                raise InvalidRequest(f"prompt {index}", f"is no text in UTF-8: {error}") from None
            rules = call.text_rules(request.stop_token_ids)
            stream = TextStream(self._text.tokenizer, request.prompt, rules)
            written.append(_Writing(request, stream, output, scores=call.max_new_tokens == 0))
        with Bars(shown=progress) as bars:
            left = list(written)
            while left and engine.advance():
                left = [writing for writing in left if not writing.read(engine)]
                bars.note("prompts", len(written) - len(left), len(written))
        if self._replica.broken is None:
            engine.check_finished()
        return written

    def _request(self, call: GenerateCall, prompt: Prompt) -> Request:
        text = self._text
        check_call(call, self._config, text.context_len)
        grammar = "" if call.structure is None else self._bounded.grammar_now(call.structure)
        if isinstance(prompt, ChatPrompt):
            rendered = self._bounded.rendered_now(prompt)
            tokens = text.encode_rendered(rendered, prompt.special_tokens)
        else:
            tokens = text.tokens(prompt)
        call = replace(call, timeout_s=TEN_YEARS_S)
        tokens = self._factory.truncated(call, tokens)
        [request] = self._factory.requests(call, 0, tokens, grammar)
        self._number += 1
        return replace(request, id=str(self._number))


@dataclass
class _Writing:
    """One prompt on its way."""

    request: Request
    stream: TextStream
    output: Output
    scores: bool = False
    """Only log-probabilities of the prompt are asked for."""
    text: str = ""
    tokens: int = 0
    """Those that the text has seen."""
    stop: str | None = None

    def read(self, engine: LocalEngine) -> bool:
        """Make text of what is new; whether it has ended."""
        new = [] if self.scores else self.output.tokens[self.tokens :]
        piece = self.stream.push(new)
        self.text += piece.text
        self.tokens += piece.tokens
        self.stop = piece.stop
        if self.stop is not None:
            engine.cancel(self.request.id)
            return True
        return self.output.reason is not None

    def completion(self) -> Completion | None:
        """None of one that failed."""
        reason = self.output.reason
        if self.stop is None:
            if reason not in (FinishReason.STOP, FinishReason.LENGTH):
                return None
            piece = self.stream.finish()
            self.text, self.stop = self.text + piece.text, piece.stop
        return Completion(
            text=self.text,
            token_ids=self.output.tokens[: self.tokens],
            prompt_token_ids=list(self.request.prompt),
            finish_reason="stop" if self.stop is not None else str(reason),
            usage=replace(self.output.usage, completion_tokens=self.tokens),
            logprobs=self.output.logprobs[: self.tokens],
            prompt_logprobs=self.output.prompt_logprobs,
        )
