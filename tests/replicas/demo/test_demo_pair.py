"""Proves that the embedded pair is small and complete, and costs nothing until it is used."""

import subprocess
import sys

from replicas.demo import DRAFT_DIR, TARGET_DIR

BYTES_MAX = 16_000_000
FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


def test_the_files_are_complete_and_small() -> None:
    for directory in (TARGET_DIR, DRAFT_DIR):
        assert {path.name for path in directory.iterdir()} == FILES
    files = [path for directory in (TARGET_DIR, DRAFT_DIR) for path in directory.iterdir()]
    assert sum(path.stat().st_size for path in files) <= BYTES_MAX


def test_the_package_imports_without_torch() -> None:
    code = "import sys, replicas.demo; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
