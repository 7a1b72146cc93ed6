import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.rpc import status_pb2 as _status_pb2
from protos.pagewire.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerMessage(_message.Message):
    __slots__ = ("hello", "step_result", "nack", "ack", "heartbeat", "drain", "generations", "step_failed")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STEP_RESULT_FIELD_NUMBER: _ClassVar[int]
    NACK_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    STEP_FAILED_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    step_result: StepResult
    nack: Nack
    ack: Ack
    heartbeat: Heartbeat
    drain: Drain
    generations: Generations
    step_failed: StepFailed
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., step_result: _Optional[_Union[StepResult, _Mapping]] = ..., nack: _Optional[_Union[Nack, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., generations: _Optional[_Union[Generations, _Mapping]] = ..., step_failed: _Optional[_Union[StepFailed, _Mapping]] = ...) -> None: ...

class ControlMessage(_message.Message):
    __slots__ = ("welcome", "reset", "plan", "heartbeat")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    reset: Reset
    plan: Plan
    heartbeat: Heartbeat
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., reset: _Optional[_Union[Reset, _Mapping]] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "worker_id", "replica_id", "rank", "tp_size", "epoch", "applied_version", "highest_term", "model_fingerprint", "kv_geometry", "num_blocks", "max_num_seqs", "max_model_len", "max_num_batched_tokens", "backend", "device", "software_version", "rendezvous_address")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    APPLIED_VERSION_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_TERM_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    KV_GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    worker_id: str
    replica_id: str
    rank: int
    tp_size: int
    epoch: bytes
    applied_version: int
    highest_term: int
    model_fingerprint: bytes
    kv_geometry: KvGeometry
    num_blocks: int
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    backend: str
    device: str
    software_version: str
    rendezvous_address: str
    def __init__(self, protocol_version: _Optional[int] = ..., worker_id: _Optional[str] = ..., replica_id: _Optional[str] = ..., rank: _Optional[int] = ..., tp_size: _Optional[int] = ..., epoch: _Optional[bytes] = ..., applied_version: _Optional[int] = ..., highest_term: _Optional[int] = ..., model_fingerprint: _Optional[bytes] = ..., kv_geometry: _Optional[_Union[KvGeometry, _Mapping]] = ..., num_blocks: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., backend: _Optional[str] = ..., device: _Optional[str] = ..., software_version: _Optional[str] = ..., rendezvous_address: _Optional[str] = ...) -> None: ...

class KvGeometry(_message.Message):
    __slots__ = ("num_layers", "num_kv_heads", "head_size", "dtype", "block_size")
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: str
    block_size: int
    def __init__(self, num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_size: _Optional[int] = ..., dtype: _Optional[str] = ..., block_size: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("term", "stream_id", "num_blocks", "lookahead", "lease", "rendezvous_address", "send_generations")
    TERM_FIELD_NUMBER: _ClassVar[int]
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOOKAHEAD_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SEND_GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    term: int
    stream_id: str
    num_blocks: int
    lookahead: int
    lease: _duration_pb2.Duration
    rendezvous_address: str
    send_generations: bool
    def __init__(self, term: _Optional[int] = ..., stream_id: _Optional[str] = ..., num_blocks: _Optional[int] = ..., lookahead: _Optional[int] = ..., lease: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., rendezvous_address: _Optional[str] = ..., send_generations: bool = ...) -> None: ...

class Reset(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("base_version", "version", "num_steps", "removed_rows", "added_rows", "forks", "block_copies", "appended_rows", "appended_counts", "appended_block_ids", "chunk_rows", "chunk_num_tokens", "paused_rows", "resumed_rows", "token_masks", "drafts")
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_ROWS_FIELD_NUMBER: _ClassVar[int]
    ADDED_ROWS_FIELD_NUMBER: _ClassVar[int]
    FORKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COPIES_FIELD_NUMBER: _ClassVar[int]
    APPENDED_ROWS_FIELD_NUMBER: _ClassVar[int]
    APPENDED_COUNTS_FIELD_NUMBER: _ClassVar[int]
    APPENDED_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_ROWS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_ROWS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_ROWS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_MASKS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    base_version: int
    version: int
    num_steps: int
    removed_rows: bytes
    added_rows: _containers.RepeatedCompositeFieldContainer[AddedRow]
    forks: _containers.RepeatedCompositeFieldContainer[Fork]
    block_copies: BlockCopies
    appended_rows: bytes
    appended_counts: bytes
    appended_block_ids: bytes
    chunk_rows: bytes
    chunk_num_tokens: bytes
    paused_rows: bytes
    resumed_rows: bytes
    token_masks: TokenMasks
    drafts: Drafts
    def __init__(self, base_version: _Optional[int] = ..., version: _Optional[int] = ..., num_steps: _Optional[int] = ..., removed_rows: _Optional[bytes] = ..., added_rows: _Optional[_Iterable[_Union[AddedRow, _Mapping]]] = ..., forks: _Optional[_Iterable[_Union[Fork, _Mapping]]] = ..., block_copies: _Optional[_Union[BlockCopies, _Mapping]] = ..., appended_rows: _Optional[bytes] = ..., appended_counts: _Optional[bytes] = ..., appended_block_ids: _Optional[bytes] = ..., chunk_rows: _Optional[bytes] = ..., chunk_num_tokens: _Optional[bytes] = ..., paused_rows: _Optional[bytes] = ..., resumed_rows: _Optional[bytes] = ..., token_masks: _Optional[_Union[TokenMasks, _Mapping]] = ..., drafts: _Optional[_Union[Drafts, _Mapping]] = ...) -> None: ...

class AddedRow(_message.Message):
    __slots__ = ("row", "token_ids", "num_prompt_tokens", "sequence_index", "seed", "sampling", "eos_token_ids", "max_total_tokens", "block_ids", "num_hit_blocks", "num_computed_tokens", "adapter_slot")
    ROW_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_INDEX_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_HIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_SLOT_FIELD_NUMBER: _ClassVar[int]
    row: int
    token_ids: bytes
    num_prompt_tokens: int
    sequence_index: int
    seed: int
    sampling: _inference_pb2.SamplingParams
    eos_token_ids: bytes
    max_total_tokens: int
    block_ids: bytes
    num_hit_blocks: int
    num_computed_tokens: int
    adapter_slot: int
    def __init__(self, row: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., num_prompt_tokens: _Optional[int] = ..., sequence_index: _Optional[int] = ..., seed: _Optional[int] = ..., sampling: _Optional[_Union[_inference_pb2.SamplingParams, _Mapping]] = ..., eos_token_ids: _Optional[bytes] = ..., max_total_tokens: _Optional[int] = ..., block_ids: _Optional[bytes] = ..., num_hit_blocks: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., adapter_slot: _Optional[int] = ...) -> None: ...

class Fork(_message.Message):
    __slots__ = ("parent_row", "child_row", "sequence_index", "token")
    PARENT_ROW_FIELD_NUMBER: _ClassVar[int]
    CHILD_ROW_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    parent_row: int
    child_row: int
    sequence_index: int
    token: int
    def __init__(self, parent_row: _Optional[int] = ..., child_row: _Optional[int] = ..., sequence_index: _Optional[int] = ..., token: _Optional[int] = ...) -> None: ...

class BlockCopies(_message.Message):
    __slots__ = ("src", "dst", "row", "index")
    SRC_FIELD_NUMBER: _ClassVar[int]
    DST_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    src: bytes
    dst: bytes
    row: bytes
    index: bytes
    def __init__(self, src: _Optional[bytes] = ..., dst: _Optional[bytes] = ..., row: _Optional[bytes] = ..., index: _Optional[bytes] = ...) -> None: ...

class TokenMasks(_message.Message):
    __slots__ = ("rows", "bits")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    BITS_FIELD_NUMBER: _ClassVar[int]
    rows: bytes
    bits: bytes
    def __init__(self, rows: _Optional[bytes] = ..., bits: _Optional[bytes] = ...) -> None: ...

class Drafts(_message.Message):
    __slots__ = ("rows", "counts", "token_ids")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    rows: bytes
    counts: bytes
    token_ids: bytes
    def __init__(self, rows: _Optional[bytes] = ..., counts: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("version", "step", "counts", "token_ids", "finished_rows", "finish_reasons", "logprobs", "device_time_us", "waited_us")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_ROWS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASONS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_TIME_US_FIELD_NUMBER: _ClassVar[int]
    WAITED_US_FIELD_NUMBER: _ClassVar[int]
    version: int
    step: int
    counts: bytes
    token_ids: bytes
    finished_rows: bytes
    finish_reasons: bytes
    logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenLogprobs]
    device_time_us: int
    waited_us: int
    def __init__(self, version: _Optional[int] = ..., step: _Optional[int] = ..., counts: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., finished_rows: _Optional[bytes] = ..., finish_reasons: _Optional[bytes] = ..., logprobs: _Optional[_Iterable[_Union[_inference_pb2.TokenLogprobs, _Mapping]]] = ..., device_time_us: _Optional[int] = ..., waited_us: _Optional[int] = ...) -> None: ...

class Nack(_message.Message):
    __slots__ = ("version", "status")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    version: int
    status: _status_pb2.Status
    def __init__(self, version: _Optional[int] = ..., status: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Drain(_message.Message):
    __slots__ = ("grace",)
    GRACE_FIELD_NUMBER: _ClassVar[int]
    grace: _duration_pb2.Duration
    def __init__(self, grace: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Generations(_message.Message):
    __slots__ = ("first_block_id", "generations", "is_last")
    FIRST_BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    first_block_id: int
    generations: bytes
    is_last: bool
    def __init__(self, first_block_id: _Optional[int] = ..., generations: _Optional[bytes] = ..., is_last: bool = ...) -> None: ...

class StepFailed(_message.Message):
    __slots__ = ("version", "step", "status")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    version: int
    step: int
    status: _status_pb2.Status
    def __init__(self, version: _Optional[int] = ..., step: _Optional[int] = ..., status: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...
