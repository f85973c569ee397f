"""Training a drafter for a target: `job` runs it from data to report, `workers` over Ray."""
