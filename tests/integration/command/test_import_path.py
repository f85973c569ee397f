"""Proves: no process imports from the directory where a command starts, or where its script lies,
and what Ray writes is for this user only.

In that directory lie modules that leave a mark when they are imported, as beside a model that was
downloaded. The commands are scripts as pip installs them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.free_ports import free_port
from tests.serving import lockstep_serve

_ROOT = Path(__file__).parents[3]
BOUND_S = 120.0
NAMES = ("h2", "json", "torch", "numpy", "socket", "pickle", "array", "cluster", "replicas")
MODULE = """
import os, sys
if sys.argv[0] != {script!r}:  # Python itself puts the script's directory on the script's own path.
    with open({mark!r}, "a") as file:
        file.write(f"{{__file__}} in {{sys.argv}}\\n")
raise ImportError(__file__)
"""
COMMAND = "import sys\nfrom cluster.cli.main import main\nsys.exit(main())\n"
MODEL = """
from lockstep import LLM, SamplingParams
if __name__ == "__main__":
    model = LLM("tiny", device="cpu", torch_threads=1, tensor_parallel=2, calibrate=False)
    [text] = model.generate("a b", SamplingParams(max_tokens=4), progress=False)
    print(len(text.token_ids), "tokens")
"""


@dataclass(frozen=True)
class Downloaded:
    """A directory with modules that nobody asked for, and commands of a user who stands in it."""

    folder: Path
    scripts: Path
    mark: Path
    temporary: Path
    home: Path

    @property
    def variables(self) -> dict[str, str]:
        places = {"HOME": self.home, "TMPDIR": self.temporary, "PYTHONPATH": _ROOT}
        return {"RAY_AUTH_MODE": "token", **{name: str(path) for name, path in places.items()}}

    def run(self, *command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=self.folder,
            env=os.environ | self.variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=BOUND_S,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    def marks(self) -> str:
        return self.mark.read_text() if self.mark.exists() else ""


@pytest.fixture
def downloaded(tmp_path: Path) -> Iterator[Downloaded]:
    # Ray's sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="l") as temporary:
        made = Downloaded(
            *(tmp_path / name for name in ("model", "bin", "mark")), Path(temporary), tmp_path
        )
        made.folder.mkdir()
        made.scripts.mkdir()
        command = made.scripts / "lockstep"
        command.write_text(COMMAND)
        (tmp_path / "ask").write_text(MODEL)
        module = MODULE.format(mark=str(made.mark), script=str(command))
        for name in NAMES:
            (made.folder / f"{name}.py").write_text(module)
        # Workers try to import it, and do without.
        (made.scripts / "h2.py").write_text(module)
        yield made


@pytest.mark.ray
def test_a_server_and_its_clients_import_nothing_of_where_they_start(
    downloaded: Downloaded, tmp_path: Path
) -> None:
    command = str(downloaded.scripts / "lockstep")
    port = free_port()
    arguments = [
        *(
            "--target",
            "tiny",
            "--device",
            "cpu",
            "--torch-threads",
            "1",
            "--num-gpu-blocks-override",
            "128",
        ),
        *("--grpc-port", str(port), "--http-port", str(free_port())),
    ]
    with lockstep_serve(
        arguments,
        tmp_path / "log",
        command=(command,),
        cwd=downloaded.folder,
        variables=downloaded.variables,
    ):
        server = ("--address", f"localhost:{port}")
        assert downloaded.run(command, "generate", "the list", "--max-new-tokens", "4", *server)
        assert "tiny" in downloaded.run(command, "status", *server)
        bench = ("--rate", "2", "--duration", "1", "--max-new-tokens", "4")
        assert "tokens" in downloaded.run(command, "bench", *bench, *server)
        folder = downloaded.temporary / f"lockstep-{os.geteuid()}"
        assert folder.stat().st_mode & 0o777 == 0o700
        sockets = list(folder.glob("ray/session_latest/sockets/*"))
        assert len(sockets) >= 2, "Ray's own files are there"
        assert not (downloaded.temporary / "ray").exists()
        token = downloaded.home / ".ray" / "auth_token"
        assert (token.stat().st_mode & 0o777, len(token.read_text()) >= 32) == (0o600, True)
    assert downloaded.marks() == ""
    # They would have left one.
    subprocess.run([sys.executable, "-c", "import h2"], cwd=downloaded.folder, check=False)
    assert "h2.py" in downloaded.marks()


@pytest.mark.long
def test_a_model_in_this_process_and_its_ranks_import_nothing_of_where_they_start(
    downloaded: Downloaded,
) -> None:
    assert "4 tokens" in downloaded.run(str(downloaded.home / "ask"))
    prompts = downloaded.folder / "prompts.jsonl"
    prompts.write_text('{"prompt": "the list"}\n')
    command = (str(downloaded.scripts / "lockstep"), "verify", "--prompts", "prompts.jsonl")
    assert downloaded.run(*command, "--target", "tiny", "--device", "cpu", "--max-new-tokens", "4")
    assert downloaded.marks() == ""
