"""What the tests do not see: `make mutate` changes one line of the core and runs its tests."""
