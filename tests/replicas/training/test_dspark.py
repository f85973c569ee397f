"""Proves that the DSpark head that is trained is the one that is served: its blocks are those of
the equations, at every slot where one begins, and its checkpoint drafts so; that its confidence
learns from equality outcomes alone; and that training makes it right more often."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from replicas.training.batches import divided
from replicas.training.conversations import ConversationFolder
from replicas.training.export import write_head
from replicas.training.loop import TrainSettings
from replicas.training.methods.dspark import EVERY, DSparkHead
from replicas.training.methods.head import Batch
from replicas.training.methods.new_dspark import DSparkMethod
from tests.replicas.drafters.test_one_pass import told_rows
from tests.replicas.one_pass_heads import PlainOnePass
from tests.replicas.told_rows import hidden_states, plain_target
from tests.replicas.training.test_head import batch_of
from tests.replicas.training.test_loop import training
from tests.tiny_pairs import VOCAB, target_model

DRAFTED = 61
METHOD = DSparkMethod()
SAID = {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0}
"""transformers leaves out its defaults."""


def random_head() -> tuple[DSparkHead, dict[str, torch.Tensor], dict[str, object]]:
    """A head of a new one's form whose weights are all random, its tensors, its config.json."""
    target = target_model("llama")
    settings = METHOD.settings(target.config, DRAFTED, 40)
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(4))[:DRAFTED].sort().values
    weights = METHOD.new(settings, target, ids, 1.0, 0)
    generator = torch.Generator().manual_seed(9)
    for name, value in weights.tensors.items():
        noise = torch.randn(value.shape, generator=generator)
        weights.tensors[name] = value + noise * (
            0.3 if value.dim() == 1 else 2 / value.shape[-1] ** 0.5
        )
    head = METHOD.head(settings, target.config, weights, ids)
    assert isinstance(head, DSparkHead)
    tensors = {**head.tensors(), "d2t": ids - torch.arange(DRAFTED)}
    return head, tensors, settings


def random_batch(lengths: tuple[int, ...], answers: list[int]) -> tuple[Batch, list[list[int]]]:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in lengths]
    layers = METHOD.aux_layers(target_model("llama").config.num_hidden_layers)
    hidden = [torch.cat(hidden_states(row, list(layers)), -1).float() for row in rows]
    return batch_of(rows, answers, hidden), rows


def test_every_block_is_that_of_the_equations() -> None:
    head, tensors, settings = random_head()
    plain = PlainOnePass({**SAID, **settings}, tensors, plain_target(), first=0)
    batch, rows = random_batch((12, 23, 30), [5, 9, 11])
    with torch.no_grad():
        logits = head.logits(batch, batch.begins)
        sure = head.confidence(batch, batch.begins)
        seen = [head(batch, (1.0,) * METHOD.unroll, at) for at in range(EVERY)]
    tried = 0
    for number, row in enumerate(rows):
        for place, slot in enumerate(batch.begins[number].tolist()):
            if not batch.guesses[number, place]:
                continue
            context = torch.cat(hidden_states(row[: slot + 2], list(head.config.aux_layers)), -1)
            block = plain.block(context, row[slot + 1])
            before = row[slot + 1 :][: METHOD.unroll]
            expected = plain.logits(block, before)
            found = logits[number, place, : len(before)].double()
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
            markov = tensors["markov_head.markov_w1.weight"][before].double()
            both = torch.cat((block[: len(before)], markov), -1)
            chance = both @ tensors["confidence_head.proj.weight"][0].double()
            chance = (chance + tensors["confidence_head.proj.bias"].double()).sigmoid()
            torch.testing.assert_close(
                sure[number, place, : len(before)].double(), chance, rtol=1e-4, atol=1e-4
            )
            # What counts as right is the likeliest token of these logits.
            out = seen[place % EVERY]
            for step, choice in enumerate(plain.ids[expected.argmax(-1)].tolist()):
                if slot + 2 + step < len(row):
                    right = choice == row[slot + 2 + step]
                    assert bool(out.right[step, number, place + step]) == right
                    tried += 1
    assert tried == sum(int(out.slots.sum()) for out in seen)


def test_a_checkpoint_drafts_in_serving_what_its_equations_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, tensors, settings = random_head()
    ids = torch.arange(DRAFTED) + tensors["d2t"]
    write_head(tmp_path, settings, head.tensors(), ids, VOCAB, "target", torch.float32)
    plain = PlainOnePass({**SAID, **settings}, tensors, plain_target(), first=0)
    rows = told_rows(str(tmp_path), (1, 9, 14), monkeypatch)
    rows.prefill(chunk=5)
    drafts, _ = rows.propose(METHOD.unroll)
    for content, drafted in zip(rows.contents, drafts, strict=True):
        hidden = torch.cat(hidden_states(content, list(head.config.aux_layers)), -1)
        assert drafted == plain.greedy(hidden, content[-1], METHOD.unroll)


def test_the_loss_is_cross_entropy_and_the_doubt_where_acceptance_is_decided() -> None:
    """A draft counts as right if it equals the target's likeliest token; the confidence learns that
    of the first draft that is wrong, and of all before it, and moves nothing but itself."""
    head, _, _ = random_head()
    batch, _ = random_batch((26, 30), [5, 9])
    anchors = batch.begins[:, ::EVERY]
    with torch.no_grad():
        scores, sure = head.logits(batch, anchors), head.confidence(batch, anchors)
        best = scores.argmax(-1)
        # The text has what the head drafts at every other block's first three places.
        ids = (head.own_ids >= 0).nonzero()[:, 0]
        for number, place in ((0, 0), (1, EVERY)):
            batch.likely[number, place : place + 3, 0] = ids[best[number, place // EVERY, :3]]
    weights = tuple(0.5**step for step in range(METHOD.unroll))
    expected, decided = torch.zeros(()), 0
    for number in range(2):
        for block in range(anchors.shape[1]):
            accepted = True
            for step, weight in enumerate(weights):
                place = block * EVERY + step
                if place >= int(batch.guesses[number].sum()):
                    continue
                own = int(head.own_ids[batch.likely[number, place, 0]])
                at = (number, block, step)
                if own >= 0:
                    expected -= weight * scores[at].log_softmax(-1)[own]
                right = own == int(best[at])
                if accepted:
                    chance = sure[at] if right else 1 - sure[at]
                    expected -= weight * chance.log()
                    decided += right
                accepted &= right
    assert decided >= 6
    out = head(batch, weights)
    torch.testing.assert_close(out.loss, EVERY * expected, rtol=1e-4, atol=1e-4)
    out.loss.backward()
    moved = {name: value.grad.clone() for name, value in head.named_parameters()}
    head.zero_grad()
    with torch.no_grad():
        head.weights["confidence_head/proj/bias"] += 3
    head(batch, weights).loss.backward()
    for name, value in head.named_parameters():
        assert torch.equal(value.grad, moved[name]) != ("confidence" in name), name


def test_an_answer_shorter_than_the_way_between_blocks_has_one_in_every_step() -> None:
    head, _, _ = random_head()
    batch, _ = random_batch((9,), [6])
    for at in range(EVERY):
        out = head(batch, (1.0,) * METHOD.unroll, at)
        assert int(out.slots[0]) == 1
        out.loss.backward()


def test_training_makes_it_right_more_often(tmp_path: Path) -> None:
    settings = TrainSettings(steps=70, batch_tokens=600, rate=3e-3, warmup=5)
    made = training(tmp_path, settings, "dspark")
    items, _ = divided(ConversationFolder(tmp_path / "ids"))
    before = made.score(items)
    for _ in range(settings.steps):
        made.step()
    after = made.score(items)
    assert after.loss < before.loss
    assert sum(after.right) > 2 * sum(before.right)
    assert after.accepted > before.accepted
