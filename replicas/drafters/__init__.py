"""What proposes draft tokens: the protocol that a step speaks, and each method's drafter."""

from collections.abc import Callable
from typing import Any

from replicas.config import ReplicaConfig
from replicas.drafters.clover import FIRST, LATER, CloverConfig, CloverSource, clover_config
from replicas.drafters.eagle3 import LAYER, Eagle3Config, Eagle3Source, eagle3_config
from replicas.drafters.model import ModelSource
from replicas.drafters.one_pass import MASK, OnePassConfig, OnePassSource, one_pass_config
from replicas.drafters.overlapped import OverlappedSource
from replicas.drafters.protocol import (
    Drafter,
    DraftRequest,
    DraftsAhead,
    DraftSource,
    Observation,
    Proposal,
)
from replicas.drafters.suffix import SuffixSource
from replicas.drafters.suffix_first import SuffixFirstSource

SOURCES: dict[str, Callable[[ReplicaConfig, Any], DraftSource]] = {
    "draft_model": ModelSource.read,
    "suffix": lambda config, target: SuffixSource(),
    "eagle3": Eagle3Source.read,
    "dflash": OnePassSource.read,
    "dspark": OnePassSource.read,
    "clover": CloverSource.read,
}
"""By the setting's method; `none` has no source."""


def draft_source(config: ReplicaConfig, target: Any) -> DraftSource | None:
    """What drafts for a target, known by transformers' config, without weights; None: nothing.
    Raises PairRefused, or OSError for a name not found."""
    said = config.drafting
    if said.method == "none":
        return None
    source = SOURCES[said.method](config, target)
    if said.draft_device is not None:
        return OverlappedSource.of(source, config)
    return SuffixFirstSource(source) if said.enable_suffix_decoding else source
