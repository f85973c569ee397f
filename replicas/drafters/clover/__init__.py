"""Clover-2 heads (arXiv 2408.00264): a state that takes in one drafted token after the other."""

from replicas.drafters.clover.drafter import CloverDrafter, CloverSource
from replicas.drafters.clover.head_config import FIRST, LATER, CloverConfig, clover_config
