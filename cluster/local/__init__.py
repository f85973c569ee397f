"""A model in one process: `engine` runs the scheduler over one replica, `llm` is `lockstep.LLM`."""
