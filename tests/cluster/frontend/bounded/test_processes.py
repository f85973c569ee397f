"""Proves: costly work of one tenant holds up no other, and waits for a bounded time. The processes
that do it hold nothing of the server's, come back when they are lost, and end with it.

Processor time decides, so a busy machine changes no outcome.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.config import AuthConfig
from cluster.config_sources import from_args
from cluster.frontend.admission.keys import add
from cluster.frontend.bounded.children import ChildrenFailed
from cluster.frontend.http_api.app import http_app
from cluster.frontend.prompts import ChatPrompt
from cluster.frontend.structure import Structure
from scheduler.errors import Overloaded
from tests.cluster.frontend.bounded.rig import (
    BOMBED,
    ROOMY,
    SLOW_SCHEMA,
    asked,
    runs,
    ticks,
    told,
    working,
)
from tests.cluster.frontend.http_rig import PAIR, Answer, load_tiny, post, tiny_text
from tests.cluster.frontend.rig import frontend
from tests.cluster.wire import until


async def test_costly_work_of_one_tenant_holds_up_no_other(tmp_path: Path) -> None:
    """The process at work for alice is stopped until bob has his answer."""
    path = tmp_path / "keys.yaml"
    alice, bob = ({"authorization": f"Bearer {add(path, name)}"} for name in ("alice", "bob"))
    config = ROOMY.model_copy(update={"auth": AuthConfig(keys_file=str(path)), "replica": PAIR})

    async def ask(app: Any, headers: dict[str, str], regex: str) -> Answer:
        fields = {"prompt": "the", "max_tokens": 4, "structured_outputs": {"regex": regex}}
        return await post(app, "completions", headers=headers, **fields)

    async with frontend(text=tiny_text(), load=load_tiny, config=config, shares=False) as made:
        app, work = http_app(made.service), made.service.bounded
        assert (await ask(app, alice, "a")).status == 200
        [pid] = work.pids
        os.kill(pid, signal.SIGSTOP)
        waiting = [asyncio.create_task(ask(app, alice, text)) for text in ("b", "c", "d")]
        await asyncio.sleep(0)
        assert (await ask(app, bob, "b")).status == 200
        assert len(work.pids) == 2
        assert not any(task.done() for task in waiting)
        os.kill(pid, signal.SIGCONT)
        assert [answer.status for answer in await asyncio.gather(*waiting)] == [200] * 3


async def test_work_waits_for_a_bounded_time_and_a_bounded_number_waits() -> None:
    config = from_args({"frontend": {"bounded_s_max": 0.1, "requests_max": 2}})
    with working(tiny_text(), config) as work:
        await work.grammar(Structure("regex", ["a"]))
        [pid] = work.pids
        os.kill(pid, signal.SIGSTOP)
        calls = [work.grammar(Structure("regex", ["b" * number])) for number in range(1, 5)]
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert any(isinstance(error, Overloaded) and error.retry_after_s for error in ended)
        assert isinstance(ended[0], Overloaded), "its process got no processor"
        assert isinstance(ended[3], Overloaded), "two wait already"
        assert work.pids != [pid]


# --------------------------------------------------------------------------- processes


async def test_a_process_that_is_killed_is_replaced_and_its_work_done() -> None:
    with working(tiny_text()) as work:
        good = Structure("regex", ["a+"])
        await work.grammar(good)
        [idle] = work.pids
        os.kill(idle, signal.SIGKILL)
        await work.grammar(Structure("regex", ["b+"]))
        [at_work] = work.pids
        assert at_work != idle
        os.kill(at_work, signal.SIGSTOP)
        call = asyncio.create_task(work.grammar(Structure("regex", ["c+"])))
        await asyncio.sleep(0)  # The call begins,
        await asyncio.sleep(0)  # and its work.
        os.kill(at_work, signal.SIGKILL)
        assert await call


async def test_where_every_process_dies_the_call_ends_and_the_next_one_is_served() -> None:
    with working(tiny_text()) as work:
        await work.grammar(Structure("regex", ["a+"]))
        killed: set[int] = set()
        call = asyncio.create_task(work.grammar(Structure("regex", ["b+"])))
        for _ in range(2):
            await until(lambda: not killed.issuperset(work.pids) or call.done())
            for pid in set(work.pids) - killed:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            await asyncio.sleep(0)
        with pytest.raises(ChildrenFailed):
            await call
        assert await work.grammar(Structure("regex", ["b+"]))


async def test_a_process_has_nothing_of_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_API_KEY", "secret")
    with open(__file__) as held, working(BOMBED) as work:
        os.set_inheritable(held.fileno(), True)
        await work.grammar(Structure("regex", ["a"]))
        await work.rendered(ChatPrompt([{"role": "user", "content": "x"}]))
        assert len(work.pids) == 2
        for pid in work.pids:
            of = Path(f"/proc/{pid}")
            assert b"secret" not in (of / "environ").read_bytes()
            assert len(list((of / "task").iterdir())) == 1
            assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0) + 5
            assert str(os.readlink(of / "cwd")).endswith("(deleted)")
            files = {os.readlink(file) for file in (of / "fd").iterdir()}
            assert not any("test_processes" in file for file in files)
            assert {file.partition(":")[0] for file in files} <= {"/dev/null", "socket"} | {
                file for file in files if file.endswith("(deleted)")
            }


async def test_no_process_outlives_the_frontend() -> None:
    async with frontend(text=BOMBED, load=load_tiny, config=ROOMY, shares=False) as made:
        work = made.service.bounded
        app = http_app(made.service)
        assert (await told(app, "fine")).status == 200
        pids = work.pids
        assert len(pids) == 2, "one of each kind was started in advance"
        before = sum(map(ticks, pids))
        bomb = asyncio.create_task(asked(app, json=SLOW_SCHEMA))
        await until(lambda: sum(map(ticks, pids)) > before)
    assert not any(map(runs, pids))
    assert (await bomb).status == 503


OWNER = """
import json
from cluster.frontend.bounded.process import Bounds, Child

def work(template):
    return json.dumps([[[]], {"chat_template": template}]).encode()

child = Child("rendering", None, Bounds(cpu_s=1000, memory_mb=512, result_bytes=100))
child.do_now(work("x"))
print(child.pid, flush=True)
child.do_now(work("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"))
"""


async def test_a_process_ends_with_a_frontend_that_is_killed() -> None:
    """In the middle of work that would go on for long."""
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        before = ticks(pid)
        await until(lambda: ticks(pid) > before)
        owner.kill()
    await until(lambda: not runs(pid))


async def test_work_goes_on_without_its_call() -> None:
    """To end its process and start another one would cost more."""
    with working(tiny_text()) as work:
        await work.grammar(Structure("regex", ["a"]))
        [pid] = work.pids
        os.kill(pid, signal.SIGSTOP)
        call = asyncio.create_task(work.grammar(Structure("regex", ["b"])))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        os.kill(pid, signal.SIGCONT)
        assert await work.grammar(Structure("regex", ["b"]))
        assert work.pids == [pid]


async def test_a_call_that_goes_while_it_waits_leaves_its_place_to_others() -> None:
    config = from_args({"frontend": {"bounded_s_max": 20, "requests_max": 1}})
    with working(tiny_text(), config) as work:
        await work.grammar(Structure("regex", ["a"]))
        [pid] = work.pids
        os.kill(pid, signal.SIGSTOP)
        first, second, third = (
            asyncio.create_task(work.grammar(Structure("regex", [text]))) for text in "bcd"
        )
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await third
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        fourth = asyncio.create_task(work.grammar(Structure("regex", ["e"])))
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGCONT)
        assert len(await asyncio.gather(first, fourth)) == 2
