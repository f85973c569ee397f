"""What a replica refuses before it serves: typed errors that name the setting or the file."""

from __future__ import annotations


class PairRefused(ValueError):
    """What is not served, or not exactly: a name that is no model's, a file that cannot be read,
    models that do not go together; the message says why."""


class TooLittleMemory(ValueError):
    """Not one sequence of full length would fit; the message names the least that would do."""

    def __init__(self, message: str, least: int) -> None:
        super().__init__(message)
        self.least = least
        """Bytes for weights, KV cache and buffers that would do."""


class TrainingRefused(ValueError):
    """A drafter cannot be trained so; the message begins with the setting, file or model."""
