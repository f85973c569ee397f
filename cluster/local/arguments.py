"""What `LLM` is given, as settings, and errors in the names of its arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cluster.config import SECTIONS, ClusterConfig, ConfigError
from cluster.config_sources import ALIASES, from_args, overridden, text_of
from cluster.error_messages import joined
from cluster.local.engine import NO_QUEUE_LIMITS
from replicas.errors import PairRefused
from replicas.names import with_revision
from scheduler.config import DRAFT_LEN_MAX, SchedulerConfig

TEN_YEARS_S = 3e8


class Arguments:
    """As `LLM` has them; `replica` by the names of settings, or of other servers."""

    def __init__(
        self,
        model: str,
        speculative_config: Mapping[str, Any] | None,
        rows_max: int | None,
        max_logprobs: int,
        seed: int | None,
        revision: str | None,
        replica: Mapping[str, Any],
    ) -> None:
        """Raises ConfigError for a setting that is given twice, PairRefused for no revision."""
        self._names = {"target": "model"}
        """Arguments that have another name than the setting."""
        settings = dict(replica)
        for place, alias in ALIASES.items():
            section, name = place.split(".")
            if section == "replica" and alias in settings:
                if name in settings:
                    raise ConfigError(f"{alias}: also given as {name}")
                settings[name] = settings.pop(alias)
                self._names[name] = alias
        if "target" in settings:
            raise ConfigError("target: is given as model")
        settings["target"] = model if revision is None else with_revision(model, revision)
        if speculative_config is not None:
            settings["speculative_config"] = dict(speculative_config)
        self._scheduler = {"max_logprobs": max_logprobs}
        if rows_max is not None:
            self._scheduler["rows_max"] = rows_max
        self._settings = {"seed": seed, "replica": settings}

    def settings(self) -> ClusterConfig:
        """Raises ConfigError."""
        limits = {"timeout_s_max": TEN_YEARS_S, "draft_len_max": DRAFT_LEN_MAX, **NO_QUEUE_LIMITS}
        config = from_args({**self._settings, "scheduler": {**limits, **self._scheduler}})
        if config.replica.chat_template is not None:
            try:
                text_of(Path(config.replica.chat_template))
            except (ConfigError, OSError) as error:
                raise ConfigError(f"chat_template: {error}") from None
        # A caller of `LLM` says in one place how far drafts go.
        asked = config.replica.drafting.num_speculative_tokens or 0
        most = max(asked, SchedulerConfig().draft_len_max)
        return overridden(config, {"scheduler": {"draft_len_max": most}})

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Errors of settings, and of a model that they name, get the arguments' names."""
        try:
            yield
        except ConfigError as error:
            # What is wrong with several settings of a section begins with one of them.
            found = [
                reason.partition(": ")[::2] if place in SECTIONS else (place, reason)
                for place, reason in error.problems
            ]
            said = joined((self._name_of(place), reason) for place, reason in found)
            raise ConfigError(said or str(error)) from None
        except (PairRefused, OSError) as error:
            place, _, reason = str(error).partition(": ")
            if (name := self._name_of(place)) == place:
                raise
            raise type(error)(f"{name}: {reason}") from error

    def _name_of(self, place: str) -> str:
        place = place.removeprefix("replica.").removeprefix("scheduler.")
        first, dot, rest = place.partition(".")
        return self._names.get(first, first) + dot + rest
