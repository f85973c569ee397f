"""How many replicas a load needs, and which shard takes a request."""
