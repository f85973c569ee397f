"""How many tokens a batch drafts, by expected goodput: latency, acceptance, policy."""
