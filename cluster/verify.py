"""Compare Lockstep's output with the target alone, token for token, in one process.

Greedy output is compared with transformers' own `generate` of the target alone at batch 1, sampled
output with this engine at batch 1 without speculation. Needs no Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from cluster.frontend.target_text import TargetText
from cluster.local.engine import NO_QUEUE_LIMITS, LocalEngine, Output
from replicas.config import ReplicaConfig
from scheduler.config import SchedulerConfig
from scheduler.errors import InvalidRequest
from scheduler.messages import Request, Sampling
from scheduler.validation import blocks_needed, check_request

if TYPE_CHECKING:
    from replicas.models import Judgement

Progress = Callable[[str, int, int], None]
"""Called with a phase, how many prompts are done, how many there are."""


@dataclass(frozen=True)
class Difference:
    """The first place where an output leaves the reference; None past the end of either."""

    prompt: int
    position: int
    """Index among the new tokens."""
    expected: int | None
    got: int | None
    judgement: Judgement | None = None
    """Both ways held against float64; of greedy output, where both have a token there."""

    @property
    def tie(self) -> bool:
        """The two tokens tie below the noise of float32: neither way is wrong."""
        return self.judgement is not None and self.judgement.tie


@dataclass(frozen=True)
class VerifyReport:
    """What was compared, and where it differs."""

    against: str
    prompts: int
    tokens: int
    """Committed by the run that was verified."""
    accepted_tokens: int
    draft_tokens: int
    differences: tuple[Difference, ...]

    @property
    def identical(self) -> int:
        return self.prompts - len(self.differences)

    @property
    def ties(self) -> int:
        return sum(difference.tie for difference in self.differences)

    def said(self) -> list[str]:
        """What was found, a line each."""
        share = self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0
        lines = [
            f"against {self.against}: {self.tokens} tokens, {share:.1%} of drafts accepted",
            f"{self.identical} of {self.prompts} outputs identical",
        ]
        if self.ties:
            lines.append(f"{self.ties} part at a tie below the noise of float32")
        for difference in self.differences:
            lines.append(
                f"  prompt {difference.prompt}: first difference at new token"
                f" {difference.position}: expected {difference.expected}, got {difference.got}"
            )
            if (judged := difference.judgement) is not None:
                lines.append(
                    f"    in float64 the expected logit is {judged.gap:+.1e} above the other and"
                    f" token {judged.choice} is chosen; the error of transformers' float32 is"
                    f" {judged.error_expected:.1e}, of Lockstep's {judged.error_got:.1e}:"
                    f" {'a tie' if judged.tie else 'no tie'}"
                )
        return lines


def verify(
    prompts: Sequence[str],
    replica_config: ReplicaConfig,
    scheduler_config: SchedulerConfig,
    sampling: Sampling,
    max_new_tokens: int,
    progress: Progress | None = None,
) -> VerifyReport:
    """Run the prompts both ways; raises InvalidRequest, naming the prompt, for one that no
    replica could serve."""
    from replicas.parallel import load_replica  # torch is heavy, and --help should not wait

    scheduler_config = scheduler_config.model_copy(update=NO_QUEUE_LIMITS)
    text = TargetText.load(replica_config)
    requests = [
        Request(
            id=str(i),
            prompt=text.encode(prompt),
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop_token_ids=text.eos_token_ids,
        )
        for i, prompt in enumerate(prompts)
    ]
    replica = load_replica(just_enough(replica_config, scheduler_config, text, requests))
    for request in requests:
        try:
            check_request(request, scheduler_config, replica.spec)
        except InvalidRequest as error:
            raise InvalidRequest(f"prompt {request.id}: {error.field}", error.reason) from error
    note = progress or (lambda phase, done, total: None)
    outputs = _run(LocalEngine(replica, scheduler_config), requests, note, "lockstep")
    if sampling.temperature > 0:
        against = "draft length 0 at batch 1"
        alone = scheduler_config.model_copy(update={"rows_max": 1, "draft_len": 0})
        plain = _run(LocalEngine(replica, alone), requests, note, "plain")
        references = [output.tokens for output in plain]
    else:
        against = "transformers' generate at batch 1"
        references = []
        for tokens in transformers_greedy(replica_config, requests, text.eos_token_ids):
            references.append(tokens)
            note("plain", len(references), len(requests))
    judges = sampling.temperature == 0 and replica_config.tensor_parallel == 1
    outputs_of = [output.tokens for output in outputs]
    own = (lambda: replica) if judges else None
    found = differences(references, outputs_of, requests, replica_config, own)
    return VerifyReport(
        against=against,
        prompts=len(requests),
        tokens=sum(len(output.tokens) for output in outputs),
        accepted_tokens=sum(output.usage.accepted_tokens for output in outputs),
        draft_tokens=sum(output.usage.draft_tokens for output in outputs),
        differences=tuple(found),
    )


def just_enough(
    config: ReplicaConfig, scheduler: SchedulerConfig, text: TargetText, requests: Sequence[Request]
) -> ReplicaConfig:
    """Memory for these requests only, where none is given: a second copy of the target must fit."""
    if config.memory is not None or config.num_gpu_blocks_override is not None:
        return config
    lengths = sorted((request.length_max for request in requests), reverse=True)
    at_once = lengths[: 2 * scheduler.rows_max]
    return config.model_copy(
        update={
            "context_len": min(text.context_len, lengths[0]),
            "num_gpu_blocks_override": sum(
                blocks_needed(length, config.block_size) for length in at_once
            ),
        }
    )


def differences(
    references: Iterable[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    requests: Sequence[Request],
    config: ReplicaConfig,
    own: Callable[[], Any] | None,
) -> list[Difference]:
    """The first place where each output leaves its reference, a missing end included.

    `own`: gives a replica of ours, by which and by float64 greedy outputs are judged; it is called
    where outputs differ only. None: they are not judged.
    """
    found: list[Difference] = []
    for index, (expected, got) in enumerate(zip(references, outputs, strict=True)):
        pairs = enumerate(zip_longest(expected, got))
        parted = next(((at, *pair) for at, pair in pairs if pair[0] != pair[1]), None)
        if parted is not None:
            difference = Difference(index, *parted)
            if own is not None:
                content = (*requests[index].prompt, *expected[: difference.position])
                difference = _judged(difference, content, own(), config)
            found.append(difference)
    return found


def _judged(
    difference: Difference, content: Sequence[int], replica: Any, config: ReplicaConfig
) -> Difference:
    """With a judgement by float64 where both have a token; `content` ends before it."""
    from replicas.models import judge

    if difference.expected is None or difference.got is None:
        return difference
    model = transformers_model(config, config.target)
    logits = replica.logits(content)
    judgement = judge(model, content, difference.expected, difference.got, logits)
    return replace(difference, judgement=judgement)


def _run(
    engine: LocalEngine, requests: Sequence[Request], note: Progress, phase: str
) -> list[Output]:
    outputs = [engine.submit(request) for request in requests]
    while engine.advance():
        note(phase, sum(output.reason is not None for output in outputs), len(outputs))
    return outputs


def transformers_model(config: ReplicaConfig, name: str, role: str = "target") -> Any:
    """A model as transformers loads it, on the device of `config`. Raises OSError and
    PairRefused."""
    import torch

    from replicas.models import dtype_name, read_model, resolve, resolve_device

    path = resolve(name, role, dtype_name(config))
    model: Any = read_model(path, config, role)
    device = resolve_device(config.device)
    if device.type == "cuda":
        # cuDNN's attention takes a good part of a second for every new shape of a prompt.
        torch.backends.cuda.enable_cudnn_sdp(False)
    return model.to(device)


def transformers_greedy(
    config: ReplicaConfig, requests: Sequence[Request], eos_token_ids: Sequence[int]
) -> Iterator[list[int]]:
    """New tokens of each request by transformers, untouched by any code of ours."""
    import torch
    from transformers import GenerationConfig

    model = transformers_model(config, config.target)
    # The model's own defaults (a repetition penalty, say) would not be plain greedy decoding.
    model.generation_config = GenerationConfig(
        eos_token_id=list(eos_token_ids) or None, pad_token_id=0
    )
    for request in requests:
        ids = torch.tensor([request.prompt], device=model.device)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=request.max_new_tokens,
            do_sample=False,
        )
        yield out[0, len(request.prompt) :].tolist()
