"""The configuration section ``process``."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class ProcessSection(BaseModel):
    """The configuration section ``process``."""

    model_config = ConfigDict(extra="forbid")

    grace_s: float = Field(default=5.0, gt=0, le=600)
    """How long a node gets to end by itself before it is killed, in seconds."""
    python: str = ""
    """The interpreter that runs nodes; empty is the one that runs Myelin."""
    log_lines: int = Field(default=2000, ge=1, le=1_000_000)
    """Lines of each node's output that are kept; older ones are dropped."""
