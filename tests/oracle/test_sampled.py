"""The oracle for sampling: output is a function of the request alone, and follows the target's law.

Alone, without draft and at batch 1 is the reference that every batch, draft length, draft and
schedule must reproduce; the law is the target's softmax, computed by transformers.
"""

from __future__ import annotations

import pytest
import torch

from cluster.local_engine import LocalEngine
from scheduler.config import SchedulerConfig
from scheduler.messages import Request, SamplingParams
from tests.oracle.drafters import ORACLES, oracle
from tests.oracle.worlds import DEMO, check_answers, replica_for, sampled_answers
from tests.tiny_pairs import ARCHITECTURES, VOCAB, target_model, tiny_replica

RUNS = [
    *(("model", rows, k) for rows in (1, 3, 8, 16) for k in (1, 3, 5, 8, None)),
    *((name, rows, k) for name in ORACLES for rows, k in ((8, 5), (16, 8))),
]


DEMO_RUNS = ((3, 8), (8, None), (16, 4))


@pytest.mark.parametrize(
    ("architecture", "drafter", "rows_max", "draft_len"),
    [
        *((architecture, *run) for architecture in ARCHITECTURES for run in RUNS),
        *((DEMO, "model", *run) for run in DEMO_RUNS),
    ],
)
def test_output_depends_on_the_request_alone(
    architecture: str, drafter: str, rows_max: int, draft_len: int | None
) -> None:
    """Trap 12, end to end: neither batch mates nor k nor arrival change a sampled token."""
    answered = sampled_answers(architecture)
    replica = replica_for(architecture, oracle(drafter, answered))
    check_answers(replica, answered, rows_max, draft_len, seed=draft_len or 0)


def test_speculative_output_follows_the_law_of_the_target() -> None:
    """Marginals of three tokens over 4,000 seeds, all but the first committed by speculation."""
    prompt = (5, 9, 4)
    temperature = 1.0
    seeds = 4000
    engine = LocalEngine(tiny_replica("llama"), SchedulerConfig(rows_max=32, draft_len=2))
    outputs = engine.generate(
        [
            Request(str(seed), prompt, 3, SamplingParams(temperature=temperature, seed=seed))
            for seed in range(seeds)
        ]
    )
    assert sum(output.usage.accepted_tokens for output in outputs) > seeds // 4
    for place, law in enumerate(_marginals(prompt, places=2)):
        counts = torch.zeros(VOCAB)
        for output in outputs:
            counts[output.tokens[place]] += 1
        # Rare tokens are pooled, so that every cell expects at least five.
        expected = law * seeds
        rare = expected < 5
        cells = torch.cat((counts[~rare], counts[rare].sum()[None]))
        wanted = torch.cat((expected[~rare], expected[rare].sum()[None]))
        statistic = ((cells - wanted) ** 2 / wanted.clamp(min=1e-9)).sum().item()
        freedom = len(cells) - 1
        assert freedom >= 5
        assert statistic < freedom + 5 * (2 * freedom) ** 0.5 + 5


@torch.inference_mode()
def _marginals(prompt: tuple[int, ...], places: int) -> list[torch.Tensor]:
    """Exact laws of the first `places` (at most 2) new tokens, each [vocab]."""
    model = target_model("llama")
    first = model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    every = torch.tensor([[*prompt, token] for token in range(VOCAB)])
    conditional = model(every).logits[:, -1].softmax(-1)
    return [first, first @ conditional][:places]
