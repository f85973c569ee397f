"""Frozen dataclasses that are made many times in every batch.

`frozen=True` sets each field past `__setattr__`, so that making a record takes three times as long
as without; and of a batch's time a tenth went there. A `record` is frozen for the type checker,
which reads it as a dataclass like any other, and an ordinary one with a hash when it runs.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

__all__ = ["record"]

if TYPE_CHECKING:
    from dataclasses import dataclass as record
else:

    def record(*, frozen, slots):
        """In place of `dataclass` with the same arguments."""
        return dataclasses.dataclass(slots=slots, unsafe_hash=frozen)
