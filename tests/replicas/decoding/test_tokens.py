"""Proves which tokens end a text: those that the target's files name, wherever they name them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from replicas.config import ReplicaConfig
from replicas.decoding import end_of_turn_ids, load_grammars, read_tokens
from replicas.models.loader import resolve
from replicas.names import TINY


def target(folder: Path, generation: object, config: object) -> ReplicaConfig:
    """The tiny target with these end tokens in its files; "" leaves the generation's file out."""
    files = Path(resolve(TINY))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(files / name, folder)
    whole = json.loads((files / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**whole, "eos_token_id": config}))
    if generation != "":
        text = json.dumps({"eos_token_id": generation})
        (folder / "generation_config.json").write_text(text)
    return ReplicaConfig(target=str(folder))


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        (7, 5, (7,)),
        ([7, 9], 5, (7, 9)),
        ("", 5, (5,)),
        ("", [5, 6], (5, 6)),
        (None, 5, (0,)),  # the tokenizer's own
    ],
)
def test_the_ends_are_those_of_the_generation_config_or_of_the_config_or_of_the_tokenizer(
    tmp_path: Path, generation: object, config: object, ends: tuple[int, ...]
) -> None:
    encoder, found = read_tokens(target(tmp_path, generation, config))
    assert found == ends
    assert encoder.eos_token_id == 0
    assert end_of_turn_ids(encoder, found) == tuple(dict.fromkeys((*ends, 0)))


def test_a_tokenizer_without_an_end_adds_none(tmp_path: Path) -> None:
    assert end_of_turn_ids(object(), (3, 3, 4)) == (3, 4)
    config = target(tmp_path, None, None)
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "eos_token": None}))
    encoder, found = read_tokens(config)
    assert encoder.eos_token_id is None
    assert found == ()


def test_no_end_is_one_that_the_target_can_never_choose() -> None:
    assert end_of_turn_ids(object(), (-1, 9, 8, 0), 9) == (8, 0)
    assert end_of_turn_ids(object(), (-1, 10**9)) == (10**9,)


def test_a_chat_template_takes_the_place_of_the_targets_own(tmp_path: Path) -> None:
    config = target(tmp_path, 7, 5)
    template = tmp_path / "mine.jinja"
    template.write_text("{{ messages[0].content }}!", encoding="utf-8")
    before, _ = read_tokens(config)
    after, _ = read_tokens(config.model_copy(update={"chat_template": str(template)}))
    assert after.chat_template == "{{ messages[0].content }}!"
    assert before.chat_template != after.chat_template


def test_only_a_target_with_tokens_has_grammars() -> None:
    assert load_grammars(ReplicaConfig(target=TINY), 4096) is not None
    assert load_grammars(ReplicaConfig(target="planted:tiny"), 4096) is None
