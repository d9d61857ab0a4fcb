"""Myelin serves one GGUF model over several machines.

The rooms of this package, from the bottom up, are described in ``docs/architecture.md``. Plugin authors need only two
modules: :mod:`myelin.plugin` (providers, transports, planners, telemetry sinks, model sources) and
:mod:`myelin.engine_api` (engines).
"""

__version__ = "0.1.0"
