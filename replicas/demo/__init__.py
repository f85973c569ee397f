"""Where the embedded pair lies, and the text it learned. Imports nothing heavy, knows no model."""

from pathlib import Path

from replicas.demo.corpus import build_corpus

TARGET_DIR = Path(__file__).parent / "target"
DRAFT_DIR = Path(__file__).parent / "draft"
