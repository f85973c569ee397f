"""Tools that a call offers, and the calls of them in its answer."""
