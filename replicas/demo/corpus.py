"""Build the demo pair's text from what comes with CPython: no download, no order by chance.

A document is a language-reference topic, or everything that one module of the standard library
says in prose (its docstrings and block comments). Knows nothing about tokens or models.
"""

import ast
import hashlib
import importlib
import inspect
import re
import sys
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

# The language reference is what the pair should sound like, so it is seen more often.
TOPIC_REPEATS = 3
HELD_OUT_PERCENT = 4
DOCSTRING_CHARS_MIN = 40
DOCUMENT_CHARS_MIN = 200
DOCUMENT_CHARS_MAX = 24_000
COMMENT_LINES_MIN = 3

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_COMMENT = re.compile(r"^[ \t]*#(?!!)[ \t]?(.*)$")
_PROSE = re.compile(r"[A-Za-z]{2,} [a-z]{2,} [a-z]{2,}")


@dataclass(frozen=True)
class Document:
    """One text with its name, and how often training sees it in one pass over the corpus."""

    name: str
    text: str
    repeats: int


@dataclass(frozen=True)
class Corpus:
    """The split is by document: no held-out document shares a source file with a training one."""

    train: tuple[Document, ...]
    held_out: tuple[Document, ...]


def build_corpus() -> Corpus:
    """Read every source, in sorted order, and split by a hash of each document's name."""
    train: list[Document] = []
    held_out: list[Document] = []
    seen: set[str] = set()
    for document in _all_documents(seen):
        (held_out if is_held_out(document.name) else train).append(document)
    return Corpus(tuple(train), tuple(held_out))


def is_held_out(name: str) -> bool:
    """On which side of the split the document of this name lies."""
    # A hash of the name, not a shuffle: a file that appears or vanishes moves no other document.
    return (
        int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 100 < HELD_OUT_PERCENT
    )


def _all_documents(seen: set[str]) -> Iterator[Document]:
    for document in topic_documents():
        if document.text not in seen:
            seen.add(document.text)
            yield document
    yield from _sources(Path(sysconfig.get_paths()["stdlib"]), seen)
    yield from _compiled_modules(seen)


def topic_documents() -> Iterator[Document]:
    """The language reference as `help()` shows it, one document for each topic."""
    from pydoc_data.topics import topics

    for name, text in sorted(topics.items()):
        yield Document(f"topics/{name}", text.strip(), TOPIC_REPEATS)


def _sources(root: Path, seen: set[str]) -> Iterator[Document]:
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if "site-packages" in name.parts or name.parts[0] == "pydoc_data":
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (SyntaxError, ValueError):  # the standard library's tests hold broken files
            continue
        yield from _document(name.as_posix(), (*_docstrings(tree), *_block_comments(source)), seen)


def _compiled_modules(seen: set[str]) -> Iterator[Document]:
    """What the modules linked into the interpreter say; they have no source to parse."""
    for name in sorted(sys.builtin_module_names):
        module = importlib.import_module(name)
        owners = [module, *(v for _, v in sorted(vars(module).items()) if isinstance(v, type))]
        texts = [
            inspect.cleandoc(text)
            for owner in owners
            for _, member in sorted(vars(owner).items())
            if isinstance(text := getattr(member, "__doc__", None), str)
            and len(text) >= DOCSTRING_CHARS_MIN
        ]
        yield from _document(name, texts, seen)


def _document(name: str, pieces: Iterable[str], seen: set[str]) -> Iterator[Document]:
    # Equal docstrings (aliases, stubs) would leak from one side of the split to the other.
    fresh = [piece for piece in dict.fromkeys(pieces) if piece not in seen]
    seen.update(fresh)
    text = "\n\n".join(fresh)
    if len(text) >= DOCUMENT_CHARS_MIN:
        # A few huge files would drown the rest.
        yield Document(f"stdlib/{name}", text[:DOCUMENT_CHARS_MAX], 1)


def _docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED):
            text = ast.get_docstring(node)
            if text is not None and len(text) >= DOCSTRING_CHARS_MIN:
                yield text.strip()


def _block_comments(source: str) -> Iterator[str]:
    """Runs of comment lines that read like sentences; code that is commented out does not."""
    block: list[str] = []
    for line in [*source.splitlines(), ""]:
        match = _COMMENT.match(line)
        if match:
            block.append(match[1])
            continue
        if len(block) >= COMMENT_LINES_MIN:
            text = textwrap.dedent("\n".join(block)).strip("#-= \n")
            if _PROSE.search(text):
                yield text
        block = []
