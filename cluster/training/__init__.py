"""Training a drafter for a target: `job` runs it, `workers` over Ray, `laws` says what more would
bring."""
