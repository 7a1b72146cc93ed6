"""Token files: what they may hold, whom a call belongs to, and that nothing shows a token."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from control_plane.errors import UnauthenticatedError
from control_plane.tokens import ClientTokens, WorkerTokens

if TYPE_CHECKING:
    from pathlib import Path

ALICE, BOB = "alice-token-0123456789", "bob-token-0123456789"


def bearer(token: str) -> list[tuple[str, str | bytes]]:
    return [("user-agent", "x"), ("authorization", f"Bearer {token}")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"# who may call\n\nalice {ALICE}\nbob\t{BOB}\nalice {ALICE}-new\n")
    return path


def test_a_token_says_whose_a_call_is(path: Path) -> None:
    tokens = ClientTokens(path)
    assert tokens.check(bearer(ALICE)) == "alice"
    assert tokens.check(bearer(ALICE + "-new")) == "alice"
    assert tokens.check([("authorization", f"bearer  {BOB}")]) == "bob"


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ([], "missing"),
        ([("authorization", ALICE)], "malformed"),
        ([("authorization", f"Basic {ALICE}")], "malformed"),
        ([*bearer(ALICE), *bearer(BOB)], "malformed"),
        (bearer(""), "unknown"),
        (bearer(ALICE[:-1]), "unknown"),
        (bearer(ALICE.upper()), "unknown"),
        (bearer("alice"), "unknown"),
    ],
)
def test_other_metadata_is_refused(
    metadata: list[tuple[str, str | bytes]], problem: str, path: Path
) -> None:
    with pytest.raises(UnauthenticatedError) as error:
        ClientTokens(path).check(metadata)
    assert error.value.metadata == {"problem": problem}
    assert ALICE not in error.value.message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no token"),
        ("# nobody\n", "holds no token"),
        (f"{ALICE}\n", "line 1: expected PRINCIPAL TOKEN, found 1 words"),
        (f"alice {ALICE} x\n", "line 1: expected PRINCIPAL TOKEN, found 3 words"),
        (f"\na/b {ALICE}\n", "line 2: a principal is 1 to 128 of"),
        ("alice short-token\n", "line 1: a token has 16 to 1024 visible ASCII characters, this"),
        (f"alice {ALICE}\nbob {ALICE}\n", "lines 1 and 2 have the same token"),
    ],
)
def test_a_bad_file_is_explained_without_its_tokens(text: str, message: str, path: Path) -> None:
    path.write_text(text)
    with pytest.raises(ValueError, match="--auth-tokens-file: ") as error:
        ClientTokens(path)
    assert message in str(error.value)
    assert ALICE not in str(error.value)
    assert "short-token" not in str(error.value)


def test_a_missing_file_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--worker-token-file: cannot read .*: No such file"):
        WorkerTokens(tmp_path / "nothing")


def test_workers_have_no_names(path: Path) -> None:
    path.write_text(f"{ALICE}\n{BOB}\n")
    tokens = WorkerTokens(path)
    assert tokens.check(bearer(ALICE)) == tokens.check(bearer(BOB))
    path.write_text(f"w0 {ALICE}\n")
    with pytest.raises(ValueError, match="line 1: expected a token, found 2 words"):
        WorkerTokens(path)


def test_reading_again_replaces_every_token(path: Path) -> None:
    tokens = ClientTokens(path)
    path.write_text(f"carol {BOB}\n")
    assert tokens.check(bearer(ALICE)) == "alice"
    tokens.reread()
    assert tokens.check(bearer(BOB)) == "carol"
    with pytest.raises(UnauthenticatedError):
        tokens.check(bearer(ALICE))


def test_a_bad_file_changes_nothing_when_read_again(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = ClientTokens(path)
    path.write_text(f"alice {BOB} {ALICE}\n")
    with caplog.at_level(logging.INFO):
        tokens.reread()
    assert tokens.check(bearer(ALICE)) == "alice"
    assert "line 1: expected PRINCIPAL TOKEN" in caplog.text
    assert ALICE not in caplog.text


def test_tokens_are_not_kept(path: Path) -> None:
    tokens = ClientTokens(path)
    kept = repr(vars(tokens)) + repr(vars(tokens._tokens))
    assert ALICE not in kept
    assert BOB not in kept


def test_a_file_may_begin_with_a_byte_order_mark(path: Path) -> None:
    path.write_bytes(b"\xef\xbb\xbf" + f"alice {ALICE}\n".encode())
    assert ClientTokens(path).check(bearer(ALICE)) == "alice"
