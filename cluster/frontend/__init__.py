"""The Serve deployment that clients reach: parses, admits, tokenizes, submits and streams."""
