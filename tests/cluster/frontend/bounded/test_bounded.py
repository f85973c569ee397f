"""Proves: a structure or a chat template that takes more time or memory than is allowed is refused
with the reason, and nothing else suffers: not the calls beside it, not those of other tenants, not
the same call sent again. What llguidance can run gets its answer, whatever its size. The processes
that do this hold nothing of the server's, come back when they are lost, and end with it.

The bounds here are small where the property does not depend on them. Processor time decides, so a
busy machine changes no outcome.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.config import AuthConfig, ClusterConfig
from cluster.config_sources import from_args
from cluster.frontend.admission.keys import add
from cluster.frontend.bounded import BoundedWork
from cluster.frontend.bounded.children import ChildrenFailed
from cluster.frontend.http_api.app import http_app
from cluster.frontend.prompts import ChatPrompt
from cluster.frontend.structure import Structure
from cluster.frontend.target_text import TargetText
from scheduler.errors import InvalidRequest, Overloaded
from tests.cluster.frontend.http_rig import (
    PAIR,
    TEXT,
    Answer,
    load_tiny,
    post,
    served_tiny,
    templated,
    tiny_text,
)
from tests.cluster.frontend.rig import frontend
from tests.cluster.wire import until

SMALL = from_args({"frontend": {"coalesce_ms": 1, "bounded_s_max": 0.4, "bounded_mb_max": 1000}})
TIGHT = from_args({"frontend": {"coalesce_ms": 1, "bounded_mb_max": 16}})
ROOMY = from_args({"frontend": {"coalesce_ms": 1, "bounded_s_max": 20}})
SLOW_SCHEMA = {"type": "integer", "multipleOf": 1500007}


def object_of(count: int, at: int = 0) -> dict[str, Any]:
    properties = {f"{number:x}": {"const": 1} for number in range(at, at + count)}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def circular(**schema: Any) -> dict[str, Any]:
    return {"$defs": {"a": schema}, "$ref": "#/$defs/a"}


def ambiguous(rules: int) -> str:
    """Each rule may be any two others."""
    names = [f"n{number}" for number in range(rules)]
    lines = ["start: " + " | ".join(names)]
    for number in range(rules):
        pairs = [f"{name} {names[(number + at) % rules]}" for at, name in enumerate(names)]
        lines.append(f"n{number}: " + " | ".join([*pairs, "/[a-z ]/"]))
    return "\n".join(lines)


async def asked(app: Any, tokens: int = 24, **structure: Any) -> Answer:
    fields = {"prompt": "the quick", "max_tokens": tokens, "temperature": 0}
    return await post(app, "completions", **fields, structured_outputs=structure)


async def told(app: Any, content: str) -> Answer:
    turns = [{"role": "user", "content": content}]
    return await post(app, "chat/completions", messages=turns, max_tokens=4)


# --------------------------------------------------------------------------- structures


@pytest.mark.parametrize(
    ("structure", "reason"),
    [
        ({"json": SLOW_SCHEMA}, "takes more than 0.4 s of a processor (frontend.bounded_s_max)"),
        ({"json": {"type": "number", "multipleOf": 1500007}}, "takes more than "),
        ({"grammar": ambiguous(40)}, "takes more than 0.4 s"),
        ({"json": circular(**{"$ref": "#/$defs/a"})}, ""),
        ({"json": circular(allOf=[{"$ref": "#/$defs/a"}])}, ""),
        ({"json": circular(anyOf=[{"$ref": "#/$defs/a"}])}, ""),
        ({"regex": "(" * 20_000 + "a" + ")" * 20_000}, ""),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_a_structure_that_takes_too_much_or_cannot_run_is_refused_with_the_reason(
    structure: dict[str, Any], reason: str
) -> None:
    async with served_tiny(config=SMALL) as (_, app):
        answer = await asked(app, **structure)
        assert (answer.status, answer.error["param"]) == (400, "structured_outputs")
        assert reason in answer.error["message"]
        assert (await asked(app, choice=["yes"])).json["choices"][0]["text"] == "yes"


async def test_a_structure_that_takes_too_much_memory_is_refused_with_the_bound() -> None:
    async with served_tiny(config=TIGHT) as (_, app):
        answer = await asked(app, json=object_of(3000))
        assert (answer.status, answer.error["param"]) == (400, "structured_outputs")
        assert (
            "takes more than 16 MB of memory (frontend.bounded_mb_max)" in answer.error["message"]
        )


@pytest.mark.parametrize("count", [500, 3_000])
async def test_thousands_of_optional_properties(count: int) -> None:
    async with served_tiny(config=ROOMY) as (_, app):
        answer = await asked(app, json=object_of(count), tokens=3)
        assert answer.json["choices"][0]["text"][0] == "{"


@pytest.mark.parametrize("count", [2_000, 10_000, 14_000])
async def test_a_choice_of_thousands(count: int) -> None:
    """The last are 64 KiB, the most that is allowed. Many are the beginning of others."""
    texts = [f"{number}" for number in range(1, count + 1)]
    async with served_tiny(config=ROOMY) as (_, app):
        assert (await asked(app, choice=texts)).json["choices"][0]["text"] in texts


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"const": f"p{number}"} for number in range(2_500)]},
        {
            "anyOf": [
                object_of(1, at=number) | {"required": [f"{number:x}"]} for number in range(500)
            ]
        },
        {"properties": {"next": {"$ref": "#"}}, "additionalProperties": False} | {"type": "object"},
    ],
    ids=["constants", "objects", "of itself"],
)
async def test_large_and_recursive_schemas_run(schema: dict[str, Any]) -> None:
    async with served_tiny(config=ROOMY) as (_, app):
        answer = await asked(app, json=schema)
        assert answer.status == 200
        assert answer.json["choices"][0]["text"][0] in '{"'


# --------------------------------------------------------------------------- templates


BOMBS = (
    "{% set said = messages[0].content %}"
    "{% if said == 'time' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
    "{% endfor %}{% endif %}"
    "{% if said == 'memory' %}{{ said * 10 ** 10 }}{% endif %}"
    "{% if said == 'text' %}{{ said * 3 * 10 ** 6 }}{% endif %}"
    "{% if said == 'depth' %}{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}{% endif %}"
    "{% if said == 'refused' %}{{ raise_exception('not so') }}{% endif %}"
    "{% if said == 'wrong' %}{{ 1 // 0 }}{% endif %}"
    "{{ said }}"
)
BOMBED = templated(BOMBS)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("time", "template takes more than 0.4 s of a processor (frontend.bounded_s_max)"),
        ("memory", "template takes more than 1000 MB of memory (frontend.bounded_mb_max)"),
        ("text", "template makes more than 8388608 bytes of it"),
        ("depth", "recursion"),
        ("refused", "template refuses them: not so"),
        ("wrong", "zero"),
    ],
)
async def test_a_template_that_takes_too_much_or_fails_is_the_messages_fault(
    content: str, reason: str
) -> None:
    async with frontend(text=BOMBED, load=load_tiny, config=SMALL) as made:
        app = http_app(made.service)
        answer = await told(app, content)
        assert (answer.status, answer.error["param"]) == (400, "messages")
        assert reason in answer.error["message"]
        assert (await told(app, "fine")).status == 200


async def test_rendered_is_what_transformers_renders() -> None:
    """Surrogates, large numbers and text that looks like a special token among it."""
    template = (
        "{% for m in messages %}{{ m | tojson }}{{ m.content }}{% endfor %}{{ bos_token }}"
        "{{ tools }}{{ options }}{{ add_generation_prompt }}{{ none is defined }}"
    )
    text = replace(TEXT, encoder=copy(TEXT.encoder))
    text.encoder.chat_template = template
    turns = [
        {"role": "user", "content": "é <s> \u2028 😀", "name": None},
        {"role": "assistant", "content": None, "tool_calls": [{"n": 2**70, "f": 0.1, "e": []}]},
    ]
    options = {"options": {"deep": [1, {"a": None}], "inf": float("inf")}, "bos_token": "<own>"}
    tools = [{"type": "function", "function": {"name": "f"}}]
    expected = text.encoder.apply_chat_template(
        turns, tools=tools, add_generation_prompt=True, tokenize=False, **options
    )
    with working(text) as work:
        prompt = ChatPrompt(turns, tools, options)
        assert await work.rendered(prompt) == work.rendered_now(prompt) == expected
        for name in ("messages", "conversations"):
            with pytest.raises(InvalidRequest, match=r"^messages: "):
                await work.rendered(ChatPrompt(turns, (), {name: []}))


# --------------------------------------------------------------------------- verdicts


async def test_what_is_sent_again_is_answered_without_a_process() -> None:
    """The process is stopped, and could not answer."""
    bomb, good = Structure("json_schema", [json.dumps(SLOW_SCHEMA)]), Structure("regex", ["a+"])
    with working(tiny_text(), SMALL) as work:
        grammar = await work.grammar(good)
        with pytest.raises(InvalidRequest) as first:
            await work.grammar(bomb)
        for pid in work.pids:
            os.kill(pid, signal.SIGSTOP)
        again = replace(bomb, given_as="tools")
        with pytest.raises(InvalidRequest, match=r"^tools: ") as second:
            await work.grammar(again)
        assert first.value.reason == second.value.reason
        assert await work.grammar(good) == work.grammar_now(good) == grammar


async def test_what_is_committed_is_part_of_a_verdict() -> None:
    text = tiny_text()
    structure = Structure("choice", ["yes", "no"])
    with working(text) as work:
        allowed, other = text.encode("yes", False), text.encode("maybe", False)
        grammar = await work.grammar(structure)
        assert await work.grammar(structure, allowed) == grammar
        for _ in range(2):
            with pytest.raises(InvalidRequest, match=r"^committed_token_ids: choice does not"):
                await work.grammar(structure, other)
        assert await work.grammar(structure, [-1, 99_999]) == grammar, "refused elsewhere"


# --------------------------------------------------------------------------- who waits


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
            assert not any("test_bounded" in file for file in files)
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


def ticks(pid: int) -> int:
    """Of processor time."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return int(user) + int(system)


def runs(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


@contextmanager
def working(text: TargetText, config: ClusterConfig = ROOMY) -> Iterator[BoundedWork]:
    work = BoundedWork(text, config.frontend)
    yield work
    work.close()
    assert work.pids == []
