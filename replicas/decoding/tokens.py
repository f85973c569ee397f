"""The target's tokenizer, and which tokens end a text."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from replicas.config import ReplicaConfig
from replicas.grammars import Grammars
from replicas.models import resolve
from replicas.names import is_planted

_log = logging.getLogger("lockstep.replica")


def read_tokens(config: ReplicaConfig) -> tuple[Any, tuple[int, ...]]:
    """transformers' tokenizer of the target, and the ids of the target's own end of text.

    Raises OSError for a name that is not found.
    """
    path = resolve(config.target)
    options: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    encoder = AutoTokenizer.from_pretrained(path, **options)
    if config.chat_template is not None:
        encoder.chat_template = Path(config.chat_template).read_text(encoding="utf-8")
    try:
        eos = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:
        eos = AutoConfig.from_pretrained(path, **options).eos_token_id
    if eos is None:
        eos = encoder.eos_token_id
    return encoder, () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)


def end_of_turn_ids(
    encoder: Any, eos_token_ids: tuple[int, ...], width: int = 0
) -> tuple[int, ...]:
    """Tokens that end a turn of a conversation: the target's own end of text, and the tokenizer's,
    which chat models end their turns with. `width`: as of `choosable`."""
    eos = getattr(encoder, "eos_token_id", None)
    return choosable((*eos_token_ids, *(() if eos is None else (eos,))), width)


def choosable(tokens: Iterable[int], width: int = 0) -> tuple[int, ...]:
    """Each once, without those that the target can never choose: a tokenizer or a configuration may
    name an end of text that the embedding lacks. `width`: of the logits; 0: it is not known."""
    most = width or sys.maxsize
    return tuple(dict.fromkeys(token for token in tokens if 0 <= token < most))


def load_grammars(config: ReplicaConfig, vocab: int) -> Grammars | None:
    """None for a planted target, which has no tokens, and for a tokenizer that llguidance cannot
    read. `vocab`: the width of the logits."""
    if is_planted(config.target):
        return None
    encoder, eos = read_tokens(config)
    try:
        return Grammars(encoder.backend_tokenizer, end_of_turn_ids(encoder, eos, vocab), vocab)
    except ValueError as error:
        _log.warning("%s: requests may have no grammar: %s", config.target, error)
        return None
