"""Training a drafter for a target: `command` has its options, `job` runs it, `workers` over Ray."""
