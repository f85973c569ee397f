"""What Lockstep is measured against: transformers' own ways to generate, greedily, untouched.

Every run returns the new tokens in the caller's order, exactly `max_new_tokens` each: the end of a
text is not looked for, so that all ways do the same work.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from replicas.config import ReplicaConfig
from replicas.models.checkpoint import read_model
from replicas.models.load import dtype_name, dtype_of, resolve, resolve_device
from scheduler.messages import Request

PAGE = 32
"""KV positions per page of continuous batching; its default of 256 suits a GPU's kernels."""
_CONTINUOUS_LOGGER = "ContinuousBatchingLogger"


def load_model(config: ReplicaConfig, name: str, role: str = "target") -> Any:
    """A model as transformers loads it, on the device of `config`. Raises OSError."""
    path = resolve(name, role, dtype_name(config))
    model: Any = read_model(path, config.trust_remote_code, dtype_of(config))
    return model.to(resolve_device(config.device))


class DoesNotRun(RuntimeError):
    """A way to generate that this machine or these versions do not offer; the first line of why."""


@dataclass(frozen=True)
class Assistance:
    """How assisted generation drafts."""

    draft_tokens: int
    """Most draft tokens per step."""
    confidence: float = 0.0
    """The draft stops before a token that it gives less than this; 0 never does."""

    def __str__(self) -> str:
        stop = f", stops below {self.confidence:g}" if self.confidence else ""
        return f"{self.draft_tokens} tokens, constant{stop}"


ASSISTANCES = (
    Assistance(20, 0.4),
    Assistance(20, 0.2),
    Assistance(8, 0.4),
    Assistance(4),
    Assistance(6),
    Assistance(8),
)
"""Those that are tried; the first is transformers' default."""


class Transformers:
    """Both models as transformers loads them, with its default attention."""

    def __init__(self, target: Any, draft: Any | None) -> None:
        self._target = target
        self._draft = draft
        # The models' own defaults (a repetition penalty, say) would not be plain greedy decoding.
        target.generation_config = GenerationConfig(pad_token_id=0)

    @classmethod
    def load(cls, config: ReplicaConfig) -> Transformers:
        """The models that `config` names; raises OSError for a name not found. Only a draft model
        can assist transformers' `generate`."""
        drafting, draft = config.drafting, None
        if drafting.method == "draft_model" and drafting.model is not None:
            draft = load_model(config, drafting.model, "draft")
        return cls(load_model(config, config.target), draft)

    @property
    def has_draft(self) -> bool:
        return self._draft is not None

    def batched(self, requests: Sequence[Request], batch: int) -> list[list[int]]:
        """`generate` in batches of neighbours in length, padded on the left."""
        ordered = sorted(range(len(requests)), key=lambda i: len(requests[i].prompt))
        outputs: list[list[int]] = [[] for _ in requests]
        for begin in range(0, len(ordered), batch):
            members = ordered[begin : begin + batch]
            prompts = [requests[i].prompt for i in members]
            width = max(map(len, prompts))
            ids = torch.zeros((len(prompts), width), dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, prompt in enumerate(prompts):
                ids[row, width - len(prompt) :] = torch.tensor(prompt)
                mask[row, width - len(prompt) :] = 1
            new = [requests[i].max_new_tokens for i in members]
            out = self._generate(ids, mask, max(new))
            for row, i in enumerate(members):
                outputs[i] = out[row, width : width + requests[i].max_new_tokens].tolist()
        return outputs

    def assisted(self, requests: Sequence[Request], how: Assistance) -> list[list[int]]:
        """`generate` with the draft as `assistant_model`; it takes one prompt at a time."""
        assert self._draft is not None, "assisted generation needs a draft"
        # Read from the draft's own config and nowhere else.
        self._draft.generation_config = GenerationConfig(
            pad_token_id=0,
            num_assistant_tokens=how.draft_tokens,
            num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=how.confidence,
        )
        outputs = []
        for request in requests:
            ids = torch.tensor([request.prompt])
            out = self._generate(
                ids, torch.ones_like(ids), request.max_new_tokens, assistant_model=self._draft
            )
            outputs.append(out[0, len(request.prompt) :].tolist())
        return outputs

    def continuous(self, requests: Sequence[Request], batch: int) -> list[list[int]]:
        """`generate_batch`: continuous batching over a paged cache. Raises DoesNotRun.

        One length for all: it takes a single max_new_tokens.
        """
        new = max(request.max_new_tokens for request in requests)
        longest = max(len(request.prompt) for request in requests) + new
        prompts = [list(request.prompt) for request in requests]
        try:
            greedily = GenerationConfig(
                pad_token_id=0, eos_token_id=-1, max_new_tokens=new, do_sample=False
            )
            sizes = ContinuousBatchingConfig(
                page_size=PAGE,
                num_blocks=batch * (longest // PAGE + 2),
                max_batch_tokens=max(longest, 512),
                max_requests_per_batch=batch,
            )
            with _listening() as heard:
                answers = self._target.generate_batch(
                    inputs=prompts,
                    generation_config=greedily,
                    continuous_batching_config=sizes,
                    warmup=self._target.device.type == "cuda",
                )
        except Exception as error:
            # A package, a kernel, memory, a defect: none may cost the figures of the other ways.
            raise DoesNotRun(f"{type(error).__name__}: {_first_line(error)}") from error
        failed = [answer.error for answer in answers.values() if answer.error]
        if failed or len(answers) != len(requests):
            why = _first_line([*failed, *heard, "without an answer"][0])
            raise DoesNotRun(f"{len(requests) - len(answers) + len(failed)} requests failed: {why}")
        # In the order of the inputs.
        return [
            list(answer.generated_tokens)[: request.max_new_tokens]
            for answer, request in zip(answers.values(), requests, strict=True)
        ]

    def _generate(self, ids: Any, mask: Any, new: int, **more: Any) -> Any:
        device = self._target.device
        return self._target.generate(
            ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=new,
            do_sample=False,
            **more,
        )


@contextmanager
def _listening() -> Iterator[list[str]]:
    """What continuous batching logs as errors with an exception, which it does not raise; nothing
    is printed meanwhile."""
    heard: list[str] = []

    class Keeping(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info:
                heard.append(record.getMessage())

    logger, keeping = logging.getLogger(_CONTINUOUS_LOGGER), Keeping()
    handlers, propagate = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [keeping], False
    try:
        yield heard
    finally:
        logger.handlers, logger.propagate = handlers, propagate


def _first_line(error: object) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no message"
