"""OpenAI's Responses: what is answered, what is kept, and the routes."""

from cluster.frontend.http_api.responses.api import responses_router
