"""The facade for authors of providers, transports, planners, telemetry sinks and model sources.

Everything here is public and keeps its meaning within a minor version; nothing else of ``myelin`` does, except
:mod:`myelin.engine_api` for engines.
"""

from __future__ import annotations

from myelin.cluster.boot import (
    CORE_SET_VARIABLE,
    CORES_VARIABLE,
    PARENT_VARIABLE,
    announcement,
    boot_line,
    die_with_parent,
    parse_announcement,
    read_boot_line,
)
from myelin.cluster.log_buffer import LogBuffer
from myelin.cluster.provider import (
    BootSpec,
    LaunchKey,
    Lease,
    LeaseState,
    LogLine,
    Need,
    Offer,
    Provider,
    ProviderContext,
)
from myelin.errors import (
    ConfigError,
    ModelError,
    MyelinError,
    PlanError,
    ProviderError,
    StreamClosed,
    TransportError,
    UsageError,
)
from myelin.model.shard import ByteSource
from myelin.model.source import FetchProgress, ModelSource, SourceOptions
from myelin.planner.pipeline import plan_pipeline
from myelin.planner.run_plan import EdgeKind, EdgePlan, NodeCapacity, PlanRequest, RunPlan, StagePlan
from myelin.plugins.markers import hookimpl
from myelin.plugins.specs import ConfigSection, TelemetryContext
from myelin.telemetry.signals import Signal
from myelin.telemetry.sink import SinkCheck, TelemetrySink
from myelin.transport.contract import (
    Endpoint,
    Listener,
    MessageStream,
    PeerIdentity,
    StreamHandler,
    Transport,
    TransportOptions,
)
from myelin.values import Attempt, Epoch, LeaseId, NodeId, RunId

__all__ = [
    "CORES_VARIABLE",
    "CORE_SET_VARIABLE",
    "PARENT_VARIABLE",
    "Attempt",
    "BootSpec",
    "ByteSource",
    "ConfigError",
    "ConfigSection",
    "EdgeKind",
    "EdgePlan",
    "Endpoint",
    "Epoch",
    "FetchProgress",
    "LaunchKey",
    "Lease",
    "LeaseId",
    "LeaseState",
    "Listener",
    "LogBuffer",
    "LogLine",
    "MessageStream",
    "ModelError",
    "ModelSource",
    "MyelinError",
    "Need",
    "NodeCapacity",
    "NodeId",
    "Offer",
    "PeerIdentity",
    "PlanError",
    "PlanRequest",
    "Provider",
    "ProviderContext",
    "ProviderError",
    "RunId",
    "RunPlan",
    "Signal",
    "SinkCheck",
    "SourceOptions",
    "StagePlan",
    "StreamClosed",
    "StreamHandler",
    "TelemetryContext",
    "TelemetrySink",
    "Transport",
    "TransportError",
    "TransportOptions",
    "UsageError",
    "announcement",
    "boot_line",
    "die_with_parent",
    "hookimpl",
    "parse_announcement",
    "plan_pipeline",
    "read_boot_line",
]
