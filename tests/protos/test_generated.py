"""Proves: the committed gRPC code is what the proto gives."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PROTOS = Path(__file__).parents[2] / "protos"
GENERATED = ("lockstep_pb2.py", "lockstep_pb2.pyi", "lockstep_pb2_grpc.py")


def test_the_generated_code_is_up_to_date(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    out = str(tmp_path)
    subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", "-I.", f"--python_out={out}"),
            *(f"--pyi_out={out}", f"--grpc_python_out={out}", "protos/lockstep.proto"),
        ],
        cwd=PROTOS.parent,
        check=True,
    )
    for name in GENERATED:
        # The versions of the generators stand in the files and may differ.
        made = _without_versions((tmp_path / "protos" / name).read_text())
        assert made == _without_versions((PROTOS / name).read_text()), f"run `make protos`: {name}"


def _without_versions(text: str) -> str:
    text = re.sub(r"(Protobuf Python Version: |GRPC_GENERATED_VERSION = ).*", r"\1", text)
    return re.sub(r"ValidateProtobufRuntimeVersion\([^)]*\)", "", text)
