"""Certificates and keys that are not what they should be, and what is said about them."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

import pytest
from tls_helpers import Pki, make_pki

from protos import tls_files
from protos.tls_files import TlsFiles, TlsFlags

if TYPE_CHECKING:
    from pathlib import Path

FLAGS = TlsFlags(ca="--the-ca", cert="--the-cert", key="--the-key")


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return make_pki(tmp_path_factory.mktemp("pki"))


def refusal(**files: Path | str | None) -> str:
    with pytest.raises(ValueError, match="--the-") as error:
        TlsFiles(flags=FLAGS, **files).read()
    return str(error.value)


def test_good_files_are_read(pki: Pki) -> None:
    contents = pki.files("server", ca=pki.ca).read()
    assert contents.ca == pki.ca.read_bytes()
    assert contents.cert == (pki.path / "server.pem").read_bytes()
    assert contents.key == (pki.path / "server.key").read_bytes()
    assert "PRIVATE" not in repr(contents)


def test_a_certificate_needs_its_key_and_a_key_its_certificate(pki: Pki) -> None:
    assert refusal(cert=pki.path / "server.pem").startswith("--the-cert needs --the-key")
    assert refusal(key=pki.path / "server.key").startswith("--the-key needs --the-cert")


@pytest.mark.parametrize("part", ["ca", "cert", "key"])
def test_a_missing_file_is_named_with_its_flag(part: str, pki: Pki) -> None:
    good = pki.files("server", ca=pki.ca)
    bad = dataclasses.replace(good, flags=FLAGS, **{part: pki.path / "nothing"})
    message = f"--the-{part}: cannot read {pki.path / 'nothing'}: No such file or directory"
    with pytest.raises(ValueError, match=re.escape(message)):
        bad.read()


def test_a_key_of_another_certificate_is_told(pki: Pki) -> None:
    message = refusal(cert=pki.path / "server.pem", key=pki.path / "client.key")
    assert message == (
        f"--the-key: the key in {pki.path / 'client.key'} is not the one of the certificate in "
        f"{pki.path / 'server.pem'} (--the-cert)"
    )


def test_files_that_hold_something_else_are_told(pki: Pki, tmp_path: Path) -> None:
    empty, binary = tmp_path / "empty", tmp_path / "binary"
    empty.write_bytes(b"")
    binary.write_bytes(b"\x30\x82\xff")
    cert, key = pki.path / "server.pem", pki.path / "server.key"
    for path in (empty, binary, key):
        assert f"--the-ca: {path} holds no certificate" in refusal(ca=path)
        assert f"--the-cert: {path} holds no certificate" in refusal(cert=path, key=key)
    for path in (empty, binary, cert):
        assert f"--the-key: {path} holds no private key" in refusal(cert=cert, key=path)


def test_a_key_with_a_password_is_told_instead_of_asked_for(pki: Pki, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----\n")
    assert "protected by a password" in refusal(cert=pki.path / "server.pem", key=key)


def test_a_bundle_may_name_authorities_in_any_language(pki: Pki, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle.pem"
    bundle.write_bytes("# Főtanúsítvány\n".encode() + pki.ca.read_bytes())
    assert TlsFiles(ca=bundle, flags=FLAGS).read().ca == bundle.read_bytes()


def test_a_key_that_is_replaced_between_check_and_use_is_told(
    pki: Pki, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "cert.key"
    cert.write_bytes((pki.path / "server.pem").read_bytes())
    key.write_bytes((pki.path / "server.key").read_bytes())
    check = tls_files._check_pair

    def replaced_meanwhile(*args: Any) -> None:
        check(*args)
        key.write_bytes((pki.path / "client.key").read_bytes())

    monkeypatch.setattr(tls_files, "_check_pair", replaced_meanwhile)
    assert "is just being replaced" in refusal(cert=cert, key=key)
