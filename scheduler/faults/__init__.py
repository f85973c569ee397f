"""Quarantine of requests that break replicas."""
