"""The pool's process: the actor, its peers, and what it says with workers and frontends."""
