"""The target's tokenizer and what its configuration says about text. Holds no weights."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from cluster.frontend.bounded import check_template
from cluster.frontend.prompts import ChatPrompt, TextPrompt, TokenPrompt
from cluster.frontend.tools import AUTO, tool_format
from replicas.config import ReplicaConfig
from scheduler.errors import InvalidRequest
from scheduler.messages import ReplicaSpec

if TYPE_CHECKING:
    from replicas.grammars import Grammars


@dataclass(frozen=True)
class TargetText:
    """What a frontend must know of the target."""

    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    """The target's own end-of-text tokens, each of which it can choose."""
    context_len: int
    """Longest content in tokens that the target or the configuration allows."""
    encoder: Any
    """The transformers tokenizer, which adds the special tokens that the target expects and has the
    chat template."""
    embedding_size: int = 0
    """Rows of the target's embedding, which may have more than the tokenizer has tokens."""

    @cached_property
    def spec(self) -> ReplicaSpec:
        """What any replica of this target can hold at most; how many KV blocks is not known."""
        tokens = 1 + max(self.tokenizer.get_vocab(with_added_tokens=True).values())
        return ReplicaSpec(
            kv_blocks=sys.maxsize,
            block_size=1,
            context_len=self.context_len,
            # A token may have been added to the tokenizer alone.
            vocab_size=min(tokens, self.embedding_size or tokens),
            embedding_size=self.embedding_size,
        )

    @classmethod
    def load(cls, config: ReplicaConfig) -> TargetText:
        """Raises OSError for a name that is not found, and ConfigError for a chat template that
        does not compile."""
        # Imported here: the command line imports this module before it knows that it needs it.
        from transformers import AutoConfig

        from replicas.decoding import choosable, read_tokens
        from replicas.models import resolve
        from replicas.names import is_planted

        if is_planted(config.target):
            raise OSError(
                f"{config.target}: a planted model has no tokenizer; it serves benchmarks within"
                " one process, not a cluster"
            )
        encoder, eos_ids = read_tokens(config)
        origin = "target" if config.chat_template is None else "chat_template"
        check_template(getattr(encoder, "chat_template", None), origin)
        options: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
        model = AutoConfig.from_pretrained(resolve(config.target), **options)
        limit = getattr(model, "max_position_embeddings", None) or 1 << 30
        embedding_size = getattr(model, "vocab_size", None) or 0
        made = cls(
            tokenizer=encoder.backend_tokenizer,
            eos_token_ids=choosable(eos_ids, embedding_size),
            context_len=min(limit, config.context_len or limit),
            encoder=encoder,
            embedding_size=embedding_size,
        )
        # So that no request waits for it.
        tool_format(AUTO, made.chat_template)
        return made

    def encode(
        self, text: str, special_tokens: bool = True, field: str = "prompt"
    ) -> tuple[int, ...]:
        """Token ids of a prompt, special tokens such as BOS included unless told otherwise.

        Raises InvalidRequest for a text that the tokenizer has no tokens for; `field`: what asks
        for it.
        """
        try:
            encoded = self.encoder(text, add_special_tokens=special_tokens, verbose=False)
        except Exception as error:
            # tokenizers raises nothing more special.
            raise InvalidRequest(field, f"the tokenizer refuses it: {error}") from None
        return tuple(encoded["input_ids"])

    def tokens(self, prompt: TextPrompt | TokenPrompt) -> tuple[int, ...]:
        """Token ids of a prompt that needs no template."""
        if isinstance(prompt, TokenPrompt):
            return tuple(prompt.ids)
        return self.encode(prompt.text, prompt.special_tokens)

    @property
    def chat_template(self) -> str | None:
        """Of several the one for tools, which transformers takes where some are given."""
        template = getattr(self.encoder, "chat_template", None)
        if isinstance(template, dict):
            return template.get("tool_use") or template.get("default")
        return template

    def told_template(self, prompt: ChatPrompt) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """The turns, and what else transformers renders the chat template with. Up to the
        assistant's next turn.

        Raises InvalidRequest where the target has no chat template.
        """
        if self.chat_template is None and prompt.template is None:
            raise InvalidRequest(
                "messages", "the target has no chat template; send prompt or prompt_token_ids"
            )
        if own := prompt.options.keys() & self._not_the_templates:
            raise InvalidRequest("chat_template_kwargs", f"{min(own)} is not a template's to read")
        # As `apply_chat_template` does.
        turns = [
            {name: value for name, value in turn.items() if value is not None}
            for turn in prompt.messages
        ]
        tools = list(prompt.tools) or None
        try:
            template = self.encoder.get_chat_template(prompt.template, tools)
        except ValueError as error:
            raise InvalidRequest("messages", str(error)) from None
        told = {"tools": tools, "chat_template": template, "add_generation_prompt": prompt.asks}
        if prompt.documents:
            told["documents"] = list(prompt.documents)
        if prompt.goes_on:
            told["continue_final_message"] = True
        return turns, {**told, **self.encoder.special_tokens_map, **prompt.options}

    @cached_property
    def tokenizer_info(self) -> dict[str, Any]:
        """The tokenizer's settings that are plain values."""
        given = getattr(self.encoder, "init_kwargs", {})
        plain = (str, int, float, bool, list)
        info = {name: value for name, value in given.items() if isinstance(value, plain)}
        info |= {
            "tokenizer_class": type(self.encoder).__name__,
            "model_max_length": self.context_len,
            **getattr(self.encoder, "special_tokens_map", {}),
        }
        return info | ({"chat_template": self.chat_template} if self.chat_template else {})

    @cached_property
    def _not_the_templates(self) -> frozenset[str]:
        """Names that mean something to transformers, and that a template is not told by clients."""
        return frozenset(signature(self.encoder.apply_chat_template).parameters)

    def encode_rendered(self, text: str, special_tokens: bool = False) -> tuple[int, ...]:
        """Token ids of what the chat template made. Raises InvalidRequest."""
        ids = self.encode(text, special_tokens, field="messages")
        if not ids:
            raise InvalidRequest("messages", "the target's chat template makes no token of them")
        return ids

    @property
    def end_of_turn_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn of a conversation, each of which the target can choose."""
        from replicas.decoding import end_of_turn_ids

        return end_of_turn_ids(self.encoder, self.eos_token_ids, self.embedding_size)

    @cached_property
    def grammars(self) -> Grammars | None:
        """None for a tokenizer that llguidance cannot read, of which the replicas warn. To make
        them takes a second."""
        from replicas.grammars import Grammars

        vocab = self.spec.logits_size
        try:
            return Grammars(self.tokenizer, self.end_of_turn_ids, vocab)
        except ValueError:
            return None

    @property
    def described(self) -> dict[str, Any]:
        """All that `Grammars` must be told of the target, as JSON has it."""
        return {
            "tokenizer": self.tokenizer.to_str(),
            "ends": self.end_of_turn_ids,
            "vocab": self.spec.logits_size,
        }

    def word_forms(self, word: str) -> set[tuple[int, ...]]:
        """Token ids of a word at the beginning of a text and after a space. Raises InvalidRequest
        for a word that the tokenizer has no tokens for."""
        forms = (word, " " + word.lstrip(" "))
        try:
            encoded = [self.tokenizer.encode(form, add_special_tokens=False) for form in forms]
        except Exception as error:
            raise InvalidRequest("bad_words", f"the tokenizer refuses one: {error}") from None
        return {tuple(encoding.ids) for encoding in encoded if encoding.ids}

    def token_bytes(self, token: int) -> bytes:
        """What one token adds to a text: maybe part of a character."""
        if self.grammars is not None:
            return self.grammars.token_bytes(token)
        # A decoder may drop a space at the beginning of a text, and only there.
        once, twice = (
            self.tokenizer.decode([token] * times, skip_special_tokens=False) for times in (1, 2)
        )
        return twice.removeprefix(once).encode()
