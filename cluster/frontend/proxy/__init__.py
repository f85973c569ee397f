"""Limits of Serve's proxies, from the socket on: what a stranger sends before any key is read."""
