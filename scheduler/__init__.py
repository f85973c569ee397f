"""The pure core of Lockstep: one pool of sequences, events in, actions out.

Nothing here knows Ray, torch, gRPC, a clock, the environment or global randomness.
"""
