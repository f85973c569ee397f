"""What a training needs before its first step: conversations, features, a new head; kept in the
cache, where a later run finds them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from cluster.local.engine import NO_QUEUE_LIMITS, LocalEngine
from cluster.training.settings import (
    CONVERSATION_TOKENS,
    DRAFT_VOCAB,
    JobSettings,
    check_disk,
    estimated,
    make_room,
)
from replicas.config import ReplicaConfig, SpeculativeConfig
from replicas.decoding import end_of_turn_ids, read_tokens
from replicas.errors import TrainingRefused
from replicas.models import (
    cache_directory,
    dtype_name,
    load_config,
    read_model,
    resolve,
    resolve_device,
)
from replicas.replica import Replica
from replicas.training import (
    METHODS,
    ConversationFolder,
    Drawing,
    DrawSettings,
    FeatureFolder,
    Item,
    Start,
    TrainSettings,
    TurnFrame,
    divided,
    native_bfloat16,
    take_in,
)
from scheduler.config import SchedulerConfig


class Note(Protocol):
    """A phase, how much of it is done, of how much, and what else is said of it."""

    def __call__(self, phase: str, done: int, total: int | None, said: str = "") -> None: ...


CONTEXT_LEN = 1024
"""Of a conversation at most, where nothing else is said."""
ROWS = 64
"""Of a batch while the target writes: a whole tile of the CPU's products."""


class Preparation:
    def __init__(
        self, settings: JobSettings, replica: ReplicaConfig, say: Callable[[str], None], note: Note
    ) -> None:
        none = SpeculativeConfig(method="none")
        self.settings, self.say, self.note = settings, say, note
        self.replica = replica.model_copy(update={"speculative_config": none, "calibrate": False})
        self.target = load_config(resolve(replica.target), self.replica, "target")
        self.tokenizer, eos = read_tokens(self.replica)
        self.ends = end_of_turn_ids(self.tokenizer, eos, int(self.target.vocab_size))
        self.cache = settings.cache or cache_directory() / "training"
        self.device = resolve_device(replica.device)
        self.method = METHODS[settings.method]
        self.layers = self.method.aux_layers(int(self.target.num_hidden_layers))
        self._disk_bytes = 0
        """Expected; known when it was checked."""

    @property
    def inner(self) -> int:
        own = getattr(self.target, "intermediate_size", None) or 4 * int(self.target.hidden_size)
        return self.settings.intermediate_size or int(own)

    @property
    def draft_vocab(self) -> int:
        vocab = int(self.target.vocab_size)
        return self.settings.draft_vocab or min(DRAFT_VOCAB, vocab)

    def check(self) -> None:
        """Refuse what can be refused early, and say what is to come."""
        settings, vocab = self.settings, int(self.target.vocab_size)
        if self.draft_vocab > vocab:
            raise TrainingRefused(
                f"draft_vocab: {self.draft_vocab}, and the target has {vocab} tokens"
            )
        self.method.settings(self.target, self.draft_vocab, self.inner)
        if settings.data is None:
            TurnFrame.of(self.tokenizer, self.ends)
            tokens = settings.self_generated * CONVERSATION_TOKENS
        else:
            tokens = settings.data.stat().st_size // 4
        self.cache.mkdir(parents=True, exist_ok=True)
        estimate = estimated(
            settings, self.target, tokens, len(self.layers), tokens, self.draft_vocab
        )
        self.say(f"This will take: {estimate.said()}.")
        check_disk(settings, estimate, self.cache)
        self._disk_bytes = estimate.disk_bytes

    # ----------------------------------------------------------------- data

    def _replica(self, rows: int, **changes: Any) -> Replica:
        limit = int(getattr(self.target, "max_position_embeddings", CONTEXT_LEN))
        context = self.replica.context_len or min(limit, CONTEXT_LEN)
        told = {
            "context_len": context,
            "num_gpu_blocks_override": self.replica.num_gpu_blocks_override
            or rows * context // self.replica.block_size // 2,
            "plan_rows": rows,
            **changes,
        }
        return Replica.load(self.replica.model_copy(update=told))

    def conversations(self) -> tuple[ConversationFolder, str, str]:
        """Those to train on, drawn or read where they are not there; their key in the cache, and
        the target's fingerprint. Raises TrainingRefused and OSError."""
        replica = self._replica(ROWS)
        settings, spec = self.settings, replica.spec
        template = str(getattr(self.tokenizer, "chat_template", None))
        if settings.data is not None:
            with settings.data.open("rb") as file:
                source = hashlib.file_digest(file, "sha256").hexdigest()
        else:
            drawn = DrawSettings(seed=settings.seed << 32)
            source = repr((drawn, settings.self_generated))
        said = repr((spec.fingerprint, template, source))
        key = hashlib.sha256(said.encode()).hexdigest()[:24]
        own = self.cache / key
        for name in make_room(self.cache, own, self._disk_bytes, settings.cache_gib):
            self.say(f"removed the data of another run from the cache: {name}")
        folder = ConversationFolder(own / "conversations")
        os.utime(own)  # used now
        if settings.data is not None:
            if not folder.parts:
                take_in(settings.data, folder, self.tokenizer, spec.context_len, spec.vocab_size)
            self.say(folder.counts().said())
            return folder, key, spec.fingerprint
        frame = TurnFrame.of(self.tokenizer, self.ends)
        room = spec.context_len - len(frame.before_user) - len(frame.before_answer)
        drawn = replace(
            drawn,
            question_tokens=min(drawn.question_tokens, room // 3),
            answer_tokens=min(drawn.answer_tokens, room // 2),
        )
        rows = min(ROWS, spec.rows_max or ROWS)
        engine = self._engine(replica, rows)
        drawing = Drawing(engine, rows, frame, folder, drawn)
        for counts in drawing.run(settings.self_generated):
            self.note("conversations", counts.kept, settings.self_generated)
        self.say(drawing.counts.said())
        return folder, key, spec.fingerprint

    def _engine(self, replica: Replica, rows: int, draft_len: int | None = 0) -> LocalEngine:
        limits = {**NO_QUEUE_LIMITS, "timeout_s_max": 1e9}
        config = SchedulerConfig(
            rows_max=rows, residents_max=max(rows, 2), draft_len=draft_len, **limits
        )
        return LocalEngine(replica, config)

    def _model(self) -> Any:
        """The target by itself, for its hidden states."""
        config = self.replica
        path = resolve(config.target, "target", dtype_name(config))
        return read_model(path, config, "target").to(self.device)

    def features(self, folder: ConversationFolder) -> FeatureFolder:
        width = len(self.layers) * int(self.target.hidden_size)
        name = "features-" + "-".join(map(str, self.layers))
        features = FeatureFolder(folder.folder.parent / name, width)
        missing = features.missing(folder)
        if missing:
            model, parts = self._model(), len(folder.parts)
            with torch.autocast(
                self.device.type, torch.bfloat16, enabled=native_bfloat16(self.device)
            ):
                for _ in features.fill(folder, model, self.layers):
                    done = parts - len(features.missing(folder))
                    self.note("features (parts)", done, parts)
        return features

    def start(
        self, folder: ConversationFolder, features: FeatureFolder, train: Sequence[Item]
    ) -> Start:
        file = self._start_file(features)
        if not file.is_file():
            size, seed = (self.draft_vocab, self.inner), self.settings.seed
            made = Start.of(self.method, self._model(), *size, folder, features, train, seed)
            made.write(file)
        return Start.read(file)

    def divided(self, folder: ConversationFolder) -> tuple[list[Item], list[Item]]:
        """To train on, and held out. Raises TrainingRefused."""
        train, held_out = divided(folder)
        if not train or not held_out:
            raise TrainingRefused(f"data: {len(train) + len(held_out)} conversations are too few")
        return train, held_out

    def train_settings(self) -> TrainSettings:
        """But for the number of steps."""
        return TrainSettings(
            9,
            unroll=self.method.unroll,
            step_weight=self.method.step_weight,
            seed=self.settings.seed,
            bfloat16=native_bfloat16(self.device),
        )

    def _start_file(self, features: FeatureFolder) -> Path:
        settings = self.settings
        sizes = f"{self.draft_vocab}-{self.inner}-{settings.seed}"
        return features.folder.parent / f"start-{settings.method}-{sizes}.safetensors"
