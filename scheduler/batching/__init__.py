"""What each replica runs next: grouping, prefill, placement, dispatch and rebalancing."""
