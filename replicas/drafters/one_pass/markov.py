"""What a block's logits gain from the token before each slot: a walk from slot to slot."""

from __future__ import annotations

import torch
from torch.nn.functional import embedding

from replicas.drafters.checkpoints import Head
from replicas.drafters.one_pass.head_config import OnePassConfig
from replicas.invariant import Product

_NAME = "markov_head."


class MarkovHead:
    """`vanilla` sees the token, `gated` how much of it counts here, `rnn` keeps a state."""

    def __init__(self, head: Head[OnePassConfig], prepack: bool) -> None:
        config, tensors = head.config, head.tensors
        self._kind, self._rank = config.markov_head, config.markov_rank
        self._tokens = tensors[_NAME + "markov_w1.weight"]

        def product(name: str) -> Product:
            weight = tensors[f"{_NAME}{name}.weight"]
            return Product.of(weight, tensors.get(f"{_NAME}{name}.bias"), prepack)

        self._out = product("markov_w2")
        self._gate = product("gate_proj") if self._kind == "gated" else None
        self._joint = product("joint_proj") if self._kind == "rnn" else None

    def start(self, rows: int) -> torch.Tensor:  # [rows, rank]
        """The state before the first slot."""
        return self._tokens.new_zeros((rows, self._rank))

    def step(
        self,
        tokens: torch.Tensor,  # [rows], int64: those before the slot, the target's ids
        hidden: torch.Tensor,  # [rows, width]: the slot's
        state: torch.Tensor,  # [rows, rank]
    ) -> tuple[torch.Tensor, torch.Tensor]:  # [rows, vocab], and the next state
        """What is added to the slot's logits."""
        seen = embedding(tokens, self._tokens)
        if self._gate is not None:
            seen = seen * self._gate(torch.cat((hidden, seen), -1)).sigmoid()
        elif self._joint is not None:
            parts = self._joint(torch.cat((state, seen, hidden), -1)).chunk(3, -1)
            keep, candidate, out = parts
            keep = keep.sigmoid()
            state = keep * state + (1 - keep) * candidate.tanh()
            seen = out.tanh()
        return self._out(seen), state
