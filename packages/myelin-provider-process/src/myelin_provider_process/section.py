"""The configuration section ``process``."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class ProcessSection(BaseModel):
    """The configuration section ``process``."""

    model_config = ConfigDict(extra="forbid")

    grace_s: float = Field(
        default=5.0, gt=0, le=600, description="seconds that a node gets to end by itself before it is killed"
    )
    python: str = Field(
        default="", description="the interpreter that runs nodes; the one that runs Myelin where it is empty"
    )
    own_cores: bool = Field(
        default=True,
        description="keep each node on cores of its own, where a run has several and each gets as many as it computes "
        "with (Linux)",
    )
    log_lines: int = Field(
        default=2000,
        ge=1,
        le=1_000_000,
        description="lines of each node's output that are kept; older ones are dropped",
    )
