"""Where the embedded pair and the chat model's head lie, and the text that the pair learned.

Imports nothing heavy, knows no model."""

from pathlib import Path

from replicas.demo.corpus import build_corpus

TARGET_DIR = Path(__file__).parent / "target"
DRAFT_DIR = Path(__file__).parent / "draft"
HEAD_DIR = Path(__file__).parent / "smollm2_head"
