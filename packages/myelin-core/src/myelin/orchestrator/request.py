"""What a run is asked to be, independent of where the answers came from (command line, file, test)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, SecretStr

from myelin.cluster.quote import Agree
from myelin.engine.contract import EngineOptions
from myelin.model.source import SourceOptions
from myelin.values import RunId


@dataclass(frozen=True, slots=True)
class RunRequest:
    """One run.

    Attributes:
        run: Its name.
        model_uri: The model's source.
        stages: How many (``-N``).
        split: Layers of each stage by hand, or empty.
        provider, provider_section: Which starts the nodes, and its configuration.
        engine: A name, or ``auto``.
        transport, planner: Names; an empty planner asks all.
        engine_options: Threads, context, sequences, batch, KV dtype. ``max_context`` 0 means the model's own, at most
            4096.
        source_options: Caches and tokens.
        endpoint_mask: Keep only candidate addresses that match this prefix; empty keeps all.
        startup_timeout_s: From the launch of a node to its readiness, without loading.
        load_stall_s: A stage without any progress for this long has failed.
        max_attempts: How often a node is launched at most until it serves (again).
        recover: Whether a pipeline that serves is mended when it loses a node or an edge.
        recover_attempts, recover_window_s: So many rounds of mending within so many seconds, at most.
        dead_man_s: How long a node outlives its orchestrator, waiting for another one; 0 leaves it its own default.
        secret: The run's secret, where it is given: nodes of an earlier orchestrator of this run are then adopted. A
            fresh one otherwise.
        stop_grace_s: How long nodes get to stop by themselves.
        tokenizer_path: A ``tokenizer.json`` to use instead of the model's own.
        log_dir: Where the nodes' output is kept; None keeps it in memory only.
        environment: More variables for the nodes.
        trace_file: Where spans are archived (``--trace-file``); empty for nowhere.
        frame_log, frame_log_bytes: Where all telemetry is archived (``--telemetry-frame-log``), and the size at which
        that file is put aside; 0 lets it grow.
        live: Somebody watches: metrics and the last lines of logs are kept in this process, and each request is a trace
            of its own.
        state_dir: Where the ledger of runs is; None keeps nothing that would outlive this process.
        max_dollars_per_hour: What all nodes together may cost; 0 is no limit.
        agree: Asks a person before the first dollar; without it, nothing that costs money is started (but where the
            provider says that the price is agreed to).
        began_ns: When the command began, Unix nanoseconds; 0 is «now». The run's root span begins there.
    """

    run: RunId
    model_uri: str
    stages: int
    source_options: SourceOptions
    engine_options: EngineOptions = field(default_factory=EngineOptions)
    split: tuple[int, ...] = ()
    provider: str = "process"
    provider_section: BaseModel | None = None
    engine: str = "auto"
    transport: str = "tcp"
    planner: str = ""
    endpoint_mask: str = ""
    startup_timeout_s: float = 60.0
    load_stall_s: float = 120.0
    stop_grace_s: float = 5.0
    max_attempts: int = 3
    recover: bool = True
    recover_attempts: int = 8
    recover_window_s: float = 300.0
    dead_man_s: float = 0.0
    secret: SecretStr | None = None
    tokenizer_path: Path | None = None
    log_dir: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)
    trace_file: str = ""
    frame_log: str = ""
    frame_log_bytes: int = 0
    live: bool = False
    state_dir: Path | None = None
    max_dollars_per_hour: float = 0.0
    agree: Agree | None = None
    began_ns: int = 0
