"""The HTTP edge: health, generation as JSON, OpenAI's API, and what keeps web pages out."""
