"""Trains a drafter: data, features, steps with checkpoints, the head, what it gains.

Everything that took long lies on the disk when it is done: conversations and features in the cache,
checkpoints in the run's folder. Whatever ends the process, `resume` goes on from there.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from cluster.local.engine import NO_QUEUE_LIMITS, LocalEngine
from cluster.prompt_files import read_prompts
from cluster.training.settings import (
    CONVERSATION_TOKENS,
    JobSettings,
    Plan,
    check_disk,
    estimated,
    make_room,
)
from replicas.config import ReplicaConfig, SpeculativeConfig
from replicas.decoding import end_of_turn_ids, read_tokens
from replicas.errors import TrainingRefused
from replicas.models.gguf import cache_directory
from replicas.models.loader import dtype_name, load_config, read_model, resolve, resolve_device
from replicas.replica import Replica
from replicas.training import (
    DRAFT_LEN,
    Acceptance,
    ConversationFolder,
    Drawing,
    DrawSettings,
    FeatureFolder,
    Item,
    Start,
    Training,
    TrainSettings,
    TurnFrame,
    acceptance_of,
    aux_layers,
    divided,
    native_bfloat16,
    read_part,
    take_in,
    write_head,
)
from scheduler.config import SchedulerConfig
from scheduler.messages import ReplicaSpec, Request

Note = Callable[[str, int, int | None], None]
"""A phase, how much of it is done, of how much."""
ROWS = 64
"""Of a batch while the target writes: a whole tile of the CPU's products."""
POINTS = 8
"""How often in a run acceptance is measured."""
FEW, MANY = 8, 24
"""Prompts of a measurement on the way, and of the last one."""
NEW_TOKENS = 96


@dataclass
class Outcome:
    """What a training has come to."""

    plan: Plan
    history: list[dict[str, Any]]
    """By steps: loss, and here and there acceptance."""
    acceptance: Acceptance
    spec: ReplicaSpec
    """Of a replica with the head: its trials have this machine's times."""
    data: str
    coverage: float
    parameters: int
    seconds: float


class Job:
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
        self.checkpoint = settings.out / "checkpoint.pt"
        self.layers = aux_layers(int(self.target.num_hidden_layers))
        self._disk_bytes = 0
        """Expected; known when it was checked."""

    def run(self) -> Outcome:
        """Raises TrainingRefused, PairRefused, OSError."""
        settings = self.settings
        plan_file, old = settings.out / "plan.json", None
        if settings.resume:
            if not plan_file.is_file():
                raise TrainingRefused(f"resume: {settings.out} has no run to go on with")
            old = Plan.read(plan_file)
        elif plan_file.exists():
            raise TrainingRefused(f"out: {settings.out} has a run; --resume goes on with it")
        if settings.workers > 1:
            from cluster.training.workers import check_installed

            check_installed()
        self.check()
        folder, key, fingerprint = self.conversations()
        features = self.features(folder)
        train, held_out = self.divided(folder)
        start = self.start(folder, features, train)
        plan = Plan(
            self.replica.target,
            fingerprint,
            key,
            settings.draft_vocab,
            self.inner,
            settings.workers,
            self.train_settings(),
        )
        settings.out.mkdir(parents=True, exist_ok=True)
        if old is not None:
            old.check(plan)
            plan = old
        else:
            plan = replace(plan, train=self._timed(plan, start, features, train))
            plan.write(plan_file)
        self.say(
            f"{len(train)} conversations to train on, {len(held_out)} held out; the head drafts"
            f" {start.coverage:.1%} of their tokens; {plan.train.steps} steps"
        )
        begun = monotonic()
        training, history = self._trained(plan, start, features, train, held_out)
        final, spec = self.measured(self.prompts(held_out, MANY), calibrate=True)
        parameters = sum(each.numel() for each in training.head.parameters())
        return Outcome(
            plan,
            history,
            final,
            spec,
            folder.counts().said(),
            start.coverage,
            parameters,
            training.progress.seconds or monotonic() - begun,
        )

    # ----------------------------------------------------------------- before

    @property
    def inner(self) -> int:
        own = getattr(self.target, "intermediate_size", None) or 4 * int(self.target.hidden_size)
        return self.settings.intermediate_size or int(own)

    def check(self) -> None:
        """Refuse what can be refused early, and say what is to come."""
        settings = self.settings
        vocab = int(self.target.vocab_size)
        if settings.draft_vocab > vocab:
            raise TrainingRefused(
                f"draft_vocab: {settings.draft_vocab}, and the target has {vocab} tokens"
            )
        if settings.data is None:
            TurnFrame.of(self.tokenizer, self.ends)
            tokens = settings.self_generated * CONVERSATION_TOKENS
        else:
            tokens = settings.data.stat().st_size // 4
        self.cache.mkdir(parents=True, exist_ok=True)
        estimate = estimated(settings, self.target, tokens, len(self.layers), tokens)
        self.say(f"This will take: {estimate.said()}.")
        check_disk(settings, estimate, self.cache)
        self._disk_bytes = estimate.disk_bytes

    # ----------------------------------------------------------------- data

    def _replica(self, rows: int, **changes: Any) -> Replica:
        context = min(
            int(self.replica.context_len or 1 << 30),
            int(getattr(self.target, "max_position_embeddings", 1024)),
            1024,
        )
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
            vocab, inner, seed = self.settings.draft_vocab, self.inner, self.settings.seed
            Start.of(self._model(), vocab, inner, folder, features, train, seed).write(file)
        return Start.read(file)

    def divided(self, folder: ConversationFolder) -> tuple[list[Item], list[Item]]:
        """To train on, and held out. Raises TrainingRefused."""
        train, held_out = divided(folder)
        if not train or not held_out:
            raise TrainingRefused(f"data: {len(train) + len(held_out)} conversations are too few")
        return train, held_out

    def train_settings(self) -> TrainSettings:
        """But for the number of steps."""
        return TrainSettings(9, seed=self.settings.seed, bfloat16=native_bfloat16(self.device))

    def _start_file(self, features: FeatureFolder) -> Path:
        settings = self.settings
        name = f"start-{settings.draft_vocab}-{self.inner}-{settings.seed}.safetensors"
        return features.folder.parent / name

    # ----------------------------------------------------------------- training

    def _timed(
        self, plan: Plan, start: Start, features: FeatureFolder, train: Sequence[Item]
    ) -> TrainSettings:
        """How many steps there are in the minutes, by the time of a few."""
        tried = Training(start.head(self.target).to(self.device), features, train, plan.train)
        tried.step()
        begun = monotonic()
        for _ in range(3):
            tried.step()
        step_s = (monotonic() - begun) / 3
        return replace(plan.train, steps=max(10, round(60 * self.settings.minutes / step_s)))

    def _trained(
        self,
        plan: Plan,
        start: Start,
        features: FeatureFolder,
        train: Sequence[Item],
        held_out: Sequence[Item],
    ) -> tuple[Training, list[dict[str, Any]]]:
        head = start.head(self.target).to(self.device)
        training = Training(head, features, train, plan.train)
        history: list[dict[str, Any]] = []
        if self.settings.resume and self.checkpoint.is_file():
            history = training.load(self.checkpoint)
        if plan.workers > 1:
            from cluster.training.workers import train_over_ray

            train_over_ray(
                self.settings.out,
                plan.workers,
                plan.train,
                self._start_file(features),
                self.target,
                features,
                train,
                self.device.type == "cuda",
                60 * self.settings.checkpoint_minutes,
            )
            training.load(self.checkpoint)
            self._point(training, start, held_out, history, ())
            return training, history
        steps, progress = plan.train.steps, training.progress
        every = max(POINTS, steps // POINTS)
        losses: list[float] = []
        saved = begun = monotonic()
        before = training.progress.seconds
        try:
            while (progress := training.progress).step < steps:
                losses.append(training.step())
                progress.seconds = before + monotonic() - begun
                self.note("training (steps)", progress.step, steps)
                if progress.step % every == 0 or progress.step == steps:
                    self._point(training, start, held_out, history, losses)
                    losses = []
                    training.save(self.checkpoint, history)
                    saved = monotonic()
                elif monotonic() - saved >= 60 * self.settings.checkpoint_minutes:
                    training.save(self.checkpoint, history)
                    saved = monotonic()
        except KeyboardInterrupt:
            training.save(self.checkpoint, history)
            raise
        return training, history

    def _point(
        self,
        training: Training,
        start: Start,
        held_out: Sequence[Item],
        history: list[dict[str, Any]],
        losses: Sequence[float],
    ) -> None:
        """Write the head as it is, and measure it."""
        self.write(training, start)
        scores = training.score(held_out[:64])
        real, _ = self.measured(self.prompts(held_out, FEW))
        progress = training.progress
        mean = sum(losses) / len(losses) if losses else scores.loss
        history.append(
            {
                "step": progress.step,
                "tokens": progress.tokens,
                "loss": mean,
                "held_out_loss": scores.loss,
                "forced": scores.accepted,
                "accepted": real.accepted,
            }
        )
        self.say(
            f"step {progress.step}, {progress.tokens:,} tokens: loss {mean:.3f}, held out"
            f" {scores.loss:.3f}; {real.said()}"
        )

    def write(self, training: Training, start: Start) -> None:
        write_head(
            self.settings.out,
            start.settings,
            training.head.tensors(),
            start.ids,
            int(self.target.vocab_size),
            self.replica.target,
        )

    # ----------------------------------------------------------------- figures

    def prompts(self, held_out: Sequence[Item], most: int) -> list[tuple[int, ...]]:
        if self.settings.prompts is not None:
            turns = read_prompts(self.settings.prompts)
            step = max(1, len(turns) // most)  # of every category, where they stand in order
            return [self._asked(text) for text in turns[::step][:most]]
        found = []
        parts: dict[Path, list[Any]] = {}
        for item in islice(held_out, most):
            if item.part not in parts:
                parts[item.part] = list(read_part(item.part))
            found.append(parts[item.part][item.index].ids[: item.answer])
        return found

    def _asked(self, text: str) -> tuple[int, ...]:
        rendered = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        return tuple(self.tokenizer(rendered, add_special_tokens=False)["input_ids"])

    def measured(
        self, prompts: Sequence[tuple[int, ...]], calibrate: bool = False
    ) -> tuple[Acceptance, ReplicaSpec]:
        """Of the head in the run's folder: real steps of the engine, greedy, DRAFT_LEN tokens."""
        head = SpeculativeConfig(method="eagle3", model=str(self.settings.out.resolve()))
        replica = self._replica(FEW, speculative_config=head, calibrate=calibrate)
        room = replica.spec.context_len - NEW_TOKENS
        requests = [
            Request(f"{number}", prompt, NEW_TOKENS, stop_token_ids=self.ends)
            for number, prompt in enumerate(prompts)
            if len(prompt) <= room
        ]
        engine = self._engine(replica, FEW, DRAFT_LEN)
        begun = monotonic()
        engine.generate(requests)
        return acceptance_of(engine.results, DRAFT_LEN, monotonic() - begun), replica.spec

    def described(self) -> dict[str, Any]:
        return {name: str(value) for name, value in asdict(self.settings).items()}
