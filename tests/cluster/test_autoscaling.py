"""Proves that Serve's policy never waits, never raises, survives pickling, and follows the pool.

The pools are played; what Ray does with the policy for real is shown by
tests/integration/failures/test_processes.py.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from ray import cloudpickle

from cluster.autoscaling import PoolPolicy, serve_autoscaling
from cluster.config_sources import from_args
from cluster.pool.protocol import PoolView
from cluster.worker import resources
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


class Pools:
    """What Ray knows of the actors of shards; `says` is what each answers, in this order."""

    def __init__(self, *says: Any) -> None:
        self.says = [*says]
        """None: it hangs; an error: it fails."""
        self.found: list[str] = []
        self.asked_s: list[float] = []
        self.clock = Clock()
        self.finds = threading.Event()
        self.finds.set()

    def get_actor(self, name: str, namespace: str) -> Any:
        self.found.append(name)
        assert self.finds.wait(20)
        return SimpleNamespace(status=SimpleNamespace(remote=lambda: self._ask(int(name))))

    def _ask(self, shard: int) -> Any:
        answer: Future[PoolView] = Future()
        self.asked_s.append(self.clock.now_s)
        if isinstance(status := self.says[shard], Exception):
            answer.set_exception(status)
        elif status is not None:
            answer.set_result(PoolView("", 1.0, status))
        return SimpleNamespace(future=lambda: answer)

    def policy(self, monkeypatch: pytest.MonkeyPatch) -> PoolPolicy:
        monkeypatch.setattr("cluster.autoscaling.ray", self)
        names = [str(shard) for shard in range(len(self.says))]
        return PoolPolicy(names, SETTINGS, rows_max=8, clock=self.clock)


def decide(policy: PoolPolicy, target: int) -> int:
    """What Serve gets; a state in between two decisions it must keep for nobody."""
    number, state = policy(SimpleNamespace(target_num_replicas=target))
    assert state == {}
    return number


def settle(policy: PoolPolicy, target: int) -> int:
    """Give up what is late, find, ask, and take what was answered into account."""
    for _ in range(4):
        target = decide(policy, target)
        policy._search.submit(int).result()
    return target


def pool_of(tokens: int, waiting: int = 0) -> PoolStatus:
    return PoolStatus(waiting, waiting, (), {}, outstanding_tokens=tokens)


def test_the_number_follows_what_all_shards_say(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(None, pool_of(0))
    policy = pools.policy(monkeypatch)
    pools.finds.clear()
    for now_s in (-70, -5):
        pools.clock.now_s = float(now_s)
        assert decide(policy, 2) == 2, "it waits for no search"
    pools.finds.set()
    target = 0
    seen = []
    for now_s, tokens in [(0, 0), (1, 5), (2, 2500), (3, 2500), (4, 0), (23, 0), (24, 0), (90, 0)]:
        pools.clock.now_s = float(now_s)
        pools.says[0] = pool_of(tokens, waiting=min(tokens, 1))
        target = settle(policy, target)
        seen.append(target)
    assert seen == [0, 1, 1, 3, 3, 3, 2, 1]
    assert pools.found == ["0", "1"], "once"


def test_nothing_is_removed_for_what_cannot_be_seen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Idle before and after, and nobody knows what was between: no answer of one, or one that makes
    no sense. They are asked once a look, and looked for again where one does not answer."""
    pools = Pools(None, pool_of(0))
    policy = pools.policy(monkeypatch)
    gone: Any = ValueError("the actor died")
    odd: Any = "no status"
    unseen = {10: gone, 30: odd, 200: None, 210: gone}
    seen = []
    looks = [0, 10, 30, 200, 210, 211, 229, 231]
    for now_s in looks:
        pools.clock.now_s = float(now_s)
        pools.says[0] = unseen.get(now_s, pool_of(0))
        seen.append(settle(policy, 3))
    assert seen == [3, 3, 3, 3, 3, 3, 3, 2]
    assert "the pool does not answer: no answer within 2 s" in caplog.text
    assert pools.asked_s == [now_s for now_s in looks for _shard in pools.says]
    assert len(pools.found) == 8


def test_the_policy_reaches_the_controller_by_pickle_and_kwargs() -> None:
    assert serve_autoscaling(from_args({"replicas": 3})) is None
    config = from_args({"autoscaling": SETTINGS, "scheduler.rows_max": 16})
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
