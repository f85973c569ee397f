"""The command `lockstep`."""
