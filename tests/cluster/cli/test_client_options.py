"""Proves: the command reads its key and its certificates strictly, and shows no key to anybody."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.client.channel import Server
from cluster.config import ConfigError
from cluster.config_sources import api_key
from tests.cluster.cli.command import lockstep


def test_a_key_is_in_no_log_and_one_of_a_file_goes_before_the_environment(tmp_path: Path) -> None:
    assert "secret" not in repr(Server("localhost:1", "secret"))
    path = tmp_path / "key"
    path.write_text("from-file\n")
    environment = {"LOCKSTEP_API_KEY": " from-environment\n"}
    assert api_key(path, environment) == "from-file"
    assert api_key(None, environment) == "from-environment"
    assert api_key(None, {}) is None
    assert api_key(None, {"LOCKSTEP_API_KEY": " "}) is None


@pytest.mark.parametrize("content", ["", "\n", "two words", "a\nb", "schlüssel", "a\x00b"])
def test_what_is_no_key_is_refused_without_being_shown(tmp_path: Path, content: str) -> None:
    path = tmp_path / "key"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        api_key(path, {})
    assert not content.strip() or content not in str(caught.value)
    lockstep("status", "--api-key-file", str(path), code=2)


def test_a_missing_file_or_half_a_certificate_is_a_wrong_option(tmp_path: Path) -> None:
    for option in ("--api-key-file", "--tls-ca", "--tls-cert", "--tls-key"):
        assert option in lockstep("status", option, str(tmp_path / "none"), code=2)
    (tmp_path / "half").touch()
    for option in ("--tls-cert", "--tls-key"):
        said = lockstep("generate", "x", option, str(tmp_path / "half"), code=2)
        assert "cert: a client certificate and its key belong together" in said
