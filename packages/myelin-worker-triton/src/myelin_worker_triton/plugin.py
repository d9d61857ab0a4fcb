"""The hooks of this package. It can't compute yet, and says so."""

from __future__ import annotations

from myelin.engine_api import hookimpl


@hookimpl
def myelin_not_ready() -> str:
    """There are no GPU kernels in this version."""
    return "GPU kernels come in a later version"
