"""What an edge hands to the service and gets back: a call, and deltas. Knows no protocol.

The fields have the names of the gRPC request, and an error names them so. Token ids stay
in the edge's own containers until their number is checked: to copy millions of them takes a while.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field as field_of
from typing import Literal

from cluster.config import ClusterConfig
from cluster.frontend.admission.control import Caller
from cluster.frontend.prompts import ChatPrompt, Prompt, TokenPrompt
from cluster.frontend.status_codes import Refusal
from cluster.frontend.structure import Structure
from cluster.frontend.text import TextRules
from cluster.frontend.tools import CallDelta, ToolUse
from scheduler.decoding import TokenLogprobs
from scheduler.errors import InvalidRequest
from scheduler.messages import FinishReason, Priority, Usage
from scheduler.validation import LOGPROB_IDS_MAX, SEED_MAX

MESSAGES_MAX = 1024
"""Turns of one conversation."""
STOPS_MAX, BAD_WORDS_MAX, STRING_CHARS_MAX = 64, 16, 256
"""Stop strings and bad words of a call; characters of each."""
ALLOWED_MAX = 1024
"""Tokens that a call may allow."""
NAME_CHARS_MAX = 128
"""Characters of a request id and of a cache salt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """One call: sequences that are admitted, charged, cancelled and ended together.

    There are `choices` sequences for each prompt; sequence i is choice i % choices of prompt
    i // choices. Choice j samples with seed + j (modulo 2**63), so choice 0 is the one of a call
    for a single choice.
    """

    caller: Caller
    prompts: tuple[Prompt, ...]
    choices: int = 1
    stream: bool = False
    speculative_decoding_stats: bool = False
    """Whether the answer says of each token who proposed it."""
    """Deltas as the text is written; else one for each sequence, with all of it."""
    request_id: str = ""
    """The client's own name for the call."""
    priority: Priority | None = None
    timeout_s: float | None = None
    max_new_tokens: int | None = None
    """None: `default_new_tokens`. 0: only log-probabilities of the prompt are asked for."""
    default_new_tokens: int | None = None
    """None: as many as the context holds."""
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    drawn_seed: int | None = None
    """Taken where no seed is given: sequence i has this one + i, so that equal prompts get answers
    of their own. The service sets it, but on a call that was answered before."""
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    """The text has what ends it."""
    skip_special_tokens: bool = True
    """Special tokens have no text."""
    draft_len: int | None = None
    committed_token_ids: Sequence[int] = ()
    seen_tokens: Sequence[int] = ()
    """How many tokens of each sequence the client has of an earlier stream of the same call, which
    are left out; empty: of none any."""
    cache_salt: str = ""
    logit_bias: Mapping[int, float] = field_of(default_factory=dict)
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_tokens: int = 0
    bad_words: Sequence[str] = ()
    allowed_token_ids: Sequence[int] = ()
    """Tokens of which each new one is; empty: of all."""
    structure: Structure | None = None
    """Of the text behind the reasoning, where there is some."""
    tools: ToolUse | None = None
    include_reasoning: bool = True
    """Whether the answer tells of its reasoning."""
    separate_reasoning: bool = True
    """Whether it does so apart from its text."""
    stream_reasoning: bool = True
    """Whether it does so while the reasoning goes on."""
    thinking_token_budget: int | None = None
    """Tokens of reasoning, at most."""
    logprobs: int | None = None
    logprob_token_ids: Sequence[int] = ()
    """Tokens that are told of in each place, instead of the likeliest ones."""
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    """So many tokens of a prompt are taken; -1: as many as the context holds with the new ones."""
    truncation_side: Literal["left", "right"] = "left"
    """Which end of the prompt goes."""

    @property
    def sequences(self) -> int:
        return len(self.prompts) * self.choices

    @property
    def number_field(self) -> str:
        """The field that makes the sequences so many."""
        return "n" if self.choices > 1 else self.prompts[0].field

    @property
    def sampled(self) -> bool:
        return self.temperature > 0

    def text_rules(self, stop_tokens: Iterable[int], shown: Set[int] = frozenset()) -> TextRules:
        """`stop_tokens`: all that end a sequence, the target's own included; `shown`: special
        tokens that belong to the text."""
        return TextRules(
            tuple(self.stop),
            frozenset(stop_tokens),
            self.min_tokens,
            self.include_stop_str_in_output,
            shown,
            self.skip_special_tokens,
        )


@dataclass(frozen=True, slots=True)
class SequenceEnd:
    """The last word on one sequence. Times in seconds since the call arrived."""

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    usage: Usage
    seed: int | None
    """Where it was sampled."""
    stop: str | None
    """The stop string that ended it."""
    stop_token: int | None
    """The token among the call's `stop_token_ids` that ended it."""
    end_token: int | None
    """The token that ended it, where none of them did: one of the target's own."""
    reasoning_tokens: int
    """Of the new ones."""
    message: str
    first_token_s: float
    total_s: float
    prompt_logprobs: Sequence[TokenLogprobs]
    """Of each prompt token but the first, where they were asked for."""
    refusal: Refusal | None
    """Why it was not served in full. It is the end of the whole call."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What comes next of one sequence; with its last delta comes its end."""

    index: int
    text: str
    """Without its reasoning and its calls."""
    tokens: Sequence[int]
    reasoning: str = ""
    logprobs: Sequence[TokenLogprobs] = ()
    """Of each of the tokens, where they were asked for."""
    calls: Sequence[CallDelta] = ()
    """What comes next of calls of tools; their text is left out."""
    drafted: Sequence[bool] = ()
    """Of each of the tokens, where that was asked for: whether a drafter had proposed it."""
    end: SequenceEnd | None = None


def check_number(call: GenerateCall, config: ClusterConfig) -> None:
    """What can be said before its sequences are counted against limits. Raises InvalidRequest."""
    most = config.frontend.sequences_max
    if call.choices < 1:
        raise InvalidRequest("n", f"must be at least 1, is {call.choices}")
    if call.sequences > most:
        raise InvalidRequest(
            call.number_field, f"{call.sequences} sequences asked for, at most {most} allowed"
        )


def check_call(call: GenerateCall, config: ClusterConfig, context_len: int) -> None:
    """What can be said before tokenizing. Raises InvalidRequest, which names the field."""
    for prompt in call.prompts:
        check_prompt(prompt, config)
    least = 0 if call.prompt_logprobs is not None else 1
    if call.max_new_tokens is not None and call.max_new_tokens < least:
        raise InvalidRequest(
            "max_new_tokens", f"must be at least {least}, is {call.max_new_tokens}"
        )
    if call.thinking_token_budget is not None and call.thinking_token_budget < 0:
        reason = f"must be at least 0, is {call.thinking_token_budget}"
        raise InvalidRequest("thinking_token_budget", reason)
    for name, most, unit in (
        ("committed_token_ids", context_len, "given"),
        ("stop_token_ids", config.scheduler.stop_token_ids_max, "given"),
        ("stop", STOPS_MAX, "given"),
        ("bad_words", BAD_WORDS_MAX, "given"),
        ("allowed_token_ids", ALLOWED_MAX, "given"),
        ("logprob_token_ids", LOGPROB_IDS_MAX, "given"),
        ("request_id", NAME_CHARS_MAX, "characters"),
        ("cache_salt", NAME_CHARS_MAX, "characters"),
    ):
        if (count := len(getattr(call, name))) > most:
            raise InvalidRequest(name, f"{count} {unit}, at most {most} allowed")
    for name in ("stop", "bad_words"):
        for text in getattr(call, name):
            if not 0 < len(text) <= STRING_CHARS_MAX:
                reason = f"a string must have 1 to {STRING_CHARS_MAX} characters, has {len(text)}"
                raise InvalidRequest(name, reason)
    if call.seed is not None and not -SEED_MAX <= call.seed < SEED_MAX:
        raise InvalidRequest("seed", f"must be in [-2**63, 2**63), is {call.seed}")
    if (taken := call.truncate_prompt_tokens) is not None and taken != -1 and taken < 1:
        raise InvalidRequest("truncate_prompt_tokens", f"must be -1 or at least 1, is {taken}")
    if call.structure is not None:
        call.structure.check(call.ignore_eos)
    if call.committed_token_ids:
        if call.sequences > 1:
            raise InvalidRequest("committed_token_ids", "only one sequence can be continued")
        if call.max_new_tokens == 0:
            raise InvalidRequest("committed_token_ids", "only with new tokens, none are asked for")
        if call.sampled and call.seed is None:
            raise InvalidRequest("seed", "a sampled stream can only be continued with its seed")


def check_prompt(prompt: Prompt, config: ClusterConfig) -> None:
    """What can be said of its size. Raises InvalidRequest, which names the field."""
    if isinstance(prompt, ChatPrompt):
        if (turns := len(prompt.messages)) > MESSAGES_MAX:
            raise InvalidRequest("messages", f"{turns} given, at most {MESSAGES_MAX} allowed")
        if any(not turn.get("role") for turn in prompt.messages):
            raise InvalidRequest("messages", "a role must not be empty")
    size, most, unit = prompt.size, config.frontend.prompt_bytes_max, "bytes"
    if isinstance(prompt, TokenPrompt):
        most, unit = config.scheduler.prompt_tokens_max, "tokens"
    if not size:
        raise InvalidRequest(prompt.field, "must not be empty")
    if size > most:
        raise InvalidRequest(prompt.field, f"{size} {unit}, at most {most} allowed")


def call_field(name: str, call: GenerateCall) -> str:
    """The scheduler's name of a field, as the call has it."""
    if name == "max_new_tokens" and call.max_new_tokens is None:
        # What was not sent is not at fault.
        name = "prompt"
    if name == "prompt":
        return call.prompts[0].field
    if name == "grammar" and call.structure is not None:
        return call.structure.field
    return {"committed": "committed_token_ids", "id": "request_id"}.get(name, name)
