"""Certificates of a throw-away CA, as files."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trustme

from protos.tls_files import TlsFiles

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Pki:
    """One CA, a server's certificate for 127.0.0.1 and a client's, all below `path`."""

    path: Path

    @property
    def ca(self) -> Path:
        return self.path / "ca.pem"

    def files(self, name: str, *, ca: Path | None = None) -> TlsFiles:
        """Certificate and key of "server" or "client"."""
        return TlsFiles(ca=ca, cert=self.path / f"{name}.pem", key=self.path / f"{name}.key")

    def client(self, *, with_certificate: bool = False) -> TlsFiles:
        """What a client of this CA's server is told."""
        return self.files("client", ca=self.ca) if with_certificate else TlsFiles(ca=self.ca)


def make_pki(path: Path) -> Pki:
    """Write ca.pem, server.pem, server.key, client.pem and client.key."""
    path.mkdir(exist_ok=True)
    ca = trustme.CA()
    ca.cert_pem.write_to_path(path / "ca.pem")
    for name, identity in (("server", "127.0.0.1"), ("client", "somebody@example.org")):
        cert = ca.issue_cert(identity)
        (path / f"{name}.pem").write_bytes(b"".join(c.bytes() for c in cert.cert_chain_pems))
        cert.private_key_pem.write_to_path(path / f"{name}.key")
    return Pki(path)


def make_openssl_pki(path: Path) -> Pki:
    """The same files by the openssl command, as people make them; replaces those that are there."""
    path.mkdir(exist_ok=True)

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=path, check=True, capture_output=True)

    new_key = ("-newkey", "rsa:2048", "-nodes")
    ca = ("-keyout", "ca.key", "-out", "ca.pem", "-days", "2")
    openssl("req", "-x509", *new_key, "-subj", "/CN=a CA of the tests", *ca)
    (path / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
    for name in ("server", "client"):
        key, csr, cert = f"{name}.key", f"{name}.csr", f"{name}.pem"
        openssl("req", *new_key, "-subj", f"/CN={name}", "-keyout", key, "-out", csr)
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2")
        openssl("x509", "-req", "-in", csr, *signed, "-extfile", "names", "-out", cert)
    return Pki(path)
