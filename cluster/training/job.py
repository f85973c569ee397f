"""Trains a drafter: data, features, steps with checkpoints, the head, what it gains.

Everything that took long lies on the disk when it is done: conversations and features in the cache,
checkpoints in the run's folder. Whatever ends the process, `resume` goes on from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import Any

from cluster.prompt_files import read_prompts
from cluster.training.preparation import Preparation
from cluster.training.settings import Plan
from replicas.config import SpeculativeConfig
from replicas.training import (
    DRAFT_LEN,
    Acceptance,
    FeatureFolder,
    Item,
    Start,
    Training,
    TrainSettings,
    acceptance_of,
    read_part,
    write_head,
)
from scheduler.messages import ReplicaSpec, Request

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


class Job(Preparation):
    @property
    def checkpoint(self) -> Path:
        return self.settings.out / "checkpoint.pt"

    def run(self) -> Outcome:
        """Raises TrainingRefused, PairRefused, OSError."""
        settings = self.settings
        plan_file, old = settings.out / "plan.json", None
        settings.check_out(plan_file)
        if plan_file.is_file():
            old = Plan.read(plan_file)
        if settings.workers > 1:
            from cluster.training.workers import check_installed

            check_installed()
        self.check()
        settings.out.mkdir(parents=True, exist_ok=True)
        folder, key, fingerprint = self.conversations()
        features = self.features(folder)
        train, held_out = self.divided(folder)
        start = self.start(folder, features, train)
        plan = Plan(
            settings.method,
            self.replica.target,
            fingerprint,
            key,
            self.draft_vocab,
            self.inner,
            settings.workers,
            self.train_settings(),
        )
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
                accepted = history[-1]["accepted"] if history else 0.0
                said = f"{progress.tokens:,} tokens, loss {losses[-1]:.2f}, {accepted:.2f} accepted"
                self.note("training (steps)", progress.step, steps, said)
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
        head = SpeculativeConfig(method=self.method.name, model=str(self.settings.out.resolve()))
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
