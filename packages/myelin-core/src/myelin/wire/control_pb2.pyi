from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Envelope(_message.Message):
    __slots__ = ("traceparent", "hello", "ready_query", "provision", "open_edges", "status_query", "shutdown", "welcome", "ready_ack", "progress", "provisioned", "edges_open", "status", "failure", "goodbye")
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    READY_QUERY_FIELD_NUMBER: _ClassVar[int]
    PROVISION_FIELD_NUMBER: _ClassVar[int]
    OPEN_EDGES_FIELD_NUMBER: _ClassVar[int]
    STATUS_QUERY_FIELD_NUMBER: _ClassVar[int]
    SHUTDOWN_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    READY_ACK_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    PROVISIONED_FIELD_NUMBER: _ClassVar[int]
    EDGES_OPEN_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    traceparent: str
    hello: Hello
    ready_query: ReadyQuery
    provision: Provision
    open_edges: OpenEdges
    status_query: StatusQuery
    shutdown: Shutdown
    welcome: Welcome
    ready_ack: ReadyAck
    progress: Progress
    provisioned: Provisioned
    edges_open: EdgesOpen
    status: Status
    failure: Failure
    goodbye: Goodbye
    def __init__(self, traceparent: _Optional[str] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., ready_query: _Optional[_Union[ReadyQuery, _Mapping]] = ..., provision: _Optional[_Union[Provision, _Mapping]] = ..., open_edges: _Optional[_Union[OpenEdges, _Mapping]] = ..., status_query: _Optional[_Union[StatusQuery, _Mapping]] = ..., shutdown: _Optional[_Union[Shutdown, _Mapping]] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., ready_ack: _Optional[_Union[ReadyAck, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., provisioned: _Optional[_Union[Provisioned, _Mapping]] = ..., edges_open: _Optional[_Union[EdgesOpen, _Mapping]] = ..., status: _Optional[_Union[Status, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("run", "node", "attempt", "version")
    RUN_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    run: str
    node: str
    attempt: int
    version: str
    def __init__(self, run: _Optional[str] = ..., node: _Optional[str] = ..., attempt: _Optional[int] = ..., version: _Optional[str] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("run", "node", "attempt", "version", "process_id", "cpu_count", "memory_bytes", "memory_available_bytes", "epoch")
    RUN_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    CPU_COUNT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_AVAILABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    run: str
    node: str
    attempt: int
    version: str
    process_id: int
    cpu_count: int
    memory_bytes: int
    memory_available_bytes: int
    epoch: int
    def __init__(self, run: _Optional[str] = ..., node: _Optional[str] = ..., attempt: _Optional[int] = ..., version: _Optional[str] = ..., process_id: _Optional[int] = ..., cpu_count: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., memory_available_bytes: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class ReadyQuery(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    def __init__(self, nonce: _Optional[int] = ...) -> None: ...

class ReadyAck(_message.Message):
    __slots__ = ("nonce", "attempt")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    attempt: int
    def __init__(self, nonce: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class EngineOptions(_message.Message):
    __slots__ = ("threads", "max_context", "max_sequences", "max_batch_tokens", "kv_dtype", "memory_bytes")
    THREADS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    threads: int
    max_context: int
    max_sequences: int
    max_batch_tokens: int
    kv_dtype: str
    memory_bytes: int
    def __init__(self, threads: _Optional[int] = ..., max_context: _Optional[int] = ..., max_sequences: _Optional[int] = ..., max_batch_tokens: _Optional[int] = ..., kv_dtype: _Optional[str] = ..., memory_bytes: _Optional[int] = ...) -> None: ...

class Provision(_message.Message):
    __slots__ = ("id", "model_uri", "engine", "options", "stage_index", "stage_count", "first_layer", "end_layer", "end_tokens", "model_cache_dir", "part_sizes", "header_digest", "part_fingerprints", "facts")
    ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_URI_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    STAGE_INDEX_FIELD_NUMBER: _ClassVar[int]
    STAGE_COUNT_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    END_LAYER_FIELD_NUMBER: _ClassVar[int]
    END_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MODEL_CACHE_DIR_FIELD_NUMBER: _ClassVar[int]
    PART_SIZES_FIELD_NUMBER: _ClassVar[int]
    HEADER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PART_FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    id: int
    model_uri: str
    engine: str
    options: EngineOptions
    stage_index: int
    stage_count: int
    first_layer: int
    end_layer: int
    end_tokens: _containers.RepeatedScalarFieldContainer[int]
    model_cache_dir: str
    part_sizes: _containers.RepeatedScalarFieldContainer[int]
    header_digest: bytes
    part_fingerprints: _containers.RepeatedScalarFieldContainer[str]
    facts: bytes
    def __init__(self, id: _Optional[int] = ..., model_uri: _Optional[str] = ..., engine: _Optional[str] = ..., options: _Optional[_Union[EngineOptions, _Mapping]] = ..., stage_index: _Optional[int] = ..., stage_count: _Optional[int] = ..., first_layer: _Optional[int] = ..., end_layer: _Optional[int] = ..., end_tokens: _Optional[_Iterable[int]] = ..., model_cache_dir: _Optional[str] = ..., part_sizes: _Optional[_Iterable[int]] = ..., header_digest: _Optional[bytes] = ..., part_fingerprints: _Optional[_Iterable[str]] = ..., facts: _Optional[bytes] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("id", "phase", "done", "total")
    ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    id: int
    phase: str
    done: int
    total: int
    def __init__(self, id: _Optional[int] = ..., phase: _Optional[str] = ..., done: _Optional[int] = ..., total: _Optional[int] = ...) -> None: ...

class Provisioned(_message.Message):
    __slots__ = ("id", "weight_bytes", "kv_bytes", "fetched_bytes", "seconds", "threads")
    ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    id: int
    weight_bytes: int
    kv_bytes: int
    fetched_bytes: int
    seconds: float
    threads: int
    def __init__(self, id: _Optional[int] = ..., weight_bytes: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., fetched_bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., threads: _Optional[int] = ...) -> None: ...

class OpenEdges(_message.Message):
    __slots__ = ("epoch", "next_node", "next_candidates")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NEXT_NODE_FIELD_NUMBER: _ClassVar[int]
    NEXT_CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    next_node: str
    next_candidates: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, epoch: _Optional[int] = ..., next_node: _Optional[str] = ..., next_candidates: _Optional[_Iterable[str]] = ...) -> None: ...

class EdgesOpen(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class StatusQuery(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Status(_message.Message):
    __slots__ = ("resident_bytes", "peak_resident_bytes", "steps", "rows", "busy_seconds", "sequences_running", "sequences_waiting")
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PEAK_RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    BUSY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_RUNNING_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_WAITING_FIELD_NUMBER: _ClassVar[int]
    resident_bytes: int
    peak_resident_bytes: int
    steps: int
    rows: int
    busy_seconds: float
    sequences_running: int
    sequences_waiting: int
    def __init__(self, resident_bytes: _Optional[int] = ..., peak_resident_bytes: _Optional[int] = ..., steps: _Optional[int] = ..., rows: _Optional[int] = ..., busy_seconds: _Optional[float] = ..., sequences_running: _Optional[int] = ..., sequences_waiting: _Optional[int] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("reason", "message", "hint", "fatal", "epoch")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    FATAL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    hint: str
    fatal: bool
    epoch: int
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ..., hint: _Optional[str] = ..., fatal: _Optional[bool] = ..., epoch: _Optional[int] = ...) -> None: ...

class Shutdown(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
