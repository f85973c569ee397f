"""Bounded work without a server, and what it is given that takes too much."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster.config import ClusterConfig
from cluster.config_sources import from_args
from cluster.frontend.bounded_work import BoundedWork
from cluster.frontend.target_text import TargetText
from tests.cluster.frontend.http_rig import Answer, post, templated

SMALL = from_args({"frontend": {"coalesce_ms": 1, "bounded_s_max": 0.4, "bounded_mb_max": 1000}})
TIGHT = from_args({"frontend": {"coalesce_ms": 1, "bounded_mb_max": 16}})
ROOMY = from_args({"frontend": {"coalesce_ms": 1, "bounded_s_max": 20}})
SLOW_SCHEMA = {"type": "integer", "multipleOf": 1500007}


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


async def asked(app: Any, tokens: int = 24, **structure: Any) -> Answer:
    fields = {"prompt": "the quick", "max_tokens": tokens, "temperature": 0}
    return await post(app, "completions", **fields, structured_outputs=structure)


async def told(app: Any, content: str) -> Answer:
    turns = [{"role": "user", "content": content}]
    return await post(app, "chat/completions", messages=turns, max_tokens=4)


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
