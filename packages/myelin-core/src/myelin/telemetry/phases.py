"""The phases of a run, in order, and the names of their spans."""

from __future__ import annotations

from enum import StrEnum

ROOT_SPAN = "myelin.run"
"""The span of a whole run; every phase is its child."""

RECOVERY = "recovery"
RECOVERY_SPAN = "myelin.recovery"
"""The span of one recovery, a child of the root span too; what it does to nodes are children as in the bootstrap."""


class Phase(StrEnum):
    """A named step of the bootstrap, in the order in which the steps begin."""

    CONFIG = "config"
    TELEMETRY = "telemetry"
    RUN_PLAN = "run_plan"
    TRANSPORT = "transport"
    MEMBERSHIP = "membership"
    PROVISIONER = "provisioner"
    NODE_SPEC = "node_spec"
    STAGE_SHARD_PLAN = "stage_shard_plan"
    PROVIDER_START = "provider_start"
    NODE_RUNTIME_READY = "node_runtime_ready"
    RUNTIME_READY_ACK = "runtime_ready_ack"
    STAGE_PROVISION = "stage_provision"
    WEIGHTS_LOADED = "weights_loaded"
    PIPELINE_PROBE = "pipeline_probe"
    SERVING = "serving"
    SHUTDOWN = "shutdown"
    PROVIDER_STOP = "provider_stop"

    @property
    def span_name(self) -> str:
        """``myelin.bootstrap.<phase>``."""
        return f"myelin.bootstrap.{self.value}"

    @property
    def node_span_name(self) -> str:
        """``myelin.bootstrap.<phase>.node``: the child span of one node and attempt."""
        return f"{self.span_name}.node"


PHASES: tuple[str, ...] = tuple(phase.value for phase in Phase)
"""All phases' names, in order."""
