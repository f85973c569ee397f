"""EAGLE-3 heads (arXiv 2503.01840): one layer that drafts from hidden states of the target."""

from replicas.drafters.eagle3.drafter import Eagle3Drafter, HeadSource
from replicas.drafters.eagle3.head_config import LAYER, HeadConfig, head_config
from replicas.drafters.eagle3.weights import load_head, read_head
