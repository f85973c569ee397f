"""The HTTP edge: OpenAI's API, the target's tokens, health, and what keeps web pages out."""
