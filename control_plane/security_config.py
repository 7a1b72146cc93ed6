"""Who may talk to the two ports: flags and their files.

Owns: the flags about certificates and tokens, and which of them make sense together. Does not know:
handshakes, calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from control_plane.tokens import ClientTokens, WorkerTokens
from protos.secret_files import read_secret
from protos.tls_files import TlsFiles, TlsFlags

if TYPE_CHECKING:
    import argparse

PUBLIC_FLAGS = TlsFlags(ca="--tls-client-ca", cert="--tls-cert", key="--tls-key")
WORKER_FLAGS = TlsFlags(
    ca="--worker-tls-client-ca", cert="--worker-tls-cert", key="--worker-tls-key"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityConfig:
    """Everything the process is told about who may talk to it. The default trusts everybody.

    Attributes:
        tls: Of the public port; None: plain text. Its `ca` makes clients show a certificate.
        worker_tls: Of the worker port, likewise.
        auth_tokens_file: Lines of principal and token; None: everybody may call.
        worker_token_file: A token per line; None: everybody may attach.
        enforce_cache_salt: Principals never share cached prefixes.
        max_priority: Highest that a request may ask for; None: any.
    """

    tls: TlsFiles | None = None
    worker_tls: TlsFiles | None = None
    auth_tokens_file: Path | None = None
    worker_token_file: Path | None = None
    enforce_cache_salt: bool = False
    max_priority: int | None = None

    def __post_init__(self) -> None:
        for tls in (self.tls, self.worker_tls):
            if tls is not None and tls.cert is None:
                raise ValueError(
                    f"{tls.flags.key if tls.key else tls.flags.ca} needs {tls.flags.cert}: without "
                    "a certificate of its own the port speaks plain text"
                )
        if self.enforce_cache_salt and self.auth_tokens_file is None:
            raise ValueError(
                "--enforce-cache-salt needs --auth-tokens-file: salts are derived from whom a "
                "token belongs to"
            )

    @property
    def has_files(self) -> bool:
        """Whether there is anything to read again."""
        files = (self.tls, self.worker_tls, self.auth_tokens_file, self.worker_token_file)
        return any(file is not None for file in files)

    def check_files(self) -> None:
        """Read every file once, to fail before anything slow is started.

        Raises:
            ValueError: One of them is wrong; the message names its flag.
        """
        for tls in (self.tls, self.worker_tls):
            if tls is not None:
                tls.read()
        if self.auth_tokens_file is not None:
            ClientTokens(self.auth_tokens_file)
        if self.worker_token_file is not None:
            WorkerTokens(self.worker_token_file)


def add_security_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `read_security_flags` reads."""
    group = parser.add_argument_group(
        "security",
        "Everything is open unless told otherwise. Keys and tokens come from files, which are\n"
        "read again once they have changed, or at once on SIGHUP.",
    )
    for flag, metavar, what in (
        ("--tls-cert", "PEM", "certificate of the public port, with those up to the root"),
        ("--tls-key", "PEM", "its private key"),
        ("--tls-client-ca", "PEM", "clients must show a certificate that one in here signed"),
        ("--worker-tls-cert", "PEM", "certificate of the worker port (default: --tls-cert)"),
        ("--worker-tls-key", "PEM", "its private key (default: --tls-key)"),
        (
            "--worker-tls-client-ca",
            "PEM",
            "workers must show a certificate that one in here signed (default: --tls-client-ca, "
            "unless the worker port has a certificate of its own)",
        ),
        (
            "--auth-tokens-file",
            "FILE",
            "public calls must bring a token of this file, as authorization: Bearer TOKEN; lines "
            "of PRINCIPAL TOKEN",
        ),
        (
            "--worker-token-file",
            "FILE",
            "workers must bring a token of this file, one per line",
        ),
    ):
        group.add_argument(flag, type=Path, metavar=metavar, help=what)
    group.add_argument(
        "--enforce-cache-salt",
        action="store_true",
        help="principals never share cached prefixes, whatever cache_salt their requests carry",
    )
    group.add_argument(
        "--max-priority",
        type=int,
        metavar="N",
        help="highest priority that a request may ask for: those above the default of 0 are served "
        "before everybody else's (default: any; 0 with --auth-tokens-file)",
    )
    group.add_argument(
        "--redis-password-file",
        type=Path,
        metavar="FILE",
        help="its first line is the password of --redis-url, which a list of processes would show",
    )


def read_security_flags(args: argparse.Namespace) -> SecurityConfig:
    """What was given, with the files checked.

    Raises:
        ValueError: Flags do not fit together or a file is wrong.
    """
    public = _tls(args.tls_client_ca, args.tls_cert, args.tls_key, PUBLIC_FLAGS)
    ca, cert, key = args.worker_tls_client_ca, args.worker_tls_cert, args.worker_tls_key
    if public is not None and cert is None and key is None:
        # Never less strict than the public port, unless it has a certificate of its own.
        flags = TlsFlags(
            ca=PUBLIC_FLAGS.ca if ca is None else WORKER_FLAGS.ca,
            cert=PUBLIC_FLAGS.cert,
            key=PUBLIC_FLAGS.key,
        )
        worker = _tls(public.ca if ca is None else ca, public.cert, public.key, flags)
    else:
        worker = _tls(ca, cert, key, WORKER_FLAGS)
    config = SecurityConfig(
        tls=public,
        worker_tls=worker,
        auth_tokens_file=args.auth_tokens_file,
        worker_token_file=args.worker_token_file,
        enforce_cache_salt=args.enforce_cache_salt,
        max_priority=_max_priority(args),
    )
    config.check_files()
    return config


def with_password(url: str, path: Path | None) -> str:
    """A store's URL with the password of a file.

    Raises:
        ValueError: The file is wrong, or the URL has one already; neither is quoted.
    """
    if path is None:
        return url
    flag = "--redis-password-file"
    try:
        password = read_secret(path, flag).decode().split("\n", 1)[0].strip("\r")
    except UnicodeDecodeError:
        raise ValueError(f"{flag}: {path} is not UTF-8") from None
    if not password:
        raise ValueError(f"{flag}: {path} has an empty first line")
    scheme, separator, rest = url.partition("://")
    user, at, host = rest.rpartition("@")
    if not separator or not host or scheme.lower() == "memory" or ":" in user:
        raise ValueError(f"{flag} needs a --redis-url of a server, without a password of its own")
    return f"{scheme}://{user if at else ''}:{quote(password, safe='')}@{host}"


def _max_priority(args: argparse.Namespace) -> int | None:
    if args.max_priority is None and args.auth_tokens_file is not None:
        return 0
    return args.max_priority


def _tls(
    ca: Path | str | None, cert: Path | str | None, key: Path | str | None, flags: TlsFlags
) -> TlsFiles | None:
    if ca is None and cert is None and key is None:
        return None
    return TlsFiles(ca=ca, cert=cert, key=key, flags=flags)
