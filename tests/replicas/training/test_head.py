"""Proves that the head that is trained is the head that is served: its unrolled pass guesses what
the equations of an EAGLE-3 head draft, and its gradient is that of the loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from replicas.drafters.eagle3 import eagle3_config
from replicas.training.methods.eagle3 import Eagle3Head
from replicas.training.methods.head import Batch
from replicas.training.methods.loss import soft_cross_entropy
from tests.replicas.heads import TARGET_VOCAB, plain_head, said, tensors_of
from tests.tiny_pairs import target_model

WIRINGS = [
    {},
    {"norm_before_residual": True, "attention_bias": True},
    {"norm_before_fc": True, "rope_theta": 500.0},
    {"fc_norm": True, "norm_output": True},
    {"kind": "qwen3", "fc_norm": True, "norm_before_residual": True},
]
STEPS = 4


def made(wiring: dict[str, Any]) -> tuple[Eagle3Head, dict[str, torch.Tensor], torch.Tensor]:
    """A random head, its tensors with `d2t`, the target's embeddings."""
    target = target_model("llama")
    settings = {key: value for key, value in wiring.items() if key != "kind"}
    whole = said(True, wiring.get("kind", "llama"), **settings)
    config = eagle3_config(whole, {"d2t"}, target.config)
    tensors = tensors_of(config)
    ids = torch.arange(config.vocab_size) + tensors["d2t"]
    embeddings = target.get_input_embeddings().weight.detach()
    floats = {name: tensors[name] for name in config.tensors}
    head = Eagle3Head(config, floats, {"embed_tokens.weight": embeddings}, ids)
    return head, tensors, embeddings


def batch_of(rows: list[list[int]], answers: list[int], hidden: list[torch.Tensor]) -> Batch:
    """Conversations whose likeliest token is the one that follows."""
    slots = max(map(len, rows)) - 1
    most = max(len(row) - answer - 1 for row, answer in zip(rows, answers, strict=True))
    tokens = torch.zeros((len(rows), slots), dtype=torch.int64)
    states = torch.zeros((len(rows), slots, hidden[0].shape[1]))
    at = torch.zeros((len(rows), most), dtype=torch.int64)
    guesses = torch.zeros((len(rows), most), dtype=torch.bool)
    likely = torch.zeros((len(rows), most, 1), dtype=torch.int64)
    for number, (row, answer) in enumerate(zip(rows, answers, strict=True)):
        count = len(row) - answer - 1
        tokens[number, : len(row) - 1] = torch.tensor(row[1:])
        states[number, : len(hidden[number])] = hidden[number]
        at[number] = (answer - 1 + torch.arange(most)).clamp(max=answer - 2 + count)
        guesses[number, :count] = True
        likely[number, :count, 0] = torch.tensor(row[answer + 1 :])
    return Batch(tokens, states, at, guesses, likely, torch.ones(likely.shape))


@pytest.mark.parametrize("wiring", WIRINGS)
def test_an_unrolled_pass_guesses_what_the_equations_draft(wiring: dict[str, Any]) -> None:
    head, tensors, embeddings = made(wiring)
    width = len(head.config.aux_layers) * head.config.target_width
    generator = torch.Generator().manual_seed(3)
    rows, answers, hidden = [], [], []
    for length in (5, 9, 12):
        prefix = torch.randint(TARGET_VOCAB, (length,), generator=generator).tolist()
        seen = torch.randn((length - 1, width), generator=generator)
        theta = wiring.get("rope_theta", 10_000.0)
        drafts = plain_head(head.config, tensors, embeddings, seen, prefix, STEPS, theta)[0]
        rows.append(prefix + drafts)
        answers.append(length - 1)
        hidden.append(seen)
    with torch.no_grad():
        out = head(batch_of(rows, answers, hidden), (1.0,) * STEPS)
    # The first slot of each row is where it drafts; step j is right j slots behind it.
    for step in range(STEPS):
        assert out.right[step, :, step].tolist() == [True] * 3, step
        assert int(out.accepted[step]) >= 3
    assert out.slots.tolist() == [3 * (STEPS - step) for step in range(STEPS)]
    # And a token that it does not draft counts as wrong.
    rows = [[*row[:-1], (row[-1] + 1) % TARGET_VOCAB] for row in rows]
    with torch.no_grad():
        wrong = head(batch_of(rows, answers, hidden), (1.0,) * STEPS)
    assert not wrong.right[STEPS - 1].any()


def test_the_gradient_of_the_loss_is_that_of_plain_cross_entropy() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((7, 12), generator=generator, requires_grad=True)
    weight = torch.randn((20, 12), generator=generator, requires_grad=True)
    ids = torch.stack([torch.randperm(20, generator=generator)[:5] for _ in range(7)])
    chances = torch.rand((7, 5), generator=generator) / 5
    chances[2, 3] = 0.0
    loss, guessed, _ = soft_cross_entropy(x, weight, ids, chances)
    (loss * 0.5).backward()
    found = x.grad, weight.grad
    x.grad = weight.grad = None
    logits = x @ weight.T
    plain = -(chances * logits.log_softmax(-1).gather(1, ids)).sum()
    (plain * 0.5).backward()
    assert torch.equal(guessed, logits.argmax(-1))
    torch.testing.assert_close(loss, plain)
    for ours, theirs in zip(found, (x.grad, weight.grad), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
