"""Tensor parallelism: one model's linear layers divided among the ranks of a process group.

Which layer is divided how is the model's own statement, transformers' `tp_plan`; what is done here
is no more than that: slice the weights, and sum or join what the slices compute. The model's code
stays as it is and sees fewer heads and a narrower MLP. Every rank gets the same logits, bit for
bit, because sums and joins end in the same values everywhere.

Works on plain tensors, so that it does not depend on how transformers wraps them in its versions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from replicas.errors import PairRefused

_COLUMNS, _COLUMNS_JOINED = "colwise", "colwise_gather_output"
_ROWS, _ROWS_OF_WHOLE = "rowwise", "rowwise_split_input"
_EXPERTS = "moe_tp_experts"
_PARAMETERS = "local_params"
"""A module's own parameters are divided, as the plan says of each."""
_WHOLE = frozenset({"embedding_rowwise", "replicated_with_grad_allreduce", "replicate"})
"""Left on every rank: an embedding is looked up, not multiplied, and norms are small."""
_PART = "lockstep_part"


def keep_own_part(model: PreTrainedModel, rank: int, ranks: int) -> None:
    """Keep this rank's part of each layer, which of one rank is all of it; from then on all ranks
    must compute together.

    The model's config says from then on how many heads are here. Raises PairRefused.
    """
    if ranks == 1:
        return
    config = model.config
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        count = getattr(config, name, None)
        if count is not None and count % ranks:
            raise _refused(f"{name} is {count}, which {ranks} ranks cannot share evenly")
    plan = dict(model.tp_plan or {})
    if not plan:
        raise _refused(f"{type(model).__name__} has no plan for tensor parallelism")
    for name, module in model.named_modules():
        style = plan.get(_generic(name))
        if style is None or style in _WHOLE:
            continue
        if style == _EXPERTS:
            _divide_experts(name, module, rank, ranks)
            continue
        if style == _PARAMETERS:
            _divide_parameters(name, module, plan, rank, ranks)
            continue
        if not isinstance(module, nn.Linear):
            raise _refused(f"{name}: {type(module).__name__} is no linear layer")
        _divide(name, module, style, rank, ranks)
    heads = config.num_attention_heads
    config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    config.num_key_value_heads = (getattr(config, "num_key_value_heads", None) or heads) // ranks
    config.num_attention_heads = heads // ranks
    setattr(model, _PART, True)


def is_part(model: PreTrainedModel) -> bool:
    """Whether it is a rank's part of a model: sums are finished elsewhere."""
    return getattr(model, _PART, False)


def _refused(why: str) -> PairRefused:
    return PairRefused(f"tensor_parallel: {why}")


def _generic(name: str) -> str:
    """A module's name as plans spell it: `*` for every layer number."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _divide(name: str, module: nn.Linear, style: str, rank: int, ranks: int) -> None:
    outputs, inputs = module.weight.shape
    if style in (_COLUMNS, _COLUMNS_JOINED):
        if outputs % ranks:
            if style == _COLUMNS_JOINED:
                return  # an odd vocabulary's output matrix stays whole: the result is the same
            raise _refused(f"{name}: {outputs} outputs cannot be shared by {ranks} ranks")
        part = slice(rank * outputs // ranks, (rank + 1) * outputs // ranks)
        _keep(module, module.weight[part], None if module.bias is None else module.bias[part])
        if style == _COLUMNS_JOINED:
            module.forward = _joined(module, ranks)  # type: ignore[method-assign, assignment]
    elif style in (_ROWS, _ROWS_OF_WHOLE):
        if inputs % ranks:
            raise _refused(f"{name}: {inputs} inputs cannot be shared by {ranks} ranks")
        part = slice(rank * inputs // ranks, (rank + 1) * inputs // ranks)
        _keep(module, module.weight[:, part], module.bias)
        module.forward = _summed(  # type: ignore[method-assign, assignment]
            module, part if style == _ROWS_OF_WHOLE else slice(None)
        )
    else:
        raise _refused(f"{name}: the plan says {style!r}, which is not served")


def _divide_parameters(
    name: str, module: nn.Module, plan: dict[str, str], rank: int, ranks: int
) -> None:
    """As of sinks, of which every head has one."""
    for own, parameter in list(module.named_parameters(recurse=False)):
        style = plan.get(_generic(f"{name}.{own}"))
        if style != _COLUMNS or parameter.shape[0] % ranks:
            raise _refused(f"{name}.{own} cannot be shared by {ranks} ranks")
        kept = parameter.data.chunk(ranks)[rank].clone()
        setattr(module, own, nn.Parameter(kept, requires_grad=False))


def _divide_experts(name: str, module: Any, rank: int, ranks: int) -> None:
    """Every rank has a part of each expert's width, as of a dense MLP's."""
    inner = module.down_proj.shape[1 if module.is_transposed else 2]
    if inner % ranks:
        raise _refused(f"{name}: experts of width {inner} cannot be shared by {ranks} ranks")
    if module.has_post_expert_norm:
        raise _refused(f"{name}: experts with norms of their own are not shared by ranks")
    part = torch.arange(rank * inner // ranks, (rank + 1) * inner // ranks)
    of_first = part
    if module.has_gate and module.is_concatenated:
        of_first = torch.cat((part, part + inner))
    elif module.has_gate:  # gate and up of a number side by side
        of_first = torch.stack((2 * part, 2 * part + 1), 1).flatten()
    first = "gate_up_proj" if module.has_gate else "up_proj"
    outputs, inputs = (2, 1) if module.is_transposed else (1, 2)
    for weight, dim, own in ((first, outputs, of_first), ("down_proj", inputs, part)):
        whole = getattr(module, weight)
        kept = whole.data.index_select(dim, own.to(whole.device))
        setattr(module, weight, nn.Parameter(kept, requires_grad=False))
    if module.has_bias:
        bias = getattr(module, f"{first}_bias")
        kept = bias.data.index_select(1, of_first.to(bias.device))
        setattr(module, f"{first}_bias", nn.Parameter(kept, requires_grad=False))
        if rank > 0:  # it is added once
            module.down_proj_bias.data.zero_()
    plain = module.forward

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        out: torch.Tensor = plain(*args, **kwargs)
        if not out.is_meta:
            dist.all_reduce(out)
        return out

    module.forward = forward


def _keep(module: nn.Linear, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """A part's own copy, so that the whole weight is freed; a tied embedding keeps it."""
    module.weight = nn.Parameter(weight.clone(), requires_grad=False)
    if bias is not None:
        module.bias = nn.Parameter(bias.clone(), requires_grad=False)
    module.out_features, module.in_features = module.weight.shape


def _joined(module: nn.Linear, ranks: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Every rank computes some outputs; all get all of them."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        own = linear(x, module.weight, module.bias).contiguous()
        if own.is_meta:  # the layers are only read
            return own.repeat_interleave(ranks, -1)
        parts = [torch.empty_like(own) for _ in range(ranks)]
        dist.all_gather(parts, own)
        return torch.cat(parts, dim=-1)

    return forward


def _summed(module: nn.Linear, part: slice) -> Callable[[torch.Tensor], torch.Tensor]:
    """Every rank computes a term of each output from its own inputs; all get the sum."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        out = linear(x[..., part], module.weight)
        if not out.is_meta:
            dist.all_reduce(out)
        return out if module.bias is None else out + module.bias

    return forward
