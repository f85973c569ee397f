"""`lockstep bench`: load, figures, comparison with transformers, and the report of a run.

Only `load` speaks to a cluster; everything else needs neither Ray nor gRPC.
"""
