"""The plugin ``memory``: streams inside one process."""

from __future__ import annotations

from myelin.plugin import Transport, TransportOptions, hookimpl


@hookimpl
def myelin_transport(name: str, options: TransportOptions) -> Transport | None:
    """The in-process transport, where ``name`` is ``memory``."""
    if name != "memory":
        return None
    from myelin.transport.memory import MemoryTransport

    return MemoryTransport(options)
