"""EAGLE-3 heads (arXiv 2503.01840): one layer that drafts from hidden states of the target."""

from replicas.drafters.eagle3.drafter import Eagle3Drafter, Eagle3Source
from replicas.drafters.eagle3.head_config import LAYER, Eagle3Config, eagle3_config
