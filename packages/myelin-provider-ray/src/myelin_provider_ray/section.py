"""The configuration section ``ray``: which cluster, what a stage reserves there, and patience."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Strategy(StrEnum):
    """How the stages of a run are spread over the cluster's nodes; the words are Ray's."""

    SPREAD = "SPREAD"
    """Over as many nodes as can be; nodes are shared where there are too few."""
    STRICT_SPREAD = "STRICT_SPREAD"
    """One stage a node, or an error."""
    PACK = "PACK"
    """On as few nodes as can be."""


class RaySection(BaseModel):
    """The table ``[ray]`` of the configuration: which cluster, what a stage reserves there, and patience."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    address: str = Field(
        default="auto",
        min_length=1,
        description="the cluster: auto (RAY_ADDRESS, or one that runs on this machine), local (one of its own for "
        "this run), host:port, or ray://host:port",
    )
    namespace: str = Field(default="myelin", min_length=1, description="Ray namespace of the stages' actors")
    runtime_env: dict[str, Any] = Field(
        default_factory=dict, description="runtime environment of the stages, such as {pip = [...]}; see Ray's own page"
    )

    strategy: Strategy = Field(default=Strategy.SPREAD, description="SPREAD, STRICT_SPREAD (one stage a node) or PACK")
    cpus: float = Field(
        default=1.0, gt=0, le=4096, description="CPUs that a stage reserves; it computes with as many threads"
    )
    gpus: float | None = Field(
        default=None,
        ge=0,
        le=64,
        description="GPUs that a stage reserves; where it is empty, 1 for an engine that needs one",
    )
    overhead_mb: int = Field(
        default=400,
        ge=0,
        description="memory in MB that a stage reserves above its plan: the interpreter and its libraries",
    )
    memory_mb: int = Field(
        default=0, ge=0, description="memory in MB that a stage reserves; 0 is its plan and the overhead"
    )
    labels: dict[str, str] = Field(
        default_factory=dict, description='labels that a node must have, such as {"ray.io/accelerator-type" = "A100"}'
    )
    bind: str = Field(
        default="", description="address that a stage listens on; empty is its node's own address in the cluster"
    )

    autoscaling: bool | None = Field(
        default=None, description="whether the cluster can add nodes; where it is empty, the cluster is asked"
    )
    pending_timeout_s: float = Field(default=600.0, gt=0, description="seconds that a stage may wait for a place")
    connect_timeout_s: float = Field(default=60.0, gt=0, description="seconds until the cluster must have let us in")
    call_timeout_s: float = Field(default=15.0, gt=0, description="seconds until the cluster must have answered")
    grace_s: float = Field(default=5.0, gt=0, le=600, description="seconds that a released stage gets to end by itself")
    linger_s: float = Field(
        default=600.0,
        gt=0,
        description="seconds after its end that a stage nobody asks for keeps its reservation and its logs",
    )
    log_lines: int = Field(default=2000, ge=1, le=1_000_000, description="lines of each stage's output that are kept")
