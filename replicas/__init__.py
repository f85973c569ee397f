"""Tensor maths without Ray: a target and its drafter, paged KV caches and the EQSPEC step."""
