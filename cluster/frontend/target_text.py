"""The target's tokenizer and what its configuration says about text. Holds no weights."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from replicas.config import ReplicaConfig
from scheduler.errors import InvalidRequest
from scheduler.messages import ReplicaSpec


@dataclass(frozen=True)
class TargetText:
    """What a frontend must know of the target."""

    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    """The target's own end-of-text tokens."""
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
        return ReplicaSpec(
            kv_blocks=sys.maxsize,
            block_size=1,
            context_len=self.context_len,
            vocab_size=1 + max(self.tokenizer.get_vocab(with_added_tokens=True).values()),
            embedding_size=self.embedding_size,
        )

    @classmethod
    def load(cls, config: ReplicaConfig) -> TargetText:
        """Raises OSError for a name that is not found."""
        # Imported here: the command line imports this module before it knows that it needs it.
        from transformers import AutoConfig, AutoTokenizer, GenerationConfig

        from replicas.models.pair import resolve
        from replicas.models.shapes import is_planted

        if is_planted(config.target):
            raise OSError(
                f"{config.target}: a planted model has no tokenizer; it serves benchmarks within"
                " one process, not a cluster"
            )
        path = resolve(config.target)
        options: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
        encoder = AutoTokenizer.from_pretrained(path, **options)
        model = AutoConfig.from_pretrained(path, **options)
        try:
            generation_eos = GenerationConfig.from_pretrained(path).eos_token_id
        except OSError:
            generation_eos = model.eos_token_id
        eos = generation_eos if generation_eos is not None else encoder.eos_token_id
        eos_ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
        limit = getattr(model, "max_position_embeddings", None) or 1 << 30
        return cls(
            tokenizer=encoder.backend_tokenizer,
            eos_token_ids=eos_ids,
            context_len=min(limit, config.context_len or limit),
            encoder=encoder,
            embedding_size=getattr(model, "vocab_size", None) or 0,
        )

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a prompt, special tokens such as BOS included."""
        return tuple(self.encoder(text, verbose=False)["input_ids"])

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Token ids of a conversation of `role` and `content`, up to the assistant's next turn.

        Raises InvalidRequest where the target has no chat template or the template refuses.
        """
        if getattr(self.encoder, "chat_template", None) is None:
            raise InvalidRequest(
                "messages", "the target has no chat template; send prompt or prompt_token_ids"
            )
        # Imported here like transformers, which brings it along.
        from jinja2 import TemplateError

        try:
            ids = self.encoder.apply_chat_template(
                list(messages),
                add_generation_prompt=True,
                return_dict=False,
                tokenizer_kwargs={"verbose": False},
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise InvalidRequest(
                "messages", f"the target's chat template refuses them: {error}"
            ) from None
        if not ids:
            raise InvalidRequest("messages", "the target's chat template makes no token of them")
        return tuple(ids)

    @property
    def end_of_turn_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn of a conversation: the target's own end of text, and the
        tokenizer's, which chat models end their turns with."""
        eos = getattr(self.encoder, "eos_token_id", None)
        return tuple(dict.fromkeys((*self.eos_token_ids, *(() if eos is None else (eos,)))))
