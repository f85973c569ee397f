"""Quarantine of requests that break replicas."""

from scheduler.faults.quarantine import batch_failed, excluded, is_guilty, replica_died
