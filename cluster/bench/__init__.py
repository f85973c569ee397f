"""`lockstep bench`: load, figures, and the report of a run.

`load` speaks to a cluster by gRPC, `openai_load` to any server by HTTP, `engine` to one of this
process; nothing here needs Ray.
"""
