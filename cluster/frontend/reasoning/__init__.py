"""Which part of an answer is reasoning: formats, a reader, structures behind it."""

from cluster.frontend.reasoning.formats import REASONING_FORMATS, ReasoningFormat, reasoning_format
from cluster.frontend.reasoning.reader import ReasoningReader
from cluster.frontend.reasoning.structure import behind_reasoning
