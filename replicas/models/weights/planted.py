"""Planted models: random weights in the shape of a real model, with a wanted acceptance.

For speed on big shapes without their weights. Every layer computes what the real model's would, so
costs are real; what is planted is only how often a draft is right:

- The embedding and the output matrix hold the same random vectors, the output's shifted by a fixed
  number of ids. Alone they say that token t is followed by (t + shift) modulo the vocabulary: the
  *map*, which depends on the vocabulary's size only, so that models of any two shapes share it.
- The layers are random and add what amounts to noise that depends on the whole context. In a model
  that normalises the input of each layer, scaling the embedding by s is damping every layer by
  1/s: with much damping the model follows the map always, with less it strays more often.
- A draft is damped until it always follows the map; a target is calibrated to follow it with the
  wanted probability while it generates. Acceptance is that probability, and needs no draft.

What is not like a real model: acceptance does not change with the text, drafting further ahead is
no harder, a target that strays chooses among nearly equal logits (so rounding changes its choices
more often than a trained model's), and a shape that ties its embedding to the output is built
untied (the same bytes per forward pass, more memory). Calibration is deterministic on one kind of
device and differs between kinds, as do random weights.
"""

from __future__ import annotations

import logging
import math
import zlib
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from replicas.errors import PairRefused
from replicas.names import SHAPES, PlantedName, map_shift, parse_planted

_log = logging.getLogger(__name__)

# Queries this many times larger than keys give scores of that deviation: attention picks a few
# positions, as trained heads do, instead of averaging the context away.
_QUERY_GAIN = 4.0
# Deviation of the logits that the map does not mean; in a trained model it is of that order of
# magnitude.
_LOGIT_DEVIATION = 4.0

# Calibration: greedy rows, how long they are, and when the share is near enough.
_ROWS = 32
_PROMPT_TOKENS = 8
_NEW_TOKENS = 48
_NEAR = 0.01
_ROUNDS = 14
_SCALES = (2.0**-6, 2.0**6)


def planted_config(name: PlantedName) -> Any:
    """The transformers config of a planted model: no special tokens, untied."""
    if name.shape in SHAPES:
        config = AutoConfig.for_model(**SHAPES[name.shape])
    else:
        config = AutoConfig.from_pretrained(name.shape)
    config.tie_word_embeddings = False
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    if name.layers is not None:
        config.num_hidden_layers = name.layers
        kinds = getattr(config, "layer_types", None)
        if kinds:
            config.layer_types = [kinds[i % len(kinds)] for i in range(name.layers)]
    return config


@torch.no_grad()
def plant(
    name: str, device: torch.device, dtype: torch.dtype, acceptance: float
) -> PreTrainedModel:
    """Build the model on its device in its dtype and calibrate it. Its config says what was found:
    `planted_scale`, the embedding's, which in a name spares the calibration, and
    `planted_follows`, the share of generated tokens that follow the map, if it was measured.

    `acceptance` holds where the name gives none; 1 damps the layers fully and measures nothing.
    Raises PairRefused when the wanted acceptance cannot be had.
    """
    parsed = parse_planted(name)
    config = planted_config(parsed)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = model.to(device).eval().requires_grad_(False)
    _fill(model, parsed.seed)
    vectors = model.get_input_embeddings().weight.clone()
    wanted = acceptance if parsed.acceptance is None else parsed.acceptance
    if parsed.scale is not None:
        _scale(model, vectors, parsed.scale)
    elif wanted == 1.0:
        # Twice the deviation of all that the layers add: each adds two contributions of at most 1.
        _scale(model, vectors, 2.0 * math.sqrt(2 * config.num_hidden_layers))
    else:
        _calibrate(model, vectors, wanted, parsed)
        found = model.config
        _log.info("%s: scale=%g, follows %.3f", name, found.planted_scale, found.planted_follows)
    if device.type == "cuda":
        del vectors
        torch.cuda.empty_cache()  # what calibration used is free for the KV cache
    return model


def _fill(model: PreTrainedModel, seed: int) -> None:
    """Random weights that keep the deviation of what passes through them at about 1."""
    vocab, width = model.get_input_embeddings().weight.shape
    for name, weight in model.named_parameters():
        if weight.dim() < 2:
            # Where queries are normalised after their projection, that is where their gain goes.
            value = _QUERY_GAIN if name.endswith("q_norm.weight") else 1.0
            weight.fill_(0.0 if name.endswith("bias") else value)
            continue
        # By name, so that another depth has the same first layers.
        generator = torch.Generator(weight.device).manual_seed(seed ^ zlib.crc32(name.encode()))
        gain = _QUERY_GAIN if name.endswith("q_proj.weight") else 1.0
        weight.normal_(0.0, gain / math.sqrt(weight.shape[-1]), generator=generator)
    vectors = model.get_input_embeddings().weight
    generator = torch.Generator(vectors.device).manual_seed(seed)
    vectors.normal_(0.0, 1.0, generator=generator)
    output = model.get_output_embeddings()
    assert isinstance(output, nn.Linear), "the output matrix is a linear layer"
    output.weight.copy_(vectors.roll(map_shift(vocab), dims=0))
    output.weight.mul_(_LOGIT_DEVIATION / math.sqrt(width))


def _scale(model: PreTrainedModel, vectors: torch.Tensor, scale: float) -> None:
    torch.mul(vectors, scale, out=model.get_input_embeddings().weight)
    model.config.planted_scale, model.config.planted_follows = scale, None


def _calibrate(
    model: PreTrainedModel,
    vectors: torch.Tensor,  # [vocab, width], the embedding at scale 1
    wanted: float,
    name: PlantedName,
) -> None:
    """Bisect the scale: the more the embedding counts, the more often the map is followed."""
    low, high = _SCALES
    follows = -1.0
    for _ in range(_ROUNDS):
        scale = math.sqrt(low * high)
        _scale(model, vectors, scale)
        follows = share_following(model, name.seed)
        if abs(follows - wanted) <= _NEAR:
            break
        low, high = (scale, high) if follows < wanted else (low, scale)
    if abs(follows - wanted) > 5 * _NEAR:
        raise PairRefused(
            f"acceptance: {wanted} cannot be planted in {name.shape!r}, the nearest found is"
            f" {follows:.3f}"
        )
    model.config.planted_follows = follows


@torch.no_grad()
def share_following(model: PreTrainedModel, seed: int) -> float:
    """Share of greedily generated tokens that follow the map, over random prompts."""
    used = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        device, vocab = model.device, model.config.vocab_size
        if device.type == "cuda":
            # cuDNN's attention is built anew for every length, and takes most of a second for it.
            torch.backends.cuda.enable_cudnn_sdp(False)
        shift = map_shift(vocab)
        generator = torch.Generator().manual_seed(seed)
        fed = torch.randint(vocab, (_ROWS, _PROMPT_TOKENS), generator=generator).to(device)
        cache = None
        following = torch.zeros((), dtype=torch.int64, device=device)
        for _ in range(_NEW_TOKENS):
            out = model(input_ids=fed, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = out.past_key_values
            chosen = out.logits[:, -1].argmax(dim=-1)
            following += (chosen == (fed[:, -1] + shift) % vocab).sum()
            fed = chosen[:, None]
        return float(following) / (_ROWS * _NEW_TOKENS)
    finally:
        model.set_attn_implementation(used)
