"""Tiny models on paged caches, and what they say: for the tests of forward passes."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from replicas.config import ReplicaConfig
from replicas.models import decoder
from replicas.models.build import build_model
from replicas.models.paged_model import ATTENTION, PagedModel
from tests.tiny_pairs import VOCAB, target_model

BLOCK_SIZE, BLOCKS, CONTEXT = 4, 1300, 256


def uneven_model(architecture: str) -> PreTrainedModel:
    """A tiny model whose norms and biases are random, too: ones and zeros would hide a mistake."""
    if architecture == "qwen2":
        config = copy.deepcopy(target_model("qwen3").config).to_dict()
        kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        shape = {name: config[name] for name in (*kept, "num_key_value_heads", "vocab_size")}
        with torch.random.fork_rng():
            torch.manual_seed(4)
            model: PreTrainedModel = Qwen2ForCausalLM(Qwen2Config(**shape))
    else:
        model = copy.deepcopy(target_model(architecture))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
    model.set_attn_implementation(ATTENTION)
    return model.eval().requires_grad_(False)


def with_massive_activations(model: PreTrainedModel, size: float = 20_000.0) -> PreTrainedModel:
    """Some hidden values become huge in the second layer and stay so, as trained models have them:
    the errors of float32 grow with them."""
    with torch.no_grad():
        down = model.model.layers[1].mlp.down_proj.weight
        down[3] *= size
        down[11] *= -size / 3
    return model


def built(
    model: PreTrainedModel, join: bool = True, prepack: bool = True
) -> tuple[PagedModel, str]:
    """Without `join` as one of a make that is not known."""
    config = ReplicaConfig(block_size=BLOCK_SIZE, device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        if not join:
            patch.setattr(decoder, "MAKES", ())
        return build_model(model, "tiny", config, BLOCKS, CONTEXT, prepack)


class Rows:
    """Random rows of many lengths in the cache of a model, and their logits as prefilled."""

    def __init__(self, model: PagedModel, lengths: tuple[int, ...], seed: int = 0) -> None:
        self.model = model
        self.lengths = lengths
        generator = torch.Generator().manual_seed(seed)
        columns = -(-max(lengths) // BLOCK_SIZE)
        blocks = 1 + torch.randperm(len(lengths) * columns, generator=generator)
        self.table = blocks.view(len(lengths), columns)
        self.tokens = torch.randint(VOCAB, (len(lengths), max(lengths)), generator=generator)
        self.logits = self.prefilled()

    @torch.inference_mode()
    def prefilled(self) -> list[torch.Tensor]:  # each [length, vocab]
        layout = self.model.backend.ranges_layout(
            self.table, [(0, length) for length in self.lengths]
        )
        fed = [row[:length] for row, length in zip(self.tokens, self.lengths, strict=True)]
        logits = self.model.forward(torch.cat(fed), layout).logits
        assert logits is not None
        return list(logits.split(self.lengths))

    @torch.inference_mode()
    def random_pass(self, rng: random.Random) -> tuple[int, int]:
        """Logits computed, and how many of them differ from the prefill's in any bit: of 1 to 16
        rows anywhere in them, windows of 1 to 9 or ragged ranges."""
        width = rng.randint(1, 9)
        able = [row for row, length in enumerate(self.lengths) if length > width]
        rows = sorted(rng.sample(able, min(rng.randint(1, 16), len(able))))
        starts = [rng.randint(0, self.lengths[row] - width) for row in rows]
        table, backend = self.table[rows], self.model.backend
        if rng.random() < 0.5:
            widths = [width] * len(rows)
            layout = backend.step_layout(table, starts, width).window(0, width)
        else:
            widths = [
                rng.randint(1, self.lengths[row] - start)
                for row, start in zip(rows, starts, strict=True)
            ]
            ranges = [(s, s + w) for s, w in zip(starts, widths, strict=True)]
            layout = backend.ranges_layout(table, ranges)
        fed = [self.tokens[r, s : s + w] for r, s, w in zip(rows, starts, widths, strict=True)]
        logits = self.model.forward(torch.cat(fed), layout).logits
        assert logits is not None
        differing = 0
        for row, start, got in zip(rows, starts, logits.split(widths), strict=True):
            expected = self.logits[row][start : start + got.shape[0]]
            differing += int((got != expected).any(-1).sum())
        return sum(widths), differing
