"""How far a replica's start is, as lines of its log, which `lockstep serve` shows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

LOGGER = "lockstep.start"
_SHARES = 10


def stage(text: str) -> None:
    """Says what the replica does next, as what follows its name in a sentence."""
    logging.getLogger(LOGGER).info(text)


def up(drafter: str) -> None:
    """Says that the replica is up, and before it what was found wrong with its drafter: what
    `ReplicaSpec.drafter` says behind the method."""
    _, _, wrong = drafter.partition("; ")
    if wrong:
        stage(f"drafts badly, {wrong} It serves all the same.")
    stage("is up")


def tell_of_weights(tell: Callable[[int, int], None] | None = None) -> None:
    """From now on transformers draws no bars: `tell` hears how many weights it has read, of how
    many; without one stages say so in tenths."""
    from transformers.utils import logging as transformers_logging

    def told(factory: Callable[..., Any], given: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if options.get("desc") == "Loading weights" and given and hasattr(given[0], "__len__"):
            return _counted(given[0], len(given[0]), tell or _in_tenths())
        return factory(*given, **options)

    transformers_logging.disable_progress_bar()
    transformers_logging.set_tqdm_hook(told)


def _in_tenths() -> Callable[[int, int], None]:
    told = -1

    def tell(done: int, total: int) -> None:
        nonlocal told
        share = done * _SHARES // total
        if done == total:
            stage("prepares and times the model")
        elif share > told:
            stage(f"reads weights: {100 * share // _SHARES} %")
            told = share

    return tell


def _counted(weights: Iterable[Any], total: int, tell: Callable[[int, int], None]) -> Iterator[Any]:
    for done, weight in enumerate(weights):
        tell(done, total)
        yield weight
    tell(total, total)
