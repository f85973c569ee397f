"""The process around a replica: pulls batches, runs them, reports results."""
