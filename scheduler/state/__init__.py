"""The books of a pool: sequences, replicas, what may happen to them, and the invariants."""
