"""Proves that the Clover-2 head that is trained is the one that is served: its logits are those of
the equations at every slot of an answer, and its checkpoint drafts so; that it sees the target's
state before the last norm, as in serving; that training makes it right more often, and more than a
head without the regressive connections."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import rms_norm, silu, smooth_l1_loss

from replicas.training.batches import divided
from replicas.training.conversations import ConversationFolder
from replicas.training.export import write_head
from replicas.training.features import FeatureFolder
from replicas.training.loop import Training, TrainSettings
from replicas.training.methods.clover import CloverHead
from replicas.training.methods.head import Batch
from replicas.training.methods.new_clover import CloverMethod
from tests.replicas.clover_heads import plain_clover
from tests.replicas.drafters.test_clover import told_rows
from tests.replicas.told_rows import hidden_states, plain_target
from tests.replicas.training.test_head import batch_of
from tests.replicas.training.test_loop import drawn, training
from tests.tiny_pairs import VOCAB, target_model

METHOD = CloverMethod()
STEPS = METHOD.unroll
EVERY = torch.arange(VOCAB)
SAID = {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0}
"""transformers leaves out its defaults."""


def random_head(ids: torch.Tensor = EVERY) -> tuple[CloverHead, dict[str, object]]:
    """A head of a new one's form whose weights are all random, and its config.json."""
    target = target_model("llama")
    settings = METHOD.settings(target.config, VOCAB, 40)
    weights = METHOD.new(settings, target, ids, 1.0, 0)
    generator = torch.Generator().manual_seed(9)
    for name, value in weights.tensors.items():
        noise = torch.randn(value.shape, generator=generator)
        scale = 0.3 if value.dim() == 1 else value.shape[-1] ** -0.5
        weights.tensors[name] = value + noise * scale
    head = METHOD.head(settings, target.config, weights, ids)
    assert isinstance(head, CloverHead)
    return head, settings


def random_batch(lengths: tuple[int, ...], answers: list[int]) -> tuple[Batch, list[list[int]]]:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in lengths]
    last = METHOD.aux_layers(target_model("llama").config.num_hidden_layers)
    hidden = [torch.cat(hidden_states(row, last), -1).float() for row in rows]
    return batch_of(rows, answers, hidden), rows


@pytest.mark.parametrize("ids", [EVERY, EVERY[::3]], ids=["every", "some"])
def test_logits_at_every_slot_are_those_of_the_equations(ids: torch.Tensor) -> None:
    head, settings = random_head(ids)
    learned = set(ids.tolist())
    batch, rows = random_batch((12, 23), [5, 9])
    lm_head = plain_target().get_output_embeddings().weight.detach()
    last = METHOD.aux_layers(3)
    weights = tuple(0.5**step for step in range(STEPS))
    with torch.no_grad():
        found = head.logits(batch, STEPS).double()
        states, out = head.states(batch, STEPS), head(batch, weights)
    expected, tried = torch.zeros(()), 0
    for number, row in enumerate(rows):
        own = rms_norm(batch.hidden[number], (32,), target_model("llama").model.norm.weight, 1e-6)
        for place, slot in enumerate(batch.begins[number].tolist()):
            if not batch.guesses[number, place]:
                continue
            content, drafts = row[: slot + 2], row[slot + 2 :][: STEPS - 1]
            hidden = hidden_states(content, last)[0]
            told = plain_clover(
                {**SAID, **settings}, head.tensors(), lm_head, hidden, content, drafts
            )
            logits = found[number, place, : len(told)]
            torch.testing.assert_close(logits, told, rtol=1e-4, atol=1e-4)
            for step in range(min(STEPS, len(row) - slot - 2)):
                token = row[slot + 2 + step]
                right = int(ids[told[step][ids].argmax()]) == token
                assert bool(out.right[step, number, place + step]) == right
                if token in learned:
                    whole = told[step][ids].logsumexp(-1)
                    expected = expected + weights[step] * (whole - told[step][token])
                # The state that the target chooses the token by.
                far = smooth_l1_loss(states[number, place, step], own[slot + 1 + step])
                expected = expected + weights[step] * 10 * far
                tried += 1
    assert tried == int(out.slots.sum())
    torch.testing.assert_close(out.loss.double(), expected.double(), rtol=1e-4, atol=1e-4)


def test_a_checkpoint_drafts_in_serving_what_its_equations_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, settings = random_head()
    ids = torch.arange(VOCAB)
    write_head(tmp_path, settings, head.tensors(), ids, VOCAB, "target", torch.float32)
    rows = told_rows(str(tmp_path), (2, 9, 14), monkeypatch)
    rows.prefill(chunk=5)
    drafts, _ = rows.propose(STEPS)
    lm_head = plain_target().get_output_embeddings().weight.detach()
    for content, drafted in zip(rows.contents, drafts, strict=True):
        hidden = hidden_states(content, METHOD.aux_layers(3))[0]
        told = plain_clover(
            {**SAID, **settings}, head.tensors(), lm_head, hidden, content, drafted[:-1]
        )
        assert drafted == told.argmax(-1).tolist()


def test_features_of_the_last_layer_are_those_before_the_norm(tmp_path: Path) -> None:
    target, folder = copy.deepcopy(target_model("llama")), drawn(tmp_path / "ids")
    features = FeatureFolder(tmp_path / "features", 2 * 32)
    for _ in features.fill(folder, target, (2, 3)):
        pass
    item = divided(folder)[0][0]
    found = features.read(item.part, item.index)
    expected = torch.cat(hidden_states([*found.conversation.ids, 0], [2, 3]), -1)
    torch.testing.assert_close(found.hidden.double(), expected, rtol=1e-2, atol=1e-2)


class WithoutRegression(CloverHead):
    """Medusa's form in the same place: each later step guesses from the first state, by a block of
    its own, told nothing of the tokens between."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        width = self.config.hidden_size
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(STEPS))

    def states(self, batch: Batch, steps: int) -> torch.Tensor:
        self._first = self._augmented(batch)
        return super().states(batch, steps)

    def _next(
        self, state: torch.Tensor, token: torch.Tensor, step: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first = self._first
        return first + silu(self.blocks[step](first)), torch.zeros_like(token)


def test_training_makes_it_right_more_often(tmp_path: Path) -> None:
    settings = TrainSettings(steps=90, batch_tokens=600, rate=3e-3, warmup=5)
    made = training(tmp_path, settings, "clover", VOCAB)
    items, _ = divided(ConversationFolder(tmp_path / "ids"))
    before = made.score(items)
    for _ in range(settings.steps):
        made.step()
    after = made.score(items)
    assert after.loss < before.loss
    assert sum(after.right) > 2 * sum(before.right)
    assert after.accepted > before.accepted


@pytest.mark.slow
def test_regressive_connections_guess_more_than_heads_without(tmp_path: Path) -> None:
    settings = TrainSettings(steps=90, batch_tokens=600, rate=3e-3, warmup=5)
    made = training(tmp_path, settings, "clover", VOCAB)
    items, _ = divided(ConversationFolder(tmp_path / "ids"))
    head = made.head
    frozen = {
        "target_output.weight": head.get_buffer("target_output/weight"),
        "target_norm.weight": head.get_buffer("target_norm/weight"),
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        blind = WithoutRegression(head.config, head.tensors(), frozen, torch.arange(VOCAB))
    other = Training(blind, FeatureFolder(tmp_path / "features-3", 32), items, made.settings)
    for _ in range(settings.steps):
        made.step()
        other.step()
    with_them, without = made.score(items), other.score(items)
    assert sum(with_them.right[1:]) > 1.1 * sum(without.right[1:])
