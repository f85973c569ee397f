"""Proves who gets into a meeting of ranks, and that nobody waits there for ever."""

from __future__ import annotations

import os
import pickle
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import pytest

from replicas.meeting import LOOPBACK, Meeting, NobodyCame, call, store_of

SOON = timedelta(seconds=10)


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    opened = Meeting()
    yield opened
    opened.close()


def later(calling: object) -> threading.Thread:
    thread = threading.Thread(target=calling, daemon=True)  # type: ignore[arg-type]
    thread.start()
    return thread


def test_ranks_are_in_order_whoever_calls_first(meeting: Meeting) -> None:
    theirs = {rank: call(meeting.address, rank) for rank in (3, 1, 2)}
    ours = meeting.gather(4, within_s=10)
    for rank, connection in enumerate(ours, start=1):
        connection.send(("order", rank))
        assert theirs[rank].recv() == ("order", rank)
        theirs[rank].send({"answer": rank})
        assert connection.recv() == {"answer": rank}
    theirs[2].close()
    with pytest.raises(EOFError):
        ours[1].recv()
    for connection in (*ours, theirs[1], theirs[3]):
        connection.close()


def test_all_ranks_find_the_same_store(meeting: Meeting) -> None:
    store = store_of(meeting.address, SOON)
    store.set("key", "value")
    assert meeting.store is not None
    assert meeting.store.get("key") == b"value"


class _Bomb:
    """Whoever reads it as an object makes a folder."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self._path,)


def test_who_does_not_know_the_secret_is_not_listened_to(
    meeting: Meeting, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger, one who says nothing, one who hangs up, and a rank that nobody asked for."""
    monkeypatch.setattr("replicas.meeting._SAY_S", 0.1)
    path = f"{tmp_path}/read"
    door = (LOOPBACK, meeting.address.orders_port)
    stranger = socket.create_connection(door)
    stranger.sendall(b"x" * 34 + pickle.dumps(_Bomb(path)))
    silent = socket.create_connection(door)
    socket.create_connection(door).close()
    wrong = call(replace(meeting.address, secret=b"y" * 32), 1)
    other = call(meeting.address, 7)
    known = call(meeting.address, 1)
    again = call(meeting.address, 1)
    (connection,) = meeting.gather(2, within_s=10)
    known.send("here")
    assert connection.recv() == "here"
    assert not os.path.exists(path)
    for refused in (wrong, other):
        with pytest.raises((EOFError, ConnectionError)):
            refused.recv()
    for opened in (stranger, silent, connection, known, again):
        opened.close()
    assert "secret" not in repr(meeting.address)


def test_a_rank_that_never_comes_is_waited_for_so_long_and_named(meeting: Meeting) -> None:
    thread = later(lambda: call(meeting.address, 1).close())
    began_s = time.monotonic()
    with pytest.raises(NobodyCame, match=r"rank 2 has not come within 0\.3 s"):
        meeting.gather(3, within_s=0.3)
    assert time.monotonic() - began_s < 10
    thread.join(10)


def test_a_rank_that_is_known_to_be_lost_is_not_waited_for(meeting: Meeting) -> None:
    with pytest.raises(NobodyCame, match="rank 1 has ended"):
        meeting.gather(2, within_s=600, lost=lambda: "rank 1 has ended")


@pytest.mark.parametrize("came", [0, 1])
def test_a_meeting_leaves_nothing_open(came: int) -> None:
    Meeting().close()  # what torch opens once and for all
    before = open_files()
    meeting = Meeting()
    if came:
        theirs = call(meeting.address, 1)
        with pytest.raises(NobodyCame):
            meeting.gather(3, within_s=0)
        with pytest.raises((EOFError, ConnectionError)):
            theirs.recv()
        theirs.close()
    meeting.close()
    assert open_files() == before


def open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))
