"""The formats of reasoning: what stands around it in an answer. One table; no class per family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Reasoning stands between `begin` and `end`, at the beginning of an answer."""

    begin: str
    end: str
    assumed: bool = False
    """Whether an answer begins within its reasoning also where its prompt does not say so."""
    lead: str = ""
    """Behind `end` and before all else that the assistant writes."""
    header: str = ""
    """Before the text of the answer. With one, `begin` may come again, and a call has its own."""
    markup: Sequence[str] = ()
    """What else may stand in the text of an answer and is not part of it."""

    @property
    def markers(self) -> tuple[str, ...]:
        """All that a reader must see of the text, special tokens included."""
        return (self.begin, self.end, *filter(None, (self.lead, self.header)), *self.markup)

    def opened_by(self, prompt_end: str) -> bool | None:
        """Whether an answer begins within its reasoning, behind a prompt that ends so. None: the
        answer says."""
        prompt_end = prompt_end.rstrip()
        if prompt_end.endswith(self.end):
            return False
        return True if self.assumed or prompt_end.endswith(self.begin) else None


_THINK = ReasoningFormat("<think>", "</think>")
_THINKS = ReasoningFormat("<think>", "</think>", assumed=True)
_HARMONY = ReasoningFormat(
    "<|channel|>analysis<|message|>",
    "<|end|>",
    lead="<|start|>assistant",
    header="<|channel|>final<|message|>",
    markup=("<|channel|>commentary<|message|>", "<|return|>"),
)
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "gpt_oss": _HARMONY,
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
    "hunyuan_a13b": ReasoningFormat("<think>", "</think>", markup=("<answer>", "</answer>")),
    "qwen3": _THINK,
    "glm4": _THINK,
    "glm45": _THINK,
    "deepseek_v3": _THINK,
    "kimi_k2": _THINK,
    "deepseek_r1": _THINKS,
    "minimax_m2": _THINKS,
    "olmo3": _THINKS,
    "step3": _THINKS,
}
"""By their names. Special ones stand before general ones: `auto` takes the first that fits."""
_OTHER_NAMES = {"openai_gptoss": "gpt_oss"}
PARSERS = ("auto", "none", *REASONING_FORMATS, *_OTHER_NAMES)


def reasoning_format(name: str, template: str | None) -> ReasoningFormat | None:
    """The format of this name. `auto`: the first of the table whose markers the chat template has;
    None where it has none."""
    if name == "none":
        return None
    if name != "auto":
        return REASONING_FORMATS[_OTHER_NAMES.get(name, name)]
    for known in REASONING_FORMATS.values():
        # A template writes a marker in one piece, but those of channels.
        signs = ("<|channel|>", "analysis") if known.header else (known.end, *known.markup)
        if template is not None and all(sign in template for sign in signs):
            return known
    return None
