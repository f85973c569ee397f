"""The checkpoint that the settings name, and errors by their name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from replicas.config import DRAFTING_FIELD, ReplicaConfig
from replicas.errors import PairRefused
from replicas.models import resolve


@contextmanager
def head_of(name: str) -> Iterator[str]:
    """The directory or name on the hub that a head of this name lies at. PairRefused and OSError
    name the setting."""
    path = resolve(name, "draft", field=DRAFTING_FIELD)
    try:
        yield path
    except PairRefused as error:
        raise PairRefused(f"{DRAFTING_FIELD}: {path}: {error}") from None
    except OSError as error:
        raise OSError(f"{DRAFTING_FIELD}: {error}") from error


def refuse_ranks(config: ReplicaConfig) -> None:
    """Of a head that uses the target's output matrix. Raises PairRefused."""
    if config.tensor_parallel > 1:
        raise PairRefused(
            "tensor_parallel: the head drafts with the target's output matrix, of which a rank"
            " holds a part"
        )
