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
    log_lines: int = Field(
        default=2000,
        ge=1,
        le=1_000_000,
        description="lines of each node's output that are kept; older ones are dropped",
    )
