"""How far a replica's start is, as lines of its log; `lockstep serve` shows the last of each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

LOGGER = "lockstep.start"
UP = "is up"
"""The last stage."""
_SHARES = 10


def stage(text: str) -> None:
    """Says what the replica does next, as what follows its name in a sentence."""
    logging.getLogger(LOGGER).info(text)


def tell_of_weights() -> None:
    """From now on transformers says in tenths how many weights it has read, and draws no bars."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_tqdm_hook(_told)


def _told(factory: Callable[..., Any], given: tuple[Any, ...], options: dict[str, Any]) -> Any:
    if options.get("desc") == "Loading weights" and given and hasattr(given[0], "__len__"):
        return _counted(given[0], len(given[0]))
    return factory(*given, **options)


def _counted(weights: Iterable[Any], count: int) -> Iterator[Any]:
    told = -1
    for number, weight in enumerate(weights):
        share = number * _SHARES // count
        if share > told:
            stage(f"reads weights: {100 * share // _SHARES} %")
            told = share
        yield weight
    stage("prepares and times the model")
