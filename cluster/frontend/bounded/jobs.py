"""What the children can do. Each job loads what it needs, and none needs torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

Work = Callable[[bytes], bytes]
_REASON_CHARS_MAX = 1000


class Refused(Exception):
    """The work cannot be done; the text says why."""


def rendering(_setup: bytes) -> Work:
    """Chat templates."""
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    def work(asked: bytes) -> bytes:
        """The texts of conversations; asked by them and what else the template is told."""
        conversations, told = json.loads(asked)
        try:
            texts, _ = render_jinja_template(conversations, **told)
        except MemoryError:
            raise
        except TemplateSyntaxError as error:
            raise Refused(f"line {error.lineno}: {_reason(error)}") from None
        except Exception as error:
            # A template is a program: it may raise anything.
            raise Refused(_reason(error)) from None
        return "".join(texts).encode("utf-8", "surrogatepass")

    return work


def checking(setup: bytes) -> Work:
    """Structures, for the tokens of one target."""
    from tokenizers import Tokenizer

    from replicas.grammars import GrammarError, Grammars, grammar_of

    target = json.loads(setup)
    tokenizer = Tokenizer.from_str(target["tokenizer"])
    grammars = Grammars(tokenizer, target["ends"], target["vocab"])
    del target, tokenizer

    def work(asked: bytes) -> bytes:
        """The grammar of a structure that has run as far as to its first tokens, and whether it
        allows the committed ones."""
        structure, committed = json.loads(asked)
        try:
            grammar = grammar_of(*structure)
            grammars.check(grammar)
            allows = not committed or grammars.allows(grammar, committed)
        except GrammarError as error:
            raise Refused(_reason(error)) from None
        return json.dumps([grammar, allows]).encode()

    return work


def _reason(error: Exception) -> str:
    """Without the state that llguidance adds."""
    said = str(error) or type(error).__name__
    return said.partition("\n<state>")[0][:_REASON_CHARS_MAX]


JOBS: Mapping[str, Callable[[bytes], Work]] = {"checking": checking, "rendering": rendering}
