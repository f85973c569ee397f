"""Proves who gets into a meeting of ranks, and that nobody waits there for ever."""

from __future__ import annotations

import ctypes
import os
import pickle
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from replicas.parallel.meeting import LOOPBACK, Address, Meeting, NobodyCame, call, store_of
from tests.open_files import assert_closed_but, open_files

SOON = timedelta(seconds=10)


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    opened = Meeting()
    yield opened
    opened.close()


def called(meeting: Meeting, *ranks: int) -> list[Future[Connection]]:
    """These ranks call, one after the other; the door keeps them until somebody looks."""
    pool = ThreadPoolExecutor(len(ranks))
    calls = []
    for rank in ranks:
        calls.append(pool.submit(call, meeting.address, rank))
        time.sleep(0.05)
    pool.shutdown(wait=False)
    return calls


def test_ranks_are_in_order_whoever_calls_first(meeting: Meeting) -> None:
    calls = called(meeting, 3, 1, 2)
    ours = meeting.gather(4, within_s=10)
    theirs = dict(zip((3, 1, 2), [each.result(10) for each in calls], strict=True))
    for rank, connection in enumerate(ours, start=1):
        connection.send(("batch", rank))
        assert theirs[rank].recv() == ("batch", rank)
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


def stranger(meeting: Meeting) -> socket.socket:
    return socket.create_connection((LOOPBACK, meeting.address.batches_port))


@pytest.mark.parametrize("how", ["guesses", "silent", "slow", "gone", "wrong secret", "uncalled"])
def test_only_a_rank_that_is_waited_for_and_knows_the_secret_gets_in(
    meeting: Meeting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Whoever comes first is refused, and what he sends is never read as an object."""
    monkeypatch.setattr("replicas.parallel.meeting._PROOF_S", 1.0)
    path = tmp_path / "read"
    refused: Future[Connection] | None = None
    first: socket.socket | None = None
    if how in ("wrong secret", "uncalled"):
        secret = b"y" * 32 if how == "wrong secret" else meeting.address.secret
        rank = 1 if how == "wrong secret" else 7
        refused = ThreadPoolExecutor(1).submit(call, replace(meeting.address, secret=secret), rank)
    else:
        first = stranger(meeting)
        if how == "guesses":
            first.sendall(b"x" * 32 + b"\0\1" + b"x" * 32 + pickle.dumps(_Bomb(str(path))))
        elif how == "gone":
            first.close()
        elif how == "slow":
            dripping = ThreadPoolExecutor(1).submit(drip, first)
    time.sleep(0.1)
    (known,) = called(meeting, 1)
    began_s = time.monotonic()
    (connection,) = meeting.gather(2, within_s=100)
    assert time.monotonic() - began_s < 60
    theirs = known.result(10)
    theirs.send("here")
    assert connection.poll(10)
    assert connection.recv() == "here"
    assert not path.exists()
    if how == "wrong secret":
        assert refused is not None
        assert isinstance(refused.exception(10), ConnectionError)
    elif how == "uncalled":
        assert refused is not None
        with pytest.raises((EOFError, ConnectionError)):
            refused.result(10).recv()
    elif how == "slow":
        assert isinstance(dripping.exception(20), OSError)
    for opened in (first, connection, theirs):
        if opened is not None:
            opened.close()


def drip(peer: socket.socket) -> None:
    """A byte now and then, for longer than anybody may."""
    for _ in range(200):
        peer.sendall(b"x")
        time.sleep(0.05)


def test_a_rank_hangs_up_on_who_cannot_prove_that_it_is_rank_0() -> None:
    with socket.create_server((LOOPBACK, 0)) as door:
        port = door.getsockname()[1]
        address = Address(LOOPBACK, port, 1, b"s" * 32)
        calling = ThreadPoolExecutor(1).submit(call, address, 1)
        caller, _ = door.accept()
        caller.sendall(b"n" * 32)
        said = caller.recv(66, socket.MSG_WAITALL)
        assert len(said) == 66
        assert address.secret not in said
        caller.sendall(said[-32:] + pickle.dumps("his own proof"))
        with pytest.raises(ConnectionRefusedError, match="does not know the secret"):
            calling.result(10)
        caller.close()
    assert "secret" not in repr(address)


def test_a_rank_that_never_comes_is_waited_for_so_long_and_named(meeting: Meeting) -> None:
    (known,) = called(meeting, 1)
    began_s = time.monotonic()
    with pytest.raises(NobodyCame, match=r"rank 2 has not come within 3 s"):
        meeting.gather(3, within_s=3)
    assert time.monotonic() - began_s < 60
    with pytest.raises((EOFError, ConnectionError)):
        known.result(10).recv()


def test_a_rank_that_is_known_to_be_lost_is_not_waited_for(meeting: Meeting) -> None:
    called(meeting, 1)
    asked: list[list[int]] = []

    def lost(missing: Sequence[int]) -> str | None:
        asked.append(list(missing))
        return "rank 2 has ended" if missing == [2] else None

    with pytest.raises(NobodyCame, match="rank 2 has ended"):
        meeting.gather(3, within_s=600, lost=lost)
    assert asked[-1] == [2], "those that came are not asked about"


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="not Linux")
@pytest.mark.parametrize("sent", [False, True])
def test_a_machine_that_vanishes_is_noticed(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch, sent: bool
) -> None:
    """With nothing on its way it is asked; while something is, it is not, and that must end too."""
    monkeypatch.setattr("replicas.parallel.meeting._UNHEARD_MS", 1000)
    monkeypatch.setattr(
        "replicas.parallel.meeting._KEEPALIVE",
        {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 1},
    )
    (known,) = called(meeting, 1)
    (ours,) = meeting.gather(2, within_s=10)
    theirs = known.result(10)
    drop_everything(ours)
    if sent:
        ours.send("a batch")
    assert ours.poll(30)
    with pytest.raises(OSError, match="timed out"):
        ours.recv()
    for connection in (ours, theirs):
        connection.close()


def drop_everything(connection: Connection) -> None:
    """Of what comes in on it from now on."""
    nothing = struct.pack("HBBI", 0x06, 0, 0, 0)  # the filter "return 0"
    code = ctypes.create_string_buffer(nothing)
    program = struct.pack("HP", 1, ctypes.addressof(code))
    with socket.socket(fileno=os.dup(connection.fileno())) as peer:
        try:
            peer.setsockopt(socket.SOL_SOCKET, 26, program)  # SO_ATTACH_FILTER
        except OSError as error:
            pytest.skip(f"this machine filters no sockets: {error}")


@pytest.mark.parametrize("came", [0, 1])
def test_a_meeting_leaves_nothing_open(came: int) -> None:
    Meeting().close()  # what torch opens once and for all
    before = open_files()
    meeting = Meeting()
    if came:
        (known,) = called(meeting, 1)
        with pytest.raises(NobodyCame):
            meeting.gather(3, within_s=3)
        theirs = known.result(10)
        with pytest.raises((EOFError, ConnectionError)):
            theirs.recv()
        theirs.close()
    meeting.close()
    assert_closed_but(before)
