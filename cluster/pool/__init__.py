"""The pool actor, and its sessions with workers and frontends."""
