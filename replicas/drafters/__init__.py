"""What proposes draft tokens: the protocol that a step speaks, and each method's drafter."""

from collections.abc import Callable
from typing import Any

from replicas.config import ReplicaConfig
from replicas.drafters.clover import CloverSource
from replicas.drafters.eagle3 import LAYER, Eagle3Config, Eagle3Source, eagle3_config
from replicas.drafters.model import ModelSource
from replicas.drafters.one_pass import OnePassSource
from replicas.drafters.protocol import Drafter, DraftRequest, DraftSource, Observation, Proposal
from replicas.drafters.suffix import SuffixSource

METHODS: dict[str, Callable[[ReplicaConfig, Any], DraftSource]] = {
    "draft_model": ModelSource.read,
    "suffix": lambda config, target: SuffixSource(),
    "eagle3": Eagle3Source.read,
    "dflash": OnePassSource.read,
    "dspark": OnePassSource.read,
    "clover": CloverSource.read,
}
"""Each is given transformers' config of the target, and reads no weights. Raises PairRefused, or
OSError for a name not found."""
