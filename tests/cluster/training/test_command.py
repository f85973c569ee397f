"""Proves that `lockstep train-drafter` says in a sentence what is wrong, and on the tiny target
makes a head that drafts."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli.main import main
from replicas.demo import build_corpus
from tests.cluster.training.targets import save_data, save_target

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def run(*args: object, cache: Path) -> tuple[int, str]:
    env = {"XDG_CACHE_HOME": str(cache), "COLUMNS": "200"}
    result = CliRunner().invoke(main, ["train-drafter", *map(str, args)], env=env)
    return result.exit_code, result.output


def test_what_is_wrong_is_a_sentence(tmp_path: Path) -> None:
    target = save_target(tmp_path / "target")
    data = save_data(tmp_path / "data.jsonl")
    data.write_text(data.read_text() + "{\n")
    said = {"--out": tmp_path / "out", "--data": data, "--draft-vocab": 48}
    args = [part for pair in said.items() for part in pair]
    code, output = run(target, *args, cache=tmp_path)
    assert code == 2
    assert f"data: line 91 of {data}: no JSON" in output
    assert "Traceback" not in output
    code, output = run(target, *args, "--self-generated", 100, cache=tmp_path)
    assert code == 2
    assert "give either --data or --self-generated" in output
    code, output = run(target, *args[:-1], 9000, cache=tmp_path)
    assert (code, "draft_vocab: 9000" in output) == (2, True)
    (tmp_path / "file").write_text("")
    sound = save_data(tmp_path / "sound.jsonl")
    args[1], args[3] = tmp_path / "file" / "out", sound
    code, output = run(target, *args, "--minutes", 0.1, cache=tmp_path)
    assert code == 1
    assert "Not a directory" in output


def test_a_full_disk_is_a_sentence_and_leaves_nothing_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    target = save_target(tmp_path / "target")
    data = save_data(tmp_path / "data.jsonl")
    said = {"--out": tmp_path / "out", "--data": data, "--draft-vocab": 48}
    args = [part for pair in said.items() for part in pair]
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        code, output = run(target, *args, cache=tmp_path)
    assert code == 1
    assert "No space left on device. --resume goes on" in output
    made = list(tmp_path.glob("lockstep/training/*/features-*/*"))
    assert [path.suffix for path in made] == [".part"], "no part looks whole"


@pytest.mark.slow
def test_two_minutes_make_a_head_for_the_tiny_target(tmp_path: Path) -> None:
    data, template, out = (tmp_path / name for name in ("data.jsonl", "template", "head"))
    template.write_text(TEMPLATE)
    texts = (document.text for document in build_corpus().train)
    pieces = [text[begin : begin + 600] for text in texts for begin in range(0, 1200, 600)]
    lines = []
    for piece in [piece for piece in pieces if len(piece) == 600][:160]:
        turns = [("user", piece[:150]), ("assistant", piece[150:])]
        messages = [{"role": role, "content": content} for role, content in turns]
        lines.append(json.dumps({"messages": messages}))
    data.write_text("\n".join(lines))
    said = {
        "--out": out,
        "--data": data,
        "--chat-template": template,
        "--minutes": 2,
        "--draft-vocab": 2048,
    }
    args = [part for pair in said.items() for part in pair]
    code, output = run("tiny", *args, cache=tmp_path)
    assert code == 0, output
    history = json.loads((out / "training.json").read_text())["history"]
    assert history[-1]["held_out_loss"] < history[0]["held_out_loss"]
    assert history[-1]["accepted"] > 0.1
    assert "This will take" in output
