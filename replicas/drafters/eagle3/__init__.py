"""EAGLE-3 heads (arXiv 2503.01840): one layer that drafts from hidden states of the target."""

from replicas.drafters.eagle3.config import HeadConfig, HeadRefused
from replicas.drafters.eagle3.drafter import Eagle3Drafter
from replicas.drafters.eagle3.weights import Head, load_head, read_head

__all__ = ["Eagle3Drafter", "Head", "HeadConfig", "HeadRefused", "load_head", "read_head"]
