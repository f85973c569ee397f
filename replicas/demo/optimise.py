"""One training loop: a stream of batches, a loss, a schedule. Knows neither data nor models.

Muon for the matrices inside the layers, AdamW for the embedding and the norms; in a budget of
minutes Muon gets further than AdamW alone.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

THREADS = 2


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, a constant rate, then a linear fall to zero over `decay` of the steps."""

    steps: int
    matrix_rate: float
    other_rate: float
    warmup_steps: int = 20
    decay: float = 0.5
    weight_decay: float = 0.05

    def factor(self, step: int) -> float:
        fall_from = self.steps * (1 - self.decay)
        falling = (self.steps - step) / max(1.0, self.steps - fall_from)
        return min(1.0, (step + 1) / self.warmup_steps, falling)


def prepare_machine(seed: int) -> random.Random:
    """Seed torch, fix the thread count, and return the generator for everything else."""
    torch.manual_seed(seed)
    torch.set_num_threads(THREADS)
    return random.Random(seed)


def optimise(
    name: str,
    model: nn.Module,
    batches: Iterator[torch.Tensor],
    loss_of: Callable[[torch.Tensor], torch.Tensor],
    schedule: Schedule,
) -> float:
    """Train for `schedule.steps` steps and return the mean loss of the last twentieth."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for key, parameter in model.named_parameters():
        (matrices if ".layers." in key and parameter.ndim == 2 else others).append(parameter)
    muon = torch.optim.Muon(
        matrices,
        lr=schedule.matrix_rate,
        weight_decay=schedule.weight_decay,
        momentum=0.95,
        adjust_lr_fn="match_rms_adamw",
    )
    adam = torch.optim.AdamW(
        others, lr=schedule.other_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    rates: dict[torch.optim.Optimizer, float] = {
        muon: schedule.matrix_rate,
        adam: schedule.other_rate,
    }
    model.train()
    losses: list[float] = []
    for step in range(schedule.steps):
        factor = schedule.factor(step)
        for optimiser, rate in rates.items():
            for group in optimiser.param_groups:
                group["lr"] = rate * factor
        batch = next(batches)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(batch)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser in rates:
            optimiser.step()
            optimiser.zero_grad()
        losses.append(loss.item())
        if (step + 1) % 50 == 0 or step + 1 == schedule.steps:
            recent = sum(losses[-50:]) / len(losses[-50:])
            print(f"{name} {step + 1}/{schedule.steps} loss {recent:.3f}", flush=True)
    model.eval()
    last = losses[-max(1, len(losses) // 20) :]
    return sum(last) / len(last)
