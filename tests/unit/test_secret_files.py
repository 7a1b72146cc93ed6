"""What may be read as a key or token, and what is never waited for."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from protos.secret_files import mode_if_open_to_all, read_secret

if TYPE_CHECKING:
    from pathlib import Path


def refusal(path: Path | str) -> str:
    with pytest.raises(ValueError, match="--the-flag: ") as error:
        read_secret(path, "--the-flag")
    return str(error.value)


def test_a_file_is_read_also_through_links(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(b"secret\n")
    link.symlink_to(path)
    assert read_secret(link, "--the-flag") == b"secret\n"


def test_what_is_missing_or_a_directory_is_told(tmp_path: Path) -> None:
    assert "No such file or directory" in refusal(tmp_path / "nothing")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    assert "No such file or directory" in refusal(tmp_path / "link")
    assert "is not a regular file" in refusal(tmp_path)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "is not a regular file" in refusal(tmp_path / "pipe")


def test_what_never_ends_is_refused(tmp_path: Path) -> None:
    assert "is not a regular file" in refusal("/dev/zero")
    path = tmp_path / "huge"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert "has more than 4194304 bytes" in refusal(path)


def test_the_mode_of_a_file_that_everybody_reads_is_given(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.touch()
    for mode, shown in ((0o600, None), (0o640, None), (0o644, "0644"), (0o604, "0604")):
        path.chmod(mode)
        assert mode_if_open_to_all(path) == shown
    assert mode_if_open_to_all(tmp_path / "nothing") is None
