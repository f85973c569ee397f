"""One cluster, a load, and strikes on it for some time; what that amounts to, in counts."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from cluster.client import NO_RETRY, AsyncClient, RetryPolicy
from cluster.frontend.target_text import TargetText
from tests.chaos.answers import Base, fake_bases, real_bases
from tests.chaos.hosted import HostedCluster, Plan, cluster_config
from tests.chaos.http_load import HttpClient, http_client, takes
from tests.chaos.kills import SERVER_KINDS, Kind, Strike, Striker, draw_strikes
from tests.chaos.load import ANSWER_S_MAX, GOOD, Outcome, Verdict, longest_silence_s, put
from tests.chaos.memory import Memory
from tests.chaos.mix import Mix, draw_prompts, draw_samplings
from tests.cluster.fakes import load_fake, load_fake_text

PROMPTS = 48
REAL_PROMPTS = 24
"""Fewer: each one's answer is generated before, one token a step."""
_PROGRESS_S = 60.0
_IDLE_S = 60.0
_REPLICAS_S = 240.0
_WARM_UP = 0.2
"""The share of a phase after which memory should grow no more."""


@dataclass(frozen=True)
class Phase:
    """What runs, how much is asked of it, and what it suffers."""

    name: str
    plan: Plan
    bases: Sequence[Base]
    text: TargetText
    in_flight: int
    strikes: Sequence[Strike]
    slower: float = 1.0
    """How many times as long as on a machine with nothing else to do all may take."""

    @property
    def retry(self) -> RetryPolicy:
        """The cluster alone must hide what is behind its door; only the client what is the door."""
        behind = all(strike.kind in SERVER_KINDS for strike in self.strikes)
        return NO_RETRY if behind else RetryPolicy(give_up_s=100.0 * self.slower, attempts_max=1000)


def fake_phase(
    rng: Random, seconds: float, kinds: Sequence[Kind], shards: int = 1, slower: float = 1.0
) -> Phase:
    """Three fakes: much in flight, quick to come back."""
    config = cluster_config(
        replicas=3,
        pool={"shards": shards},
        # Few enough blocks that they run out now and then.
        replica={"num_gpu_blocks_override": 150},
        frontend={"number": 2},
        scheduler={"steps_per_batch_max": 2},
    )
    plan = Plan(config, partial(load_fake, step_s=0.03, prefill_s=0.02), load_fake_text)
    text = load_fake_text(config.replica)
    bases = fake_bases(draw_prompts(rng, text, PROMPTS))
    strikes = draw_strikes(rng, seconds, (3.0 * slower, 8.0 * slower), kinds)
    return Phase("fakes", plan, bases, text, 32, strikes, slower)


def real_phase(
    rng: Random, seconds: float, kinds: Sequence[Kind], directory: Path, slower: float = 1.0
) -> Phase:
    """Two replicas with the tiny random pair; answers were generated alone, one token a step."""
    from tests.integration.pairs import pair_settings, write_pair

    target, draft = write_pair(directory)
    config = cluster_config(
        replica=pair_settings(target, draft), replicas=2, frontend={"number": 2}
    )
    text = TargetText.load(config.replica)
    prompts = draw_prompts(rng, text, REAL_PROMPTS)
    bases = real_bases(config, prompts, draw_samplings(rng, REAL_PROMPTS))
    strikes = draw_strikes(rng, seconds, (4.0 * slower, 8.0 * slower), kinds)
    return Phase("real pair", Plan(config), bases, text, 16, strikes, slower)


def run_phase(
    phase: Phase, rng: Random, seconds: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """All figures of the phase. Raises HostError when the cluster cannot be started or steered."""
    say(f"{phase.name}: {len(phase.strikes)} strikes in {seconds:.0f} s")
    with HostedCluster(phase.plan) as hosted:
        striker = Striker(hosted)
        mix = Mix(rng, phase.bases, phase.text)
        memory = Memory(hosted)
        with striker.striking(phase.strikes), memory.sampled():
            outcomes = asyncio.run(_load(hosted, phase, mix, seconds, striker, say))
        left = _left_over(hosted, phase.slower)
    if phase.strikes and not striker.struck:
        left += "no strike has hit anything"
    figures = summary(outcomes, striker.struck, left)
    figures["memory"] = memory.figures(_WARM_UP * seconds)
    return {"phase": phase.name, "seconds": seconds, **figures}


async def _load(
    hosted: HostedCluster,
    phase: Phase,
    mix: Mix,
    seconds: float,
    striker: Striker,
    say: Callable[[str], None],
) -> list[Outcome]:
    start_s, bound_s = time.monotonic(), ANSWER_S_MAX * phase.slower
    outcomes: list[Outcome] = []

    async def one_after_the_other(over_grpc: AsyncClient, over_http: HttpClient | None) -> None:
        while time.monotonic() - start_s < seconds:
            ask = mix.draw()
            if over_http is not None and takes(ask):
                outcome = await over_http.put(ask, bound_s)
            else:
                outcome = await put(over_grpc, ask, bound_s)
            outcomes.append(outcome)
            if outcome.verdict() not in GOOD:
                say(f"{phase.name}, second {time.monotonic() - start_s:.0f}: {outcome.sentence()}")

    async def tell() -> None:
        minute = 0
        while True:
            await asyncio.sleep(_PROGRESS_S)
            minute += 1
            verdicts = Counter(outcome.verdict() for outcome in outcomes)
            kills = _listed(striker.struck)
            say(f"{phase.name}, minute {minute}: {_listed(verdicts)}; kills: {kills}")

    half = phase.in_flight // 2
    async with (
        AsyncClient(hosted.address, retry=phase.retry) as over_grpc,
        http_client(f"{hosted.http}/v1", hosted.config.model_name, half) as over_http,
    ):
        telling = asyncio.create_task(tell())
        doors = [*[None] * (phase.in_flight - half), *[over_http] * half]
        try:
            await asyncio.gather(*(one_after_the_other(over_grpc, door) for door in doors))
        finally:
            telling.cancel()
    return outcomes


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"


def _left_over(hosted: HostedCluster, slower: float) -> str:
    """What should not be there once all requests have ended; empty if nothing is."""
    try:
        hosted.wait_for_replicas(hosted.config.replicas, _REPLICAS_S * slower)
        hosted.wait_until_idle(_IDLE_S * slower)
    except AssertionError as error:
        return str(error)
    return ""


def run_all(
    seed: int,
    seconds: float,
    real_share: float,
    kinds: Sequence[Kind],
    say: Callable[[str], None],
    shards: int = 1,
    slower: float = 1.0,
) -> list[dict[str, Any]]:
    """The phases of a run, one after the other; each draws from a generator of its own.

    The fakes are in so many shards, the real pair in one. `slower`: so many times the pauses
    between strikes, and the patience.
    """
    figures = []
    with tempfile.TemporaryDirectory() as directory:
        if real_share > 0:
            rng, part_s = Random(f"{seed}/real"), seconds * real_share
            phase = real_phase(rng, part_s, kinds, Path(directory), slower)
            figures.append(run_phase(phase, rng, part_s, say))
        if real_share < 1:
            rng, part_s = Random(f"{seed}/fakes"), seconds * (1 - real_share)
            phase = fake_phase(rng, part_s, kinds, shards, slower)
            figures.append(run_phase(phase, rng, part_s, say))
    return figures


# --------------------------------------------------------------------------- figures


def summary(outcomes: Sequence[Outcome], struck: Counter[Kind], left: str) -> dict[str, Any]:
    """All figures of one phase; `left` says what was left over at its end, or nothing."""
    verdicts = Counter(outcome.verdict() for outcome in outcomes)
    return {
        "requests": len(outcomes),
        "over_http": sum(outcome.http for outcome in outcomes),
        "tokens": sum(len(outcome.tokens) for outcome in outcomes),
        "verdicts": {verdict.value: verdicts[verdict] for verdict in Verdict},
        "recovered": sum(bool(outcome.end and outcome.end.recovered) for outcome in outcomes),
        "kills": {kind.value: struck[kind] for kind in Kind},
        "longest_silence_s": longest_silence_s(outcomes),
        "left_over": left,
        "slowest": [
            outcome.sentence()
            for outcome in sorted(outcomes, key=lambda outcome: -outcome.total_s)[:5]
        ],
        "bad": [outcome.sentence() for outcome in outcomes if outcome.verdict() not in GOOD][:20],
    }


def is_clean(figures: dict[str, Any]) -> bool:
    """Something was asked, and nothing lost, doubled, wrong or left over."""
    good = sum(figures["verdicts"][verdict.value] for verdict in GOOD)
    return 0 < good == figures["requests"] and not figures["left_over"]


def sentences(figures: dict[str, Any]) -> str:
    """For people."""
    lines = [
        f"{figures['requests']} requests ({figures['over_http']} over HTTP), "
        f"{figures['tokens']} tokens: "
        + ", ".join(f"{count} {name}" for name, count in figures["verdicts"].items()),
        "kills: " + ", ".join(f"{count} {name}" for name, count in figures["kills"].items()),
        f"longest silence of a stream: {figures['longest_silence_s']:.2f} s",
        f"left over at the end: {figures['left_over'] or 'nothing'}",
    ]
    return "\n".join([*lines, *figures["bad"]])
