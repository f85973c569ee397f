"""Where the embedded pair lies. Imports nothing heavy, knows nothing about models."""

from pathlib import Path

TARGET_DIR = Path(__file__).parent / "target"
DRAFT_DIR = Path(__file__).parent / "draft"
