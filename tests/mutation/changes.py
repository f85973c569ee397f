"""Every single change that a slip could make to a module: an operator, a constant, a condition, a
call left out, another value returned.

Not drawn is what no test should see: docstrings and messages, annotations, assertions and checks
that tests alone call, logging, and the tuned numbers of `TUNED`; and what a device does `if not
x.is_cpu`, which no test runs without one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CORE = ("scheduler", "replicas/eqspec.py", "replicas/sampling", "replicas/kv_cache")
CORE += ("replicas/decoding",)
LEFT_OUT = ("scheduler/simulation/", "scheduler/state/invariants.py")
"""The simulator is a rig; the invariants are what tests assert."""

TUNED = {
    "how fast a mean forgets": "RATE_S REACHED_RECENT DECAY PRIOR_TRIES CLASS_TRIES FIRST_GUESS "
    "_GUESS_TRIES CELL_RATE SPEED_RATE ROUND_TRIP_RATE COUNT_MAX _MEMORY_S _SAMPLE_S",
    "how much is looked at or kept": "CANDIDATES_MAX SCAN_MAX CELLS_MAX FIT_EVERY STALE _SLACK "
    "_LIKELIEST _LIKELIEST_OF_DRAFT _COLUMNS _COLUMNS_PER_TOKEN _KEY_BYTES _TIES _SORTED AHEAD "
    "_TABLES_MOST",
    "a weight found by measuring": "PREFIX_TOKENS_PER_ROW PREFILL_TOKENS_PER_STEP LAG OUTLIER "
    "FALLBACK PROBE_SHARE PROBE_SAVED ROUND_TRIP_SHARE GAP_SHARE CHUNK_STEPS_MAX "
    "CHUNK_FIXED_SHARE BATCH_S_MAX CAP_GROWTH LOOK_S STARTING_MAX DOWN_SHARE _RAGGED "
    "TURNS_GAIN LEAVING_SHARE",
    "a limit that an operator might move": "_RETRY_AFTER_S _RETRY_UNKNOWN_S TEMPERATURE_MAX "
    "PENALTY_MAX BIAS_MAX LOGIT_BIAS_MAX END_TOKENS_MAX KILLS_MAX_FACTOR "
    "PROBATION_TOKENS DRAFT_LEN_MAX PREFILL_TOKENS_LEAST",
}
"""Module constants whose value no reader could derive, by reason. What is done with them is drawn,
as are all other constants."""
_TUNED = frozenset(name for names in TUNED.values() for name in names.split())
_TYPES = frozenset({"Event", "Action"})
"""Unions, which have operators, too."""

_SWAPPED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot,
    ast.IsNot: ast.Is, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


@dataclass(frozen=True)
class Site:
    """A place in a module, and what may stand there instead."""

    path: str
    begin: int
    end: int
    """Bytes of the file."""
    texts: tuple[str, ...]
    lines: range
    """Of the statement that it stands in; of one with a body, its head."""
    at_import: bool
    """Whether it runs when the module is imported, and in no function."""


def core_modules(root: Path) -> list[str]:
    found = [root / place for place in CORE if place.endswith(".py")]
    found += [path for place in CORE for path in (root / place).rglob("*.py")]
    names = sorted(path.relative_to(root).as_posix() for path in found)
    return [name for name in names if not name.startswith(LEFT_OUT)]


def sites(path: str, source: str) -> list[Site]:
    """In the order of the file."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found, at = {}, {}
    tree = ast.parse(source)
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    for node, texts in _walk(tree):
        if not texts:
            continue
        begin = starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        end = starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        old = source.encode()[begin:end].decode()
        new = tuple(text for text in dict.fromkeys(texts) if text != old)
        if new:
            found.setdefault((begin, end), []).extend(new)
            at[begin, end] = node.lineno  # type: ignore[attr-defined]
    return [
        Site(path, *place, tuple(dict.fromkeys(new)), *_around(statements, at[place]))
        for place, new in sorted(found.items())
    ]


def _around(statements: list[ast.stmt], line: int) -> tuple[range, bool]:
    """The lines of the innermost statement at a line, and whether no function's body holds it."""
    around = [node for node in statements if node.lineno <= line <= (node.end_lineno or 0)]
    functions = [node for node in around if isinstance(node, ast.FunctionDef)]
    inner = max(around, key=lambda node: (node.lineno, -(node.end_lineno or 0)))
    body = getattr(inner, "body", None)
    last = max(inner.lineno, body[0].lineno - 1) if body else inner.end_lineno or inner.lineno
    inside = any(node.body[0].lineno <= line for node in functions)
    return range(inner.lineno, last + 1), not inside


def changed(source: str, site: Site, text: str) -> str:
    data = source.encode()
    return (data[: site.begin] + text.encode() + data[site.end :]).decode()


def _walk(node: ast.AST) -> Iterator[tuple[ast.AST, list[str]]]:
    if _is_left_out(node):
        return
    match node:
        case ast.If(test=ast.UnaryOp(op=ast.Not(), operand=ast.Attribute(attr="is_cpu"))):
            for other in node.orelse:
                yield from _walk(other)
            return
    yield node, [*_instead(node)]
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        yield node.test, _conditions(node.test)
    if isinstance(node, ast.comprehension):
        for test in node.ifs:
            yield test, _conditions(test)
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        if isinstance(node, ast.ClassDef) and name == "keywords":  # frozen, as a decorator says it
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _walk(child)


def _is_left_out(node: ast.AST) -> bool:
    match node:
        case ast.Assert() | ast.Raise() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
            return True
        case ast.keyword(arg="strict" | "sorted"):  # of zip: an assertion; of topk: speed alone
            return True
        case ast.keyword(arg="stable"):  # of sort: on a host each is
            return True
        case ast.keyword(arg="dim" | "axis"):  # one axis has two numbers
            return True
        case ast.FunctionDef(name="check_integrity" | "passes_bound" | "__repr__"):
            return True
        case ast.Call(func=ast.Name(id="Field")):  # what a setting may be is declared there
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="_log")))):
            return True
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return name in _TUNED or name in _TYPES
        case _:
            return False


def _instead(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Compare(
            ops=[ast.Lt() | ast.LtE() | ast.Gt() | ast.GtE()], comparators=[ast.Name(id=name)]
        ) if name in _TUNED:  # as its number one more or less
            return
        case ast.Compare(left=left, ops=[op], comparators=right):
            yield f"({ast.unparse(ast.Compare(left, [_SWAPPED[type(op)]()], right))})"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _SWAPPED:
            yield f"({ast.unparse(ast.BinOp(left, _SWAPPED[type(op)](), right))})"
        case ast.AugAssign(target=target, op=op, value=value) if type(op) in _SWAPPED:
            yield ast.unparse(ast.AugAssign(target, _SWAPPED[type(op)](), value))
        case ast.BoolOp(op=op, values=values):
            yield f"({ast.unparse(ast.BoolOp(_SWAPPED[type(op)](), values))})"
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield f"({ast.unparse(operand)})"
        case ast.Constant(value=bool() as value):
            yield str(not value)
        case ast.Constant(value=int() | float() as value):
            more = (value + 1, value - 1) if isinstance(value, int) else ()
            some = (value * 2, value // 2 if isinstance(value, int) else value / 2)
            yield from (f"({text!r})" if text < 0 else repr(text) for text in (*more, *some))
        # One that a slip left out. As `continue`, a `break` would most often only cost time.
        case ast.Expr(value=ast.Call()) | ast.Break():
            yield "pass"
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield "return None"
        case ast.Continue():
            yield "break"
        case ast.Name(id="min" | "max" as name):
            yield "max" if name == "min" else "min"


def _conditions(test: ast.expr) -> list[str]:
    return [f"(not ({ast.unparse(test)}))", "True", "False"]
