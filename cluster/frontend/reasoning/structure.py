"""Structures that begin where reasoning ends.

The reasoning is part of the grammar: so where a row is in it is a function of the row's own tokens,
and a draft that leaves the reasoning is followed into the structure as any other.
"""

from __future__ import annotations

from cluster.frontend.reasoning.formats import ReasoningFormat
from cluster.frontend.structure import Markup, Structure
from scheduler.errors import InvalidRequest

BUDGET_FIELD = "thinking_token_budget"
_SPACE = r"/[ \n]{0,3}/"
"""White space that a target may write behind its reasoning."""


def behind_reasoning(
    form: ReasoningFormat,
    opened: bool | None,
    bound: Structure | None,
    markup: Markup,
    budget: int | None = None,
    calls: bool = False,
) -> Structure | None:
    """What binds the whole answer, reasoning included. `opened`: as of the format; `bound`: what
    must stand behind the reasoning, `calls`: it is calls of tools, which have headers of their own;
    `budget`: after so many tokens the reasoning ends, wherever it is. Raises InvalidRequest."""
    if opened is False or (bound is None and budget is None):
        return bound
    special = markup.is_special(form.end)
    if budget is not None and not special:
        reason = "the end of the target's reasoning is no token of its own"
        raise InvalidRequest(BUDGET_FIELD, reason)
    end = markup.literal(form.end) if special else ""
    within = f"thought {end} {markup.literal(form.lead)}"
    begun = f"{markup.literal(form.begin)} {within}"
    ends = f"[max_tokens={budget}]" if budget is not None else ""
    ends = ends if special else f'[suffix="{form.end}"]'
    rules = [
        f"start: {within} answer" if opened else f"start: ({begun})? answer",
        f"thought{ends}: /(?s:.*)/",
    ]
    if bound is None:
        rules.append("answer: <[*]>*")
        return Structure("grammar", ("\n".join(rules),), BUDGET_FIELD)
    header = "" if calls else markup.literal(form.header)
    rules += [f"answer: space {header} @bound", f"space: {_SPACE}"]
    return Structure("grammar", ("\n".join(rules),), bound.field, {"bound": bound})
