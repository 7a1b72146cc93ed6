"""Files of certificates that go away while they are read, as they do when somebody renews them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
from tls_helpers import Pki, make_pki

from control_plane.port_security import Certificates
from protos import tls_files

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return make_pki(tmp_path)


@pytest.fixture
def key_that_goes_away(pki: Pki, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Gone once it was read, and before it is checked."""
    key = pki.path / "server.key"
    check = tls_files._check_certificates

    def check_and_remove(contents: bytes, path: Path | str, flag: str) -> None:
        check(contents, path, flag)
        key.unlink(missing_ok=True)

    monkeypatch.setattr(tls_files, "_check_certificates", check_and_remove)
    return key


def test_a_key_that_goes_away_while_it_is_checked_is_a_file_that_is_wrong(
    pki: Pki, key_that_goes_away: Path
) -> None:
    with pytest.raises(ValueError, match=f"{key_that_goes_away} is just being replaced"):
        pki.files("server").read()


def test_a_key_that_goes_away_while_it_is_read_again_changes_nothing(
    pki: Pki, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    certificates = Certificates(pki.files("server"))
    request.getfixturevalue("key_that_goes_away")
    with caplog.at_level(logging.ERROR):
        certificates.reread()
    assert "certificates not read again" in caplog.text
