"""Names of the formats in which targets write reasoning and calls of tools."""

from typing import Literal

ReasoningParser = Literal[
    "auto",
    "none",
    "deepseek_r1",
    "deepseek_v3",
    "glm4",
    "glm45",
    "gpt_oss",
    "granite",
    "hunyuan_a13b",
    "kimi_k2",
    "minimax_m2",
    "mistral",
    "olmo3",
    "qwen3",
    "seed_oss",
    "step3",
    "openai_gptoss",
]
"""The names of `cluster.frontend.reasoning`."""
ToolCallParser = Literal[
    "auto",
    "deepseek_v3",
    "deepseek_v31",
    "glm4",
    "glm45",
    "gpt_oss",
    "hermes",
    "kimi_k2",
    "llama3_json",
    "mistral",
    "mistral_json",
    "pythonic",
    "qwen3_coder",
    "glm47",
    "llama4_pythonic",
    "openai",
    "qwen3_xml",
]
"""The names of `cluster.frontend.tools`."""
