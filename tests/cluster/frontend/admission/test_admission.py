"""Proves: who may come in, with what priority, and that a key's limits hold to the token: no more
than the rate is ever used, and whoever waits as long as told gets in.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from cluster.config import AuthConfig, FrontendConfig
from cluster.frontend.admission.control import (
    AdmissionControl,
    Admitted,
    Caller,
    NotAllowed,
    TokenBucket,
    Unauthenticated,
)
from cluster.frontend.admission.keys import add
from cluster.frontend.grpc_api.api import caller_of
from scheduler.errors import Overloaded
from scheduler.messages import Priority
from tests.cluster.fakes import Clock
from tests.cluster.frontend.rig import Context

HOME = Caller(address="127.0.0.1")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


def keyed(
    path: Path,
    clock: Clock | None = None,
    number: int = 1,
    priority_max: str = "normal",
    **limits: int,
) -> tuple[AdmissionControl, Caller]:
    """One that knows a single key, and who has it."""
    key = add(path, "alice", priority_max, **limits)
    auth, frontend = AuthConfig(keys_file=str(path)), FrontendConfig(number=number)
    return AdmissionControl(auth, frontend, clock or Clock()), Caller((f"Bearer {key}",))


# --------------------------------------------------------------------------- who


@pytest.mark.parametrize(
    ("peer", "address", "loopback"),
    [
        ("ipv4:127.0.0.1:5000", "127.0.0.1", True),
        ("ipv4:127.8.9.1:5000", "127.8.9.1", True),
        ("ipv6:%5B::1%5D:5000", "::1", True),
        ("ipv6:[::1]:5000", "::1", True),
        ("ipv6:[::ffff:127.0.0.1]:5000", "::ffff:127.0.0.1", True),
        ("ipv6:[::ffff:192.0.2.7]:5000", "::ffff:192.0.2.7", False),
        ("ipv6:%5B2001:db8::7%5D:5000", "2001:db8::7", False),
        ("ipv6:[fe80::1%25eth0]:5000", "fe80::1%eth0", False),
        ("ipv4:192.0.2.7:1", "192.0.2.7", False),
        ("ipv4:0.0.0.0:1", "0.0.0.0", False),
        ("ipv4:localhost:1", "localhost", False),
        ("unix:/tmp/socket", "", False),
        ("unix:127.0.0.1:80", "", False),
        ("ipv4:", "", False),
        ("", "", False),
    ],
)
def test_only_a_peer_that_is_surely_this_machine_is_loopback(
    peer: str, address: str, loopback: bool
) -> None:
    caller = caller_of(Context(peer=peer))
    assert (caller.address, caller.on_loopback) == (address, loopback)


def test_only_one_header_of_the_right_form_opens(path: Path) -> None:
    control, caller = keyed(path)
    [good] = caller.authorization
    key = good.removeprefix("Bearer ")
    for right in (good, f"bearer {key}", f"BEARER {key}", f"Bearer  {key} "):
        control.check(Caller((right,), "192.0.2.7"))
    for wrong in (key, f"Basic {key}", f"Bearer{key}", "Bearer", "Bearer ", "", f"Bearer x{key}"):
        with pytest.raises(Unauthenticated):
            control.check(Caller((wrong,), "192.0.2.7"))
    for several in ((good, good), ("Bearer x", good), ()):
        with pytest.raises(Unauthenticated):
            control.check(Caller(several, "192.0.2.7"))


# --------------------------------------------------------------------------- what


@pytest.mark.parametrize("most", list(Priority))
def test_a_priority_above_the_keys_is_refused_by_name(path: Path, most: Priority) -> None:
    control, caller = keyed(path, priority_max=most.name.lower())
    assert control.admit(caller).tenant == "alice"
    for asked in Priority:
        if asked >= most:
            assert control.admit(caller, asked=asked).priority is asked
        else:
            with pytest.raises(NotAllowed, match=r"^priority: "):
                control.admit(caller, asked=asked)
    # Without a priority it is never refused for one.
    assert control.admit(caller).priority is max(most, Priority.NORMAL)


def test_without_keys_every_priority_is_allowed_and_there_is_no_tenant() -> None:
    control = AdmissionControl(AuthConfig(), FrontendConfig())
    assert control.admit(HOME, asked=Priority.HIGH).priority is Priority.HIGH
    admission = control.admit(HOME)
    assert admission.priority is Priority.NORMAL
    admission.charge(10**9)
    assert admission.tenant == ""


# --------------------------------------------------------------------------- how much


def admitted(control: AdmissionControl, caller: Caller, tokens: int) -> Admitted | float:
    """The admission of a request of so many tokens, or the seconds it is told to wait."""
    try:
        admission = control.admit(caller)
    except Overloaded as error:
        return error.retry_after_s
    try:
        admission.charge(tokens)
    except Overloaded as error:
        settle(admission)
        return error.retry_after_s
    return admission


def settle(admission: Admitted, used: int = 0) -> None:
    """Its call has ended, having used so many tokens."""
    with admission:
        admission.used = used


def test_what_is_larger_than_the_bucket_passes_when_it_is_full_and_leaves_a_debt(
    path: Path,
) -> None:
    clock = Clock()
    control, caller = keyed(path, clock, tokens_per_minute=600, requests_max=3)
    small = admitted(control, caller, 60)
    assert isinstance(small, Admitted)
    assert admitted(control, caller, 1200) == pytest.approx(6.0), "not full"
    clock.now_s += 6.0
    large = admitted(control, caller, 1200)
    assert isinstance(large, Admitted)
    assert admitted(control, caller, 0) == pytest.approx(60.0)
    clock.now_s += 61.0
    assert isinstance(admitted(control, caller, 10), Admitted), "what was refused is not in flight"


def test_each_of_several_frontends_enforces_its_share(path: Path) -> None:
    control, caller = keyed(path, number=4, tokens_per_minute=400, requests_max=6)
    held = [admitted(control, caller, 50), admitted(control, caller, 50)]
    assert all(isinstance(holder, Admitted) for holder in held)
    with pytest.raises(Overloaded, match="in flight") as refused:
        control.admit(caller)
    assert refused.value.retry_after_s > 0
    assert isinstance(held[0], Admitted)
    settle(held[0], 50)
    assert admitted(control, caller, 50) == pytest.approx(30.0), "100 tokens a minute are used up"


def test_new_limits_count_for_a_key_that_is_in_use(path: Path) -> None:
    clock = Clock()
    control, caller = keyed(path, clock, tokens_per_minute=600)
    first = admitted(control, caller, 1200)
    assert isinstance(first, Admitted)
    text = path.read_text()
    path.write_text(text.replace("tokens_per_minute: 600", "tokens_per_minute: 60"))
    clock.now_s += 1.0
    assert admitted(control, caller, 60) == pytest.approx(590.0), "a debt stays"
    path.write_text(text.replace("tokens_per_minute: 600", "tokens_per_minute: null"))
    clock.now_s += 1.0
    assert isinstance(admitted(control, caller, 10**6), Admitted)
    settle(first, 500)


# --------------------------------------------------------------------------- the bucket


EVENTS = st.lists(
    st.tuples(
        st.floats(0, 30),  # seconds until the request comes
        st.integers(1, 3000),  # its tokens
        st.floats(0, 1),  # the share that it uses
    ),
    max_size=60,
)


@given(size=st.integers(1, 1000), another=st.integers(1, 5000), events=EVENTS)
def test_no_more_than_the_rate_is_ever_used_and_whoever_waits_as_long_as_told_gets_in(
    size: int, another: int, events: list[tuple[float, int, float]]
) -> None:
    """Over the whole run: a full bucket, what came in meanwhile, and one request's debt."""
    bucket = TokenBucket(size, 0.0)
    now_s, used, largest = 0.0, 0, 0
    for pause_s, tokens, share in events:
        now_s += pause_s
        if bucket.take(tokens, now_s) > 0:
            continue
        spent = math.floor(tokens * share)
        bucket.give_back(tokens - spent, now_s)
        used += spent
        largest = max(largest, tokens)
        # Before this request, no more than the bucket and its inflow can have been used.
        assert used - spent <= size + now_s * size / 60 + max(largest - size, 0) + 1e-6
    assert used <= size + now_s * size / 60 + max(largest - size, 0) + 1e-6
    if (wait_s := bucket.take(another, now_s)) > 0:
        # Waits are told in whole seconds, rounded up.
        assert bucket.take(another, now_s + math.ceil(wait_s + 1e-6)) == 0.0


def test_neither_a_clock_that_stands_still_nor_a_full_bucket_gives_more() -> None:
    bucket = TokenBucket(60, 5.0)
    bucket.give_back(50, 5.0)
    assert bucket.take(60, 5.0) == 0.0
    assert bucket.take(1, 4.0) == pytest.approx(1.0), "nor one that goes back"
    assert bucket.take(1, 5.0) == pytest.approx(1.0)
