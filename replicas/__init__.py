"""Tensor maths without Ray: a target/draft pair, its paged KV cache and the EQSPEC step."""
