"""Proves that Serve's policy never blocks, never raises, survives pickling, and follows the pool.

The pool is played by a function; what Ray does with the policy for real is shown by
tests/integration/failures/test_processes.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from ray import cloudpickle
from ray.exceptions import ActorDiedError, GetTimeoutError

from cluster.autoscaling import PoolPolicy, Pools, serve_autoscaling
from cluster.config_sources import from_args, from_file
from cluster.pool.protocol import PoolView, merged_view
from cluster.worker import resources
from scheduler.messages import ReplicaSpec
from scheduler.scaling import AutoscalingConfig
from scheduler.state import BatchFigures
from scheduler.status import PoolStatus, ReplicaStatus
from tests.cluster.fakes import Clock

SETTINGS: dict[str, Any] = {
    "min_replicas": 0,
    "max_replicas": 4,
    "drain_s": 10.0,
    "up_delay_s": 1.0,
    "down_delay_s": 20.0,
    "idle_s": 60.0,
    "tokens_per_s": 100.0,
    "look_s": 0.5,
}
SPEC = ReplicaSpec(kv_blocks=2000, block_size=16, context_len=2048, vocab_size=50)
BOUND_S = 10.0


def policy_of(
    ask: Callable[[], PoolStatus], clock: Callable[[], float], silent: Sequence[str] = ()
) -> PoolPolicy:
    """`silent` are read at every look."""

    def view() -> PoolView:
        return PoolView("incarnation", 1.0, ask(), silent=tuple(silent))

    return PoolPolicy(["pool"], "lockstep", SETTINGS, rows_max=8, ask=view, clock=clock)


def decide(policy: PoolPolicy, target: int) -> int:
    """What Serve gets; a state in between two decisions it must keep for nobody."""
    number, state = policy(SimpleNamespace(target_num_replicas=target))
    assert state == {}
    return number


def settle(policy: PoolPolicy, target: int) -> int:
    """Ask until the answer that is under way has been taken into account."""
    decide(policy, target)
    answer = policy.answer
    assert answer is not None, "the pool was not asked"
    answer.exception(BOUND_S)
    return decide(policy, target)


def pool_of(tokens: int, waiting: int = 0) -> PoolStatus:
    return PoolStatus(waiting, waiting, (), {}, outstanding_tokens=tokens)


def test_the_number_follows_what_the_pool_says() -> None:
    clock = Clock()
    says = pool_of(0)
    policy = policy_of(lambda: says, clock)
    target = 0
    seen = []
    for now_s, tokens in [(0, 0), (1, 5), (2, 2500), (3, 2500), (4, 0), (23, 0), (24, 0), (90, 0)]:
        clock.now_s = float(now_s)
        says = pool_of(tokens, waiting=min(tokens, 1))
        target = settle(policy, target)
        seen.append(target)
    assert seen == [0, 1, 1, 3, 3, 3, 2, 1]


def test_a_pool_that_hangs_holds_up_nobody_and_changes_nothing() -> None:
    gate, answered = threading.Event(), threading.Event()

    def hang() -> PoolStatus:
        gate.wait(60)
        answered.set()
        return pool_of(10_000, waiting=5)

    policy = policy_of(hang, time.monotonic)
    try:
        assert {decide(policy, 2) for _ in range(100)} == {2}
        assert not answered.is_set(), "it was waited for"
    finally:
        gate.set()


@pytest.mark.parametrize("hidden", ["all", "a part"])
def test_nothing_is_removed_for_what_cannot_be_seen(hidden: str) -> None:
    """Idle before and after, and nobody knows what was between."""
    clock = Clock()
    silent: list[str] = []
    fails = False

    def ask() -> PoolStatus:
        if fails:
            raise ValueError("no answer")
        return pool_of(0)

    policy = policy_of(ask, clock, silent)
    seen = []
    for now_s in (0, 10, 30, 200, 210, 211, 229, 231):
        clock.now_s = float(now_s)
        fails = hidden == "all" and 10 <= now_s <= 210
        silent[:] = ["shard-b"] if hidden == "a part" and 10 <= now_s <= 210 else []
        seen.append(settle(policy, 3))
    assert seen == [3, 3, 3, 3, 3, 3, 3, 2]


def test_what_a_replica_commits_is_judged_by_the_queue_of_its_own_shard() -> None:
    """Two rows at 70/s where nobody waits, and full groups at 500/s where somebody does."""
    clock = Clock()
    second = 0

    def shard(name: str, waiting: int, rows: int, per_s: int) -> PoolView:
        figures = BatchFigures(
            busy_s=float(second),
            steps=second,
            row_steps=second * rows,
            committed_tokens=second * per_s,
        )
        replica = ReplicaStatus(name, SPEC, figures=figures)
        status = PoolStatus(waiting, waiting, (replica,), {}, outstanding_tokens=6000)
        return PoolView(name, 1.0, status)

    def ask() -> PoolView:
        return merged_view([shard("a", 5, 8, 500), shard("b", 0, 2, 70)])

    policy = PoolPolicy(["a", "b"], "lockstep", SETTINGS, rows_max=8, ask=ask, clock=clock)
    for second in range(0, 100, 2):
        clock.now_s = float(second)
        wanted = settle(policy, 2)
    assert wanted == 3, "12,000 tokens in 10 s, at 500/s each"


class Actor:
    """A pool as Ray shows it: answers, hangs, or has died."""

    def __init__(self, tokens: int) -> None:
        self.state = "well"
        self.asked: list[Future[PoolView]] = []
        self._tokens = tokens
        self.status = SimpleNamespace(remote=self._remote)

    def _remote(self) -> Future[PoolView]:
        asked: Future[PoolView] = Future()
        self.asked.append(asked)
        if self.state == "well":
            asked.set_result(PoolView("incarnation", 1.0, pool_of(self._tokens)))
        elif self.state == "dead":
            asked.set_exception(ActorDiedError())
        return asked


def test_shards_that_answer_are_seen_though_another_hangs_or_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    actors = {"a": Actor(10), "b": Actor(20)}
    found: list[str] = []

    def get_actor(name: str, namespace: str) -> Actor:
        found.append(name)
        return actors[name]

    def get(asked: Future[PoolView], timeout: float) -> PoolView:
        if not asked.done():
            raise GetTimeoutError
        return asked.result()

    def wait_all(asked: list[Future[PoolView]], *, num_returns: int, timeout: float) -> None:
        assert num_returns == len(asked)
        wait(asked, timeout / 100)

    ray = SimpleNamespace(get_actor=get_actor, get=get, wait=wait_all)
    monkeypatch.setattr("cluster.autoscaling.ray", ray)
    pools = Pools(["a", "b"], "lockstep")
    assert (pools().status.outstanding_tokens, pools().silent) == (30, ())
    actors["b"].state = "hangs"
    for _ in range(3):
        view = pools()
        assert (view.status.outstanding_tokens, view.silent) == (10, ("b",))
    assert sum(not asked.done() for asked in actors["b"].asked) == 1, "one call to answer for"
    actors["b"].asked[-1].set_result(PoolView("incarnation", 1.0, pool_of(5)))
    view = pools()
    assert (view.status.outstanding_tokens, view.silent) == (15, ())
    assert pools().silent == ("b",)
    actors["b"].asked[-1].set_exception(ActorDiedError())
    assert pools().silent == ("b",)
    assert found == ["a", "b"]
    actors["b"].state = "well"
    assert (pools().status.outstanding_tokens, found) == (30, ["a", "b", "b"])
    for actor in actors.values():
        actor.state = "dead"
    with pytest.raises(ActorDiedError):
        pools()


def test_figures_that_make_no_sense_change_nothing() -> None:
    clock = Clock()
    policy = policy_of(lambda: None, clock)  # type: ignore[arg-type, return-value]
    assert settle(policy, 2) == 2


def test_the_pool_is_asked_no_more_often_than_the_settings_say() -> None:
    clock = Clock()
    asked = []

    def ask() -> PoolStatus:
        asked.append(clock.now_s)
        return pool_of(0)

    policy = policy_of(ask, clock)
    for tenth in range(20):
        clock.now_s = tenth / 10
        decide(policy, 1)
        if policy.answer is not None:
            policy.answer.exception(BOUND_S)
        decide(policy, 1)
    assert len(asked) == 4


def test_the_thread_ends_with_the_policy() -> None:
    before = set(threading.enumerate())
    policy = policy_of(lambda: pool_of(0), Clock())
    settle(policy, 0)
    [thread] = set(threading.enumerate()) - before
    del policy
    thread.join(BOUND_S)
    assert not thread.is_alive()


def test_the_policy_reaches_the_controller_by_pickle_and_kwargs() -> None:
    config = from_args({"autoscaling": SETTINGS, "batch_size": 16})
    option = serve_autoscaling(config)
    assert (option.min_replicas, option.max_replicas) == (0, 4)
    # As Serve does it: the class by value, then called with the kwargs of the config.
    made = cloudpickle.loads(option.policy.get_serialized_policy_def())
    policy = made(**option.policy.policy_kwargs)
    assert policy.config == AutoscalingConfig.model_validate(SETTINGS)
    assert option.policy.policy_kwargs["pool_names"] == config.pool_names


def test_without_the_section_the_number_is_fixed() -> None:
    config = from_args({"replicas": 3})
    assert serve_autoscaling(config) is None
    assert (config.replicas_min, config.replicas_max) == (3, 3)


def test_replicas_that_may_come_share_the_cores_from_the_first_on() -> None:
    config = from_args({"autoscaling": {"max_replicas": 64}})
    assert resources.replica_config(config).torch_threads == 1


def test_the_serve_config_file_shows_a_section_that_is_valid(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "deploy" / "serve.yaml").read_text()
    assert "# autoscaling:" in text
    path = tmp_path / "serve.yaml"
    path.write_text(text.replace("# autoscaling:", "autoscaling:"))
    yaml.safe_load(path.read_text())
    assert from_file(path).replicas_max == 4
