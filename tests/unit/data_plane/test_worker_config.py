"""Flags of pagewire-worker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tls_helpers import make_pki

from data_plane.config import WorkerConfig, parse_args, parse_size, read_token


def test_defaults_need_nothing_but_a_model(tmp_path: Path) -> None:
    config = parse_args(["--model", str(tmp_path)])
    assert config.control_plane == "127.0.0.1:50052"
    assert config.device == "auto"
    assert config.block_size == 16
    assert config.num_blocks is None
    assert config.replica_id == config.worker_id
    assert config.threads >= 1
    assert config.load_format == "auto"
    assert not config.enforce_eager


def test_debugging_flags_are_read(tmp_path: Path) -> None:
    config = parse_args(["--model", str(tmp_path), "--load-format", "dummy", "--enforce-eager"])
    assert config.load_format == "dummy"
    assert config.enforce_eager


def test_every_process_gets_another_worker_id(tmp_path: Path) -> None:
    arguments = ["--model", str(tmp_path)]
    assert parse_args(arguments).worker_id != parse_args(arguments).worker_id


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1000", 1000),
        ("512MiB", 512 << 20),
        ("2G", 2 << 30),
        ("1.5 gib", 3 << 29),
        ("16kb", 16 << 10),
        ("1T", 1 << 40),
    ],
)
def test_sizes_are_read_with_units(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 PiB", "2GG", "1e9"])
def test_malformed_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--kv-cache-memory must be"):
        parse_size(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "no/such/dir"], "--model no/such/dir is not a directory"),
        (["--model", "nosuchdir"], "--model nosuchdir is not a directory"),
        (["--control-plane", "localhost"], "--control-plane must be HOST:PORT"),
        (["--control-plane", "host:99999"], "--control-plane must be HOST:PORT"),
        (["--worker-id", "a b"], "--worker-id must be 1 to 128"),
        (["--replica-id", "x" * 129], "--replica-id must be 1 to 128"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["--load-format", "pickle"], "invalid choice: 'pickle'"),
        (["--block-size", "12"], "--block-size must be a power of two, got 12"),
        (["--num-blocks", "1"], "--num-blocks must be at least 2, got 1"),
        (["--kv-cache-memory", "0"], "--kv-cache-memory must be at least 1, got 0"),
        (["--max-num-seqs", "0"], "--max-num-seqs must be at least 1, got 0"),
        (["--max-model-len", "1"], "--max-model-len must be at least 2, got 1"),
        (["--threads", "0"], "--threads must be at least 1, got 0"),
        (["--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization must be in (0, 1]"),
        (["--grace-s", "-1"], "--grace-s must be in [0, 604800], got -1.0"),
        (["--grace-s", "nan"], "--grace-s must be in [0, 604800]"),
        (
            ["--max-num-seqs", "8", "--max-num-batched-tokens", "4"],
            "--max-num-batched-tokens (4) must be at least --max-num-seqs (8)",
        ),
    ],
)
def test_mistake_is_named_with_its_flag(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        parse_args(["--model", str(tmp_path), *arguments])
    assert exited.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tls-ca", "no.pem"], "--tls-ca: cannot read no.pem"),
        (["--tls-ca", "client.key"], "--tls-ca: client.key holds no certificate"),
        (["--tls-cert", "client.pem"], "--tls-cert needs --tls-ca"),
        (["--tls-ca", "ca.pem", "--tls-cert", "client.pem"], "--tls-cert needs --tls-key"),
        (
            ["--tls-ca", "ca.pem", "--tls-cert", "client.pem", "--tls-key", "server.key"],
            "--tls-key: the key in server.key is not the one of the certificate in client.pem",
        ),
        (["--token-file", "no.token"], "--token-file: cannot read no.token"),
        (["--token-file", "empty"], "--token-file: empty holds no token"),
        (["--token-file", "words"], "--token-file: the first line of words is not one word"),
    ],
)
def test_mistake_about_security_is_named_with_its_flag(
    flags: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(make_pki(tmp_path / "pki").path)
    Path("empty").write_text("# nothing\n")
    Path("words").write_text("a secret\n")
    with pytest.raises(SystemExit):
        parse_args(["--model", str(tmp_path), *flags])
    printed = capsys.readouterr().err
    assert message in printed
    assert "secret" not in printed


def test_certificates_and_token_are_read(tmp_path: Path) -> None:
    pki = make_pki(tmp_path / "pki")
    token = tmp_path / "token"
    token.write_text("# of this deployment\n\n  the-token\nthe-old-one\n")
    config = parse_args(
        [
            "--model", str(tmp_path), "--token-file", str(token), "--tls-ca", str(pki.ca),
            "--tls-cert", str(pki.path / "client.pem"), "--tls-key", str(pki.path / "client.key"),
        ]
    )  # fmt: skip
    assert config.tls is not None
    assert config.tls.read().key == (pki.path / "client.key").read_bytes()
    assert config.token_file is not None
    assert read_token(config.token_file) == "the-token"


def test_configuration_cannot_be_changed(tmp_path: Path) -> None:
    config = WorkerConfig(model=tmp_path, worker_id="w0", replica_id="r0")
    with pytest.raises(AttributeError):
        config.threads = 2  # type: ignore[misc]


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys\n"
        "from data_plane.__main__ import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit:\n    pass\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "--control-plane HOST:PORT" in done.stdout
