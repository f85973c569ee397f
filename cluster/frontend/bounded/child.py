"""The process that does the work: `python -m cluster.frontend.bounded.child JOB ...`, which only
`process.py` starts. Its stdin is what the job is to load, its stdout the channel to the parent.

It has one thread, no file but its own, and as little of the machine as its work may take: the
kernel ends it with SIGPROF after the processor time, and gives it no more memory than allowed.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
import socket
import sys
import tempfile
from collections.abc import Callable

from cluster.frontend.bounded.frames import LENGTH_BYTES, Reply, framed, length_of
from cluster.frontend.bounded.jobs import JOBS, Refused

_PR_SET_PDEATHSIG = 1
_NICE = 5
_STDERR_BYTES_MAX = 1 << 16
_PAGE = os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    job, cpu_s, memory_mb, result_bytes, parent = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        return  # The parent ended before that.
    os.nice(_NICE)
    # Whatever the parent does with signals.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_STDERR_BYTES_MAX, _STDERR_BYTES_MAX))
    channel = socket.socket(fileno=os.dup(1))
    os.dup2(2, 1)
    work = JOBS[job](_setup())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # A directory that is gone: nothing can be put there. What is loaded above needs one.
    with tempfile.TemporaryDirectory() as empty:
        os.chdir(empty)
    # What is loaded stays: no collection looks at it during the work.
    gc.collect()
    gc.freeze()
    memory = int(memory_mb) << 20
    loaded = used = _data_bytes()
    channel.sendall(framed(bytes([Reply.READY])))
    # A child that keeps much of what its work took gives way to another one.
    while used <= loaded + memory and (asked := _received(channel)) is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (used + memory, resource.RLIM_INFINITY))
        signal.setitimer(signal.ITIMER_PROF, float(cpu_s))
        reply, result = _done(work, asked, int(result_bytes))
        signal.setitimer(signal.ITIMER_PROF, 0)
        channel.sendall(framed(bytes([reply]) + result))
        del asked, result
        used = _data_bytes()


def _done(work: Callable[[bytes], bytes], asked: bytes, most: int) -> tuple[Reply, bytes]:
    try:
        result = work(asked)
    except Refused as refused:
        return Reply.REFUSED, str(refused).encode("utf-8", "replace")[:most]
    except MemoryError:
        return Reply.NO_MEMORY, b""
    if len(result) > most:
        return Reply.TOO_LONG, b""
    return Reply.DONE, result


def _setup() -> bytes:
    """All of stdin, a file that other children read as well."""
    return os.pread(0, os.fstat(0).st_size, 0)


def _received(channel: socket.socket) -> bytes | None:
    """None where the parent has closed the channel."""
    head = _exactly(channel, LENGTH_BYTES)
    return None if head is None else _exactly(channel, length_of(head))


def _exactly(channel: socket.socket, length: int) -> bytes | None:
    content = bytearray()
    while len(content) < length:
        part = channel.recv(length - len(content))
        if not part:
            return None
        content += part
    return bytes(content)


def _data_bytes() -> int:
    """What RLIMIT_DATA counts."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[5]) * _PAGE


if __name__ == "__main__":
    main()
