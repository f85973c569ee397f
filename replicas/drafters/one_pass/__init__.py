"""One-pass drafters, DFlash (arXiv 2602.06036) and DSpark: a few layers that draft a whole block of
tokens at once from hidden states of the target."""

from replicas.drafters.one_pass.drafter import OnePassDrafter, OnePassSource
from replicas.drafters.one_pass.head_config import MASK, OnePassConfig, one_pass_config
