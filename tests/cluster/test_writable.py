"""Proves: a path that cannot be written is refused beforehand, and the check changes nothing."""

from __future__ import annotations

import os
from pathlib import Path

from cluster.files import check_writable


def test_the_check_leaves_everything_as_it_is(tmp_path: Path) -> None:
    there = tmp_path / "there.json"
    there.write_text("kept")
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "nowhere.json")
    for path in (there, link, tmp_path / "new" / "a.json"):
        check_writable(path)
    assert there.read_text() == "kept"
    assert link.is_symlink()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link.json", "new", "there.json"]
    assert list((tmp_path / "new").iterdir()) == []


def test_a_pipe_is_not_opened(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path(os.devnull)):
        check_writable(path)
