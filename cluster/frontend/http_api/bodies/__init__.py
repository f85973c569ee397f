"""Bodies of HTTP requests: the table of parameters, a model for each endpoint, and one check."""

from cluster.frontend.http_api.bodies.chat import ChatRequest
from cluster.frontend.http_api.bodies.check import IGNORED_HEADER, IgnoredNames, Known, Taken, taken
from cluster.frontend.http_api.bodies.completions import CompletionRequest
from cluster.frontend.http_api.bodies.generation import GenerationRequest
from cluster.frontend.http_api.bodies.tokens import Detokenize, Tokenize, TokensRequest
