"""The Python client without a server: messages, errors, the log that a resume starts from."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from pagewire_client import (
    CancelledError,
    Client,
    GenerationLog,
    InvalidRequestError,
    OverloadedError,
    SlowClientError,
    UnavailableError,
    build_request,
)
from pagewire_client.cli import main
from pagewire_client.errors import from_status

from protos.pagewire.v1 import inference_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[3]
# Nothing listens on the discard port of a test machine.
NOBODY = "127.0.0.1:9"


def test_a_text_ids_and_messages_are_told_apart() -> None:
    assert build_request("x", {}).WhichOneof("prompt") == "text"
    assert list(build_request([1, 2], {}).token_ids.ids) == [1, 2]
    assert build_request([], {}).WhichOneof("prompt") == "token_ids"
    chat = build_request([{"role": "user", "content": "x"}], {"add_generation_prompt": False}).chat
    assert chat.messages[0].role == "user"
    assert chat.HasField("add_generation_prompt")


def test_options_reach_their_fields() -> None:
    request = build_request(
        "x",
        {"max_tokens": 3, "stop": "END", "seed": 2**64 - 1, "model": "m", "flush_interval_s": 0.25},
    )
    assert (request.sampling.max_tokens, list(request.sampling.stop)) == (3, ["END"])
    assert (request.sampling.seed, request.model) == (2**64 - 1, "m")
    assert request.flush_interval.ToMilliseconds() == 250
    assert not request.sampling.HasField("temperature")


def test_an_unknown_option_is_a_type_error() -> None:
    options: Any = {"max_token": 3}
    with pytest.raises(TypeError, match="max_token"):
        build_request("x", options)


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ("\ud800", {}),
        ([{"role": "user", "content": "\udfff"}], {}),
        ([2**40], {}),
        ("x", {"stop": ["\ud800"]}),
        ("x", {"seed": -1}),
        ([{"role": "user", "speaker": "x"}], {}),
    ],
)
def test_what_no_message_can_carry_is_an_invalid_request(prompt: Any, options: Any) -> None:
    with pytest.raises(InvalidRequestError) as error:
        build_request(prompt, options)
    assert error.value.reason == "INVALID_REQUEST"


def packed(*details: Any) -> list[any_pb2.Any]:
    result = []
    for detail in details:
        message = any_pb2.Any()
        message.Pack(detail)
        result.append(message)
    return result


def test_an_error_carries_reason_values_and_time_to_retry() -> None:
    info = error_details_pb2.ErrorInfo(reason="OVERLOADED", metadata={"limit": "5"})
    retry = error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(nanos=500_000_000))
    status = status_pb2.Status(code=8, message="full", details=packed(info, retry))
    error = from_status(status)
    assert isinstance(error, OverloadedError)
    assert (error.reason, error.metadata, error.retry_after_s) == (
        "OVERLOADED",
        {"limit": "5"},
        0.5,
    )
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_reason_can_be_finer_than_its_code() -> None:
    info = error_details_pb2.ErrorInfo(reason="SLOW_CLIENT")
    error = from_status(status_pb2.Status(code=8, details=packed(info)))
    assert isinstance(error, SlowClientError)


def test_a_log_makes_the_request_that_continues() -> None:
    log = GenerationLog(build_request("x", {"max_tokens": 9, "stop": ["END"]}))
    log.add(pb.GenerateResponse(request_id="r", seed=7))
    log.add(pb.GenerateResponse(outputs=[pb.SequenceOutput(text="a", token_ids=[1, 2])]))
    log.add(pb.GenerateResponse(outputs=[pb.SequenceOutput(text="b", token_ids=[3])]))
    request = log.resume_request()
    assert (request.request_id, request.sampling.seed, request.text) == ("r", 7, "x")
    assert (request.sampling.max_tokens, list(request.sampling.stop)) == (9, ["END"])
    assert [list(entry.token_ids) for entry in request.resume] == [[1, 2, 3]]
    assert not log.request.resume
    last = pb.SequenceOutput(finish_reason=pb.FINISH_REASON_STOP, stop_string="END")
    log.add(pb.GenerateResponse(outputs=[last], usage=pb.Usage(completion_tokens=3)))
    assert log.resume_request().resume[0].finish_reason == pb.FINISH_REASON_STOP
    completion = log.completion()
    assert (completion.text, completion.finish_reason) == ("ab", "stop")
    assert completion.outputs[0].stop_string == "END"


def test_a_server_that_is_not_there_is_unavailable() -> None:
    with Client(NOBODY) as client, pytest.raises(UnavailableError) as error:
        client.models(timeout_s=20)
    assert f"Nothing answers at {NOBODY}" in error.value.message


@pytest.mark.parametrize("command", [["generate", "x"], ["chat", "x"], ["models"], ["status"]])
def test_the_command_says_so_without_a_traceback(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--server", NOBODY]) == 1
    errors = capsys.readouterr().err
    assert errors.startswith(f"pagewire: Nothing answers at {NOBODY}")
    assert "Traceback" not in errors


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(["--help"])
    assert error.value.code == 0
    text = capsys.readouterr().out
    assert all(command in text for command in ("generate", "chat", "models", "status"))


def test_the_client_imports_protos_and_grpc_only() -> None:
    code = (
        "import sys; import pagewire_client.cli; "
        "print([m for m in ('torch', 'transformers', 'numpy', 'control_plane', 'redis', "
        "'data_plane') if m in sys.modules])"
    )
    process = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'clients/python'}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert process.stdout.strip() == "[]"


def test_a_second_resume_carries_what_the_first_one_had() -> None:
    first = GenerationLog(build_request("x", {}))
    first.add(pb.GenerateResponse(outputs=[pb.SequenceOutput(text="a", token_ids=[1, 2])]))
    second = GenerationLog(first.resume_request())
    second.add(pb.GenerateResponse(outputs=[pb.SequenceOutput(text="b", token_ids=[3])]))
    assert [list(entry.token_ids) for entry in second.resume_request().resume] == [[1, 2, 3]]
    # What was resumed may have had nothing left to say.
    assert GenerationLog(first.resume_request()).completion().token_ids == []


@pytest.fixture
def closing_server() -> Iterator[str]:
    """Ends calls as gRPC does with those that reach a server while it closes, but for "wait"."""

    def end(message: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        if b"wait" in message:
            has_ended = threading.Event()
            context.add_callback(has_ended.set)
            has_ended.wait()
        context.abort(grpc.StatusCode.CANCELLED, "CANCELLED")
        yield b""

    handler = grpc.method_handlers_generic_handler(
        "pagewire.v1.InferenceService", {"Generate": grpc.unary_stream_rpc_method_handler(end)}
    )
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool, handlers=[handler])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(None).wait()


def test_a_call_that_a_closing_server_ended_can_be_retried(closing_server: str) -> None:
    with Client(closing_server) as client, pytest.raises(UnavailableError, match="Try again"):
        client.complete("x")


def test_a_call_cancelled_on_this_side_says_so(closing_server: str) -> None:
    with Client(closing_server) as client:
        generation = client.generate("wait")
        generation.cancel()
        with pytest.raises(CancelledError):
            generation.result()
