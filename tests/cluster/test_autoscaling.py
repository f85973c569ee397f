"""Proves that Serve's policy never blocks, never raises, survives pickling, and follows the pool.

The pool is played by a function; what Ray does with the policy for real is shown by
tests/integration/failures/test_processes.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray import cloudpickle
from ray.exceptions import GetTimeoutError

from cluster.autoscaling import PoolPolicy, Pools, serve_autoscaling
from cluster.config_sources import from_args
from cluster.pool.protocol import PoolView
from cluster.worker import resources
from scheduler.messages import ReplicaSpec
from scheduler.scaling import AutoscalingConfig
from scheduler.status import PoolStatus
from tests.cluster.fakes import Clock

SETTINGS: dict[str, Any] = {
    "min_replicas": 0,
    "max_replicas": 4,
    "drain_s": 10.0,
    "up_delay_s": 1.0,
    "down_delay_s": 20.0,
    "idle_s": 60.0,
    "tokens_per_s": 100.0,
}
SPEC = ReplicaSpec(kv_blocks=2000, block_size=16, context_len=2048, vocab_size=50)
BOUND_S = 10.0


def policy_of(ask: Callable[[], PoolStatus], clock: Callable[[], float]) -> PoolPolicy:
    return PoolPolicy(["pool"], SETTINGS, rows_max=8, ask=lambda: [ask()], clock=clock)


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


def test_a_pool_that_hangs_holds_up_nobody_and_its_thread_ends_with_the_policy() -> None:
    before = set(threading.enumerate())
    gate, answered = threading.Event(), threading.Event()

    def hang() -> PoolStatus:
        gate.wait(60)
        answered.set()
        return pool_of(10_000, waiting=5)

    policy = policy_of(hang, time.monotonic)
    try:
        assert {decide(policy, 2) for _ in range(100)} == {2}
        assert not answered.is_set(), "it was waited for"
        [thread] = set(threading.enumerate()) - before
    finally:
        gate.set()
    del policy
    thread.join(BOUND_S)
    assert not thread.is_alive()


def test_the_number_follows_the_pool_and_nothing_is_removed_for_what_cannot_be_seen() -> None:
    """Idle before and after, and nobody knows what was between: no answer, or one that makes no
    sense. It is asked once a look."""
    clock = Clock()
    asked = []

    def ask() -> Any:
        asked.append(clock.now_s)
        if clock.now_s == 30:
            return None
        if 10 <= clock.now_s <= 210:
            raise ValueError("no answer")
        return pool_of(2500 if clock.now_s > 300 else 0)

    policy = policy_of(ask, clock)
    seen = []
    looks = [0, 10, 30, 200, 210, 211, 229, 231, 301, 303]
    for now_s in looks:
        clock.now_s = float(now_s)
        seen.append(settle(policy, 3 if now_s < 300 else 1))
        decide(policy, 3)
    assert seen == [3, 3, 3, 3, 3, 3, 3, 2, 1, 3]
    assert asked == looks


def test_all_shards_are_seen_or_none_and_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens: dict[str, int | None] = {"a": 10, "b": 20}
    found: list[str] = []

    def get_actor(name: str, namespace: str) -> Any:
        found.append(name)
        return SimpleNamespace(status=SimpleNamespace(remote=lambda: name))

    def get(asked: list[str], timeout: float) -> list[PoolView]:
        if None in tokens.values():
            raise GetTimeoutError
        return [PoolView(name, 1.0, pool_of(tokens[name] or 0)) for name in asked]

    ray = SimpleNamespace(get_actor=get_actor, get=get)
    monkeypatch.setattr("cluster.autoscaling.ray", ray)
    pools = Pools(["a", "b"])
    for _ in range(2):
        assert [one.outstanding_tokens for one in pools()] == [10, 20]
    assert found == ["a", "b"]
    tokens["b"] = None
    with pytest.raises(GetTimeoutError):
        pools()
    tokens["b"] = 5
    assert [one.outstanding_tokens for one in pools()] == [10, 5]
    assert found == ["a", "b"] * 2


def test_the_policy_reaches_the_controller_by_pickle_and_kwargs() -> None:
    assert serve_autoscaling(from_args({"replicas": 3})) is None
    config = from_args({"autoscaling": SETTINGS, "batch_size": 16})
    # Replicas that may come share the cores from the first on.
    many = from_args({"autoscaling": {"max_replicas": 64}})
    assert resources.replica_config(many).torch_threads == 1
    option = serve_autoscaling(config)
    assert (option.min_replicas, option.max_replicas) == (0, 4)
    # As Serve does it: the class by value, then called with the kwargs of the config.
    made = cloudpickle.loads(option.policy.get_serialized_policy_def())
    policy = made(**option.policy.policy_kwargs)
    assert policy.config == AutoscalingConfig.model_validate(SETTINGS)
    assert option.policy.policy_kwargs["pool_names"] == config.pool_names
