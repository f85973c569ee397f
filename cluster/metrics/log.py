"""The log of a process: into its own file, from where Ray forwards it, and a replica's or a
frontend's also into the file that Serve keeps for it. As text, or as JSON: an object per line."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from logging.handlers import MemoryHandler
from typing import Any

from cluster.config import LogFormat

_OURS = "lockstep"
_TEXT = "%(levelname)s %(asctime)s %(name)s %(message)s"
_WAITING_S = 5.0
"""Between two lines of a replica of Serve's that waits for its calls."""


def log_to_stderr(form: LogFormat) -> None:
    """Begin it; once it has begun, this does nothing. Serve's file has the form of the deployment's
    `logging_config`."""
    logger = logging.getLogger(_OURS)
    if logger.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(_TEXT) if form == "text" else _JsonLines())
    logger.addHandler(handler)
    serves = logging.getLogger("ray.serve")
    for theirs in serves.handlers:
        if isinstance(theirs, logging.FileHandler | MemoryHandler):
            logger.addHandler(theirs)
            if form == "json":
                theirs.addFilter(_with_fields)
        theirs.addFilter(_seldom_waiting())
    logger.setLevel(logging.INFO)
    logger.propagate = False


def form_here() -> LogFormat:
    """That of this process."""
    ours = logging.getLogger(_OURS).handlers
    return "json" if ours and isinstance(ours[0].formatter, _JsonLines) else "text"


def said_by(logger: str, line: str) -> str:
    """The message of a line of the log, in either form, if this logger has said it; else ""."""
    if line.startswith("{"):
        try:
            read = json.loads(line)
        except ValueError:
            return ""
        return str(read.get("message", "")) if read.get("name") == logger else ""
    return line.partition(f" {logger} ")[2]


class _JsonLines(logging.Formatter):
    """Names as Serve's own JSON has them."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "asctime": self.formatTime(record),
            "levelname": record.levelname,
            "name": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exc_text"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """Of what is logged as an object with `log_fields`."""
    fields: dict[str, Any] = {}
    for each in record.args if isinstance(record.args, tuple) else ():
        fields |= getattr(each, "log_fields", {})
    return fields


def _with_fields(record: logging.LogRecord) -> bool:
    """Serve's JSON has every attribute of a record that is not one of logging's own."""
    record.__dict__.update(_fields(record))
    return True


def _seldom_waiting() -> Callable[[logging.LogRecord], bool]:
    """Passes one in a while of the lines that Serve repeats ten times a second as it waits."""
    told_s = -math.inf

    def passes(record: logging.LogRecord) -> bool:
        nonlocal told_s
        if not str(record.msg).startswith("Waiting for an additional"):
            return True
        if record.created - told_s < _WAITING_S:
            return False
        told_s = record.created
        return True

    return passes
