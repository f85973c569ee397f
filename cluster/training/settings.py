"""What a training is asked for, what was decided when it began, and what it will take."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from replicas.errors import TrainingRefused
from replicas.training import TrainSettings, token_bytes

CONVERSATION_TOKENS = 300
"""Of a self-generated conversation, about; for what is said beforehand."""
DRAFT_VOCAB = 10_240
_GIB = 1 << 30


@dataclass(frozen=True)
class JobSettings:
    """The command's options."""

    out: Path
    data: Path | None = None
    method: str = "eagle3"
    self_generated: int = 4000
    """Conversations that the target writes where no data is given."""
    minutes: float = 60.0
    """Of training itself."""
    draft_vocab: int | None = None
    """Tokens that the head learns to draft; None: DRAFT_VOCAB."""
    intermediate_size: int | None = None
    """Width of the head's MLP; None: the target's."""
    workers: int = 1
    resume: bool = False
    prompts: Path | None = None
    """Questions by which acceptance is measured; None: held-out conversations."""
    checkpoint_minutes: float = 5.0
    cache: Path | None = None
    cache_gib: float = 20.0
    seed: int = 0

    def check_out(self, *left: Path) -> None:
        """`left`: files that a run leaves there. Raises TrainingRefused."""
        if self.resume and not self.out.is_dir():
            raise TrainingRefused(f"resume: {self.out} has no run to go on with")
        if not self.resume and any(file.exists() for file in left):
            raise TrainingRefused(f"out: {self.out} has a run; --resume goes on with it")


@dataclass(frozen=True)
class Plan:
    """What is decided once for a run; it lies in the run's folder, and --resume follows it."""

    method: str
    target: str
    fingerprint: str
    """Of the target's weights and arithmetic."""
    conversations: str
    """The key of the data in the cache."""
    draft_vocab: int
    intermediate_size: int
    workers: int
    train: TrainSettings

    @classmethod
    def read(cls, path: Path) -> Plan:
        """Raises TrainingRefused, and OSError."""
        try:
            said = json.loads(path.read_text(encoding="utf-8"))
            return cls(**{**said, "train": TrainSettings(**said["train"])})
        except (ValueError, TypeError, KeyError) as error:
            raise TrainingRefused(f"resume: {path} is no plan of this version: {error}") from None

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    def check(self, other: Plan) -> None:
        """Raises TrainingRefused where a run that goes on is asked for something else."""
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            if each.name == "train":
                mine, theirs = (replace(train, steps=1) for train in (mine, theirs))
            if mine != theirs:
                name = "data" if each.name == "conversations" else each.name
                raise TrainingRefused(f"{name}: the run to resume has {mine}, not {theirs}")


@dataclass(frozen=True)
class Estimate:
    """What a training will take."""

    tokens: int
    drawn: bool
    disk_bytes: int
    memory_bytes: int
    minutes: float

    def said(self) -> str:
        how = "drawn from the target" if self.drawn else "from the data"
        return (
            f"about {self.tokens:,} tokens {how}; {self.disk_bytes / _GIB:.1f} GiB on disk,"
            f" {self.memory_bytes / _GIB:.1f} GiB of memory, {self.minutes:.0f} minutes"
        )


def estimated(
    settings: JobSettings,
    target: Any,
    tokens: int,
    aux_layers: int,
    missing_tokens: int,
    draft_vocab: int,
) -> Estimate:
    """`target`: transformers' config; `missing_tokens`: of those, not in the cache yet."""
    width, vocab = int(target.hidden_size), int(target.vocab_size)
    layers = int(target.num_hidden_layers)
    inner = int(getattr(target, "intermediate_size", 4 * width))
    weights = vocab * width + layers * width * (4 * width + 3 * inner)
    head = width * (draft_vocab + (aux_layers + 8) * width + 3 * inner)
    # A token's pass takes two operations per weight; it is drawn once and read once.
    seconds = missing_tokens * 2 * weights * (2 if settings.data is None else 1) / _speed()
    return Estimate(
        tokens=tokens,
        drawn=settings.data is None,
        disk_bytes=tokens * (token_bytes(aux_layers * width) + 2) + 3 * 4 * head,
        memory_bytes=4 * (2 * weights + 4 * head) + (2 << 30),
        minutes=settings.minutes + seconds / 60,
    )


def check_disk(settings: JobSettings, estimate: Estimate, cache: Path) -> None:
    """Raises TrainingRefused where what is needed is over the cache's bound or the disk's room."""
    if estimate.disk_bytes > settings.cache_gib * _GIB:
        raise TrainingRefused(
            f"cache_gib: {settings.cache_gib:g} GiB, and features of {estimate.tokens:,} tokens"
            f" take {estimate.disk_bytes / _GIB:.1f} GiB"
        )
    free = shutil.disk_usage(cache).free
    if estimate.disk_bytes > free:
        raise TrainingRefused(
            f"cache: {cache} has {free / _GIB:.1f} GiB free, and"
            f" {estimate.disk_bytes / _GIB:.1f} GiB are needed"
        )


def make_room(cache: Path, keep: Path, needed: int, cache_gib: float) -> list[str]:
    """Remove other runs' data, the longest unused first, until the cache is within its bound.
    Their names."""
    sizes = {
        folder: sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        for folder in cache.iterdir()
        if folder.is_dir() and folder != keep
    }
    removed = []
    for folder in sorted(sizes, key=lambda each: each.stat().st_mtime):
        if sum(sizes.values()) + needed <= cache_gib * _GIB:
            break
        shutil.rmtree(folder)
        del sizes[folder]
        removed.append(folder.name)
    return removed


def _speed() -> float:
    """Operations per second of a product in float32, roughly."""
    import torch

    x, weight = torch.randn(256, 512), torch.randn(2048, 512)
    times = []
    for _ in range(4):
        begun = perf_counter()
        x @ weight.T
        times.append(perf_counter() - begun)
    return 2 * x.shape[0] * weight.numel() / min(times)
