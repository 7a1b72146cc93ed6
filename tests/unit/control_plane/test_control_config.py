"""Flags of the control plane."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
from tls_helpers import make_pki

from control_plane import __main__ as control_main
from control_plane.config import parse_args
from control_plane.prefix_store import parse_store_url

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def two_models(tmp_path: Path) -> tuple[str, str]:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    return str(tmp_path / "one"), str(tmp_path / "two")


def test_a_model_is_called_like_its_directory(two_models: tuple[str, str]) -> None:
    config = parse_args(["--model", two_models[0], "--model", two_models[1] + "/"])
    assert [model.name for model in config.models] == ["one", "two"]
    assert (config.host, config.port, config.worker_port) == ("127.0.0.1", 50051, 50052)


def test_names_belong_to_models_in_order(two_models: tuple[str, str]) -> None:
    first, second = two_models
    config = parse_args(
        [
            "--model", first, "--served-model-name", "a",
            "--model", second, "--served-model-name", "b",
        ]
    )  # fmt: skip
    assert [model.name for model in config.models] == ["a", "b"]


def test_flags_reach_the_part_that_needs_them(two_models: tuple[str, str]) -> None:
    config = parse_args(
        [
            "--model", two_models[0], "--lookahead", "0", "--no-prefix-caching",
            "--max-queued-requests", "7", "--grace-s", "3", "--shard", "s",
        ]
    )  # fmt: skip
    assert config.cluster.lookahead == 0
    assert not config.cluster.prefix_caching
    assert config.cluster.max_queued_requests == 7
    assert config.cluster.shard == "s"
    assert config.grace_s == 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--model"),
        (["--model", "/nowhere"], "--model /nowhere is not a directory"),
        (["--port", "70000"], "--port must be in [0, 65535], got 70000"),
        (["--lookahead", "99"], "lookahead must be in [0, 64], got 99"),
        (["--grace-s", "-1"], "--grace-s must not be negative"),
        (["--served-model-name", "a", "--served-model-name", "b"], "1 --model and 2"),
    ],
)
def test_a_mistake_is_explained(
    flags: list[str],
    message: str,
    two_models: tuple[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = flags if not flags or "--model" in flags else ["--model", two_models[0], *flags]
    with pytest.raises(SystemExit) as error:
        parse_args(argv)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_the_worker_port_takes_after_the_public_one(
    two_models: tuple[str, str], tmp_path: Path
) -> None:
    pki = make_pki(tmp_path / "pki")
    other = make_pki(tmp_path / "other")
    model = ["--model", two_models[0]]
    public = ["--tls-cert", str(pki.path / "server.pem"), "--tls-key", str(pki.path / "server.key")]
    mutual = [*public, "--tls-client-ca", str(pki.ca)]
    own = [
        "--worker-tls-cert", str(other.path / "server.pem"),
        "--worker-tls-key", str(other.path / "server.key"),
    ]  # fmt: skip

    def worker_port(*flags: str) -> tuple[object, object]:
        tls = parse_args([*model, *flags]).security.worker_tls
        return (tls.cert, tls.ca) if tls else (None, None)

    assert worker_port() == (None, None)
    assert worker_port(*public) == (pki.path / "server.pem", None)
    assert worker_port(*mutual) == (pki.path / "server.pem", pki.ca)
    assert worker_port(*mutual, *own) == (other.path / "server.pem", None)
    ca = ("--worker-tls-client-ca", str(other.ca))
    assert worker_port(*mutual, *ca) == (pki.path / "server.pem", other.ca)
    assert worker_port(*own, *ca) == (other.path / "server.pem", other.ca)
    assert parse_args([*model, *own]).security.tls is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tls-cert", "server.pem"], "--tls-cert needs --tls-key"),
        (["--tls-key", "server.key"], "--tls-key needs --tls-cert"),
        (["--tls-client-ca", "ca.pem"], "--tls-client-ca needs --tls-cert"),
        (["--worker-tls-client-ca", "ca.pem"], "--worker-tls-client-ca needs --worker-tls-cert"),
        (["--worker-tls-cert", "server.pem"], "--worker-tls-cert needs --worker-tls-key"),
        (["--tls-cert", "no.pem", "--tls-key", "server.key"], "--tls-cert: cannot read no.pem"),
        (["--tls-cert", "server.pem", "--tls-key", "client.key"], "--tls-key: the key in client"),
        (
            ["--worker-tls-cert", "server.pem", "--worker-tls-key", "client.key"],
            "--worker-tls-key: the key in client.key is not the one of the certificate in",
        ),
        (["--auth-tokens-file", "none"], "--auth-tokens-file: cannot read none"),
        (["--worker-token-file", "ca.pem"], "--worker-token-file: ca.pem line 1"),
        (["--enforce-cache-salt"], "--enforce-cache-salt needs --auth-tokens-file"),
    ],
)
def test_a_mistake_about_security_is_explained(
    flags: list[str],
    message: str,
    two_models: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(make_pki(tmp_path / "pki").path)
    with pytest.raises(SystemExit) as error:
        parse_args(["--model", two_models[0], *flags])
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_a_password_of_the_store_comes_from_a_file(
    two_models: tuple[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "password"
    path.write_text("p@ss:w/rd\n")

    def url(given: str) -> str:
        flags = ["--redis-url", given, "--redis-password-file", str(path)]
        return parse_args(["--model", two_models[0], *flags]).redis_url

    for given, user in (("redis://h:1/2", None), ("rediss://me@h:1/2", "me")):
        address = parse_store_url(url(given))
        assert address is not None
        assert (address.username or None, address.password) == (user, "p@ss:w/rd")
        assert (address.host, address.port, address.db) == ("h", 1, 2)
        assert "p@ss" not in str(address)
    assert url("REDIS://[::1]:1") == "REDIS://:p%40ss%3Aw%2Frd@[::1]:1"


@pytest.mark.parametrize("url", ["memory://", "redis://me:other@h:1", "h:1", "redis://"])
def test_a_password_without_a_store_for_it_is_a_mistake(
    url: str, two_models: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "password"
    path.write_text("p@ssword")
    flags = ["--redis-url", url, "--redis-password-file", str(path)]
    with pytest.raises(SystemExit):
        parse_args(["--model", two_models[0], *flags])
    text = capsys.readouterr().err
    assert "--redis-password-file needs a --redis-url of a server" in text
    assert "p@ssword" not in text
    assert "other" not in text


def test_principals_may_not_raise_their_priority_unless_told(
    two_models: tuple[str, str], tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("alice alice-0123456789abcdef\n")
    guarded = ["--model", two_models[0], "--auth-tokens-file", str(tokens)]
    assert parse_args(["--model", two_models[0]]).security.max_priority is None
    assert parse_args(guarded).security.max_priority == 0
    assert parse_args([*guarded, "--max-priority", "7"]).security.max_priority == 7


def test_a_line_of_the_log_stays_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    handlers, level = logging.root.handlers[:], logging.root.level
    logging.root.handlers.clear()
    try:
        control_main._set_up_logging("info")
        logging.getLogger("x").info("device=%s", "a\n2026-01-01 ERROR forged\x1b[2J")
    finally:
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith("INFO x device=a\\x0a2026-01-01 ERROR forged\\x1b[2J")


def test_help_explains_how_to_begin(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        parse_args(["--help"])
    assert error.value.code == 0
    assert "pagewire-worker --model" in capsys.readouterr().out
