"""Anthropic's Messages over the same service."""

from cluster.frontend.http_api.messages.api import messages_router
