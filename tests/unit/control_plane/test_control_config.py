"""Flags of the control plane."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from control_plane.config import parse_args

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
        (["--lookahead", "99"], "lookahead must be in [0, 7], got 99"),
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


def test_help_explains_how_to_begin(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        parse_args(["--help"])
    assert error.value.code == 0
    assert "pagewire-worker --model" in capsys.readouterr().out
