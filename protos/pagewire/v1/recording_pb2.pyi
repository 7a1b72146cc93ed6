from protos.pagewire.v1 import worker_pb2 as _worker_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SegmentHeader(_message.Message):
    __slots__ = ("pagewire_version", "deployment", "model", "replica_id", "recording_id", "segment", "started_at_ms", "hello", "welcome", "version", "num_rows", "num_plans")
    PAGEWIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    RECORDING_ID_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_MS_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_PLANS_FIELD_NUMBER: _ClassVar[int]
    pagewire_version: str
    deployment: str
    model: str
    replica_id: str
    recording_id: bytes
    segment: int
    started_at_ms: int
    hello: _worker_pb2.Hello
    welcome: _worker_pb2.Welcome
    version: int
    num_rows: int
    num_plans: int
    def __init__(self, pagewire_version: _Optional[str] = ..., deployment: _Optional[str] = ..., model: _Optional[str] = ..., replica_id: _Optional[str] = ..., recording_id: _Optional[bytes] = ..., segment: _Optional[int] = ..., started_at_ms: _Optional[int] = ..., hello: _Optional[_Union[_worker_pb2.Hello, _Mapping]] = ..., welcome: _Optional[_Union[_worker_pb2.Welcome, _Mapping]] = ..., version: _Optional[int] = ..., num_rows: _Optional[int] = ..., num_plans: _Optional[int] = ...) -> None: ...

class Record(_message.Message):
    __slots__ = ("offset_us", "sent", "received", "stream_ended", "row", "recording_ended")
    OFFSET_US_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    STREAM_ENDED_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    RECORDING_ENDED_FIELD_NUMBER: _ClassVar[int]
    offset_us: int
    sent: _worker_pb2.ControlMessage
    received: _worker_pb2.WorkerMessage
    stream_ended: StreamEnded
    row: RecordedRow
    recording_ended: RecordingEnded
    def __init__(self, offset_us: _Optional[int] = ..., sent: _Optional[_Union[_worker_pb2.ControlMessage, _Mapping]] = ..., received: _Optional[_Union[_worker_pb2.WorkerMessage, _Mapping]] = ..., stream_ended: _Optional[_Union[StreamEnded, _Mapping]] = ..., row: _Optional[_Union[RecordedRow, _Mapping]] = ..., recording_ended: _Optional[_Union[RecordingEnded, _Mapping]] = ...) -> None: ...

class StreamEnded(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class RecordedRow(_message.Message):
    __slots__ = ("added", "num_known_tokens", "num_computed_tokens", "paused", "finish_reason")
    ADDED_FIELD_NUMBER: _ClassVar[int]
    NUM_KNOWN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    added: _worker_pb2.AddedRow
    num_known_tokens: int
    num_computed_tokens: int
    paused: bool
    finish_reason: int
    def __init__(self, added: _Optional[_Union[_worker_pb2.AddedRow, _Mapping]] = ..., num_known_tokens: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., paused: bool = ..., finish_reason: _Optional[int] = ...) -> None: ...

class RecordingEnded(_message.Message):
    __slots__ = ("num_missing",)
    NUM_MISSING_FIELD_NUMBER: _ClassVar[int]
    num_missing: int
    def __init__(self, num_missing: _Optional[int] = ...) -> None: ...
