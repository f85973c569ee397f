"""One child process with a bound on the processor time and on the memory of each piece of work.

The kernel enforces both bounds in the child (`child.py`), so that a verdict depends on the work and
not on how busy the machine is. The parent has a looser bound on the time that passes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from cluster.frontend.bounded.frames import LENGTH_BYTES, Reply, framed, length_of

START_S_MAX = 60.0
"""A child may take so long to load what it needs; it usually takes under a second."""
_WALL = 10
"""So many times its processor time may pass until a piece of work is done."""
_END_S_MAX = 2.0
"""A process that was killed gives up its memory in some 50 ms."""
_STDERR_SHOWN = 2000
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ")
"""What a child gets of the parent's environment, which may hold secrets."""
_ONE_THREAD = {
    "RAYON_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Bounds:
    """Of one piece of work."""

    cpu_s: float
    memory_mb: int
    result_bytes: int
    """Longest result that a child may send."""

    @property
    def wall_s(self) -> float:
        return _WALL * self.cpu_s


class WorkRefused(Exception):
    """This work cannot be done; the text says why."""


class TooMuch(WorkRefused):
    """It takes more than its bounds."""


class TooBusy(Exception):
    """The child did not get enough of a processor."""


class ChildDied(Exception):
    """The child ended by what is no fault of its work; the text is the end of its stderr."""


class Child:
    """A process that does one piece of work after another, never two at once.

    It ends with `kill`, with this object, and with the thread that made it: a thread that may end
    before must make none. It belongs to no event loop.
    """

    def __init__(self, job: str, setup: IO[bytes] | None, bounds: Bounds) -> None:
        """Starts it and does not wait until it has loaded. `setup`: what the job is to load."""
        self._bounds = bounds
        self._loaded = False
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  # it lives as long as the child
        self._socket, its_end = socket.socketpair()
        self._socket.setblocking(False)
        sizes = (bounds.cpu_s, bounds.memory_mb, bounds.result_bytes, os.getpid())
        with its_end:
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                [sys.executable, "-P", "-m", f"{__package__}.child", job, *map(str, sizes)],
                stdin=setup or subprocess.DEVNULL,
                stdout=its_end.fileno(),
                stderr=self._stderr,
                cwd="/",
                env=_environment(),
                start_new_session=True,
            )
        self._end = weakref.finalize(self, _end, self._process, self._socket)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._end()

    async def do(self, work: bytes) -> bytes:
        """The result. Raises WorkRefused, TooBusy and ChildDied; the child may have ended then, as
        after a cancel."""
        loop = asyncio.get_running_loop()
        try:
            if not self._loaded:
                async with asyncio.timeout(START_S_MAX):
                    await self._received(loop)
                self._loaded = True
            async with asyncio.timeout(self._bounds.wall_s):
                await loop.sock_sendall(self._socket, framed(work))
                reply = await self._received(loop)
        except TimeoutError:
            self.kill()
            raise TooBusy from None
        except OSError:
            until_s = time.monotonic() + _END_S_MAX
            while self.alive and time.monotonic() < until_s:
                await asyncio.sleep(0.002)
            raise self._fault() from None
        except BaseException:
            self.kill()
            raise
        return self._result(reply)

    def do_now(self, work: bytes) -> bytes:
        """As `do`, without an event loop."""
        try:
            if not self._loaded:
                self._received_now(time.monotonic() + START_S_MAX)
                self._loaded = True
            until_s = time.monotonic() + self._bounds.wall_s
            self._socket.settimeout(self._bounds.wall_s)
            self._socket.sendall(framed(work))
            reply = self._received_now(until_s)
        except TimeoutError:
            self.kill()
            raise TooBusy from None
        except OSError:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S_MAX)
            raise self._fault() from None
        except BaseException:
            self.kill()
            raise
        finally:
            if self._end.alive:
                self._socket.setblocking(False)
        return self._result(reply)

    async def _received(self, loop: asyncio.AbstractEventLoop) -> bytearray:
        """One frame. Raises OSError where the child has ended."""
        content = bytearray()
        missing = LENGTH_BYTES
        while missing > 0:
            part = await loop.sock_recv(self._socket, _PART)
            missing = _added(content, part)
        return content

    def _received_now(self, until_s: float) -> bytearray:
        content = bytearray()
        missing = LENGTH_BYTES
        while missing > 0:
            self._socket.settimeout(max(until_s - time.monotonic(), 1e-3))
            missing = _added(content, self._socket.recv(_PART))
        return content

    def _result(self, frame: bytearray) -> bytes:
        reply, content = Reply(frame[LENGTH_BYTES]), bytes(frame[LENGTH_BYTES + 1 :])
        if reply is Reply.REFUSED:
            raise WorkRefused(content.decode("utf-8", "replace"))
        if reply is Reply.NO_MEMORY:
            raise self._too_large()
        if reply is Reply.TOO_LONG:
            raise TooMuch(f"makes more than {self._bounds.result_bytes} bytes of it")
        assert reply is Reply.DONE, reply
        return content

    def _fault(self) -> Exception:
        """What a child that has ended by itself says of its work."""
        code = self._process.poll()
        self.kill()
        if self._loaded and code == -signal.SIGPROF:
            return TooMuch(
                f"takes more than {self._bounds.cpu_s:g} s of a processor (frontend.bounded_s_max)"
            )
        # What is not Python ends so where it gets no memory, and where it gets no more stack.
        if self._loaded and code == -signal.SIGABRT:
            return self._too_large()
        if self._loaded and code in (-signal.SIGSEGV, -signal.SIGBUS):
            return TooMuch("is nested too deep")
        size = os.fstat(self._stderr.fileno()).st_size
        said = os.pread(self._stderr.fileno(), _STDERR_SHOWN, max(size - _STDERR_SHOWN, 0))
        return ChildDied(f"exit status {code}: {said.decode(errors='replace').strip()}")

    def _too_large(self) -> TooMuch:
        most = self._bounds.memory_mb
        return TooMuch(f"takes more than {most} MB of memory (frontend.bounded_mb_max)")


_PART = 1 << 18
"""Bytes that are read at once."""


def _added(content: bytearray, part: bytes) -> int:
    """How many bytes the frame misses with this part. Raises ConnectionError without one."""
    if not part:
        raise ConnectionResetError
    content += part
    if len(content) < LENGTH_BYTES:
        return LENGTH_BYTES - len(content)
    return LENGTH_BYTES + length_of(bytes(content[:LENGTH_BYTES])) - len(content)


def _end(process: subprocess.Popen[bytes], channel: socket.socket) -> None:
    channel.close()
    process.kill()
    # A process that the kernel does not let go is reaped when the next one starts.
    with suppress(subprocess.TimeoutExpired):
        process.wait(_END_S_MAX)


def _environment() -> dict[str, str]:
    """With the parent's path to modules, which may be more than its own environment says."""
    kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)
    return {**kept, **_ONE_THREAD, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
