"""The whole extension contract: every hook that a plugin may implement.

A plugin is a module named by an entry point of one of the groups in :data:`GROUPS`; it must cost nothing to import (no
SDK, no torch, no network). Its functions marked with ``myelin.plugin.hookimpl`` implement the hooks below; it may leave
out arguments it doesn't need, and any hook but the one of its group. Hooks are synchronous factories: they do no I/O,
and async lives on what they return. A hook that gets a ``name`` is asked only of the plugin whose entry point has that
name. The hooks ``myelin_config_section`` and ``myelin_not_ready`` belong to every group, ``myelin_engine_support`` to
the engines; a plugin with a hook of a group in which it isn't registered is invalid, and so is one whose module has
any other function named ``myelin_…``, a typing mistake. Wrappers around other plugins' hooks aren't supported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import BaseModel

from myelin.cluster.provider import Provider, ProviderContext
from myelin.engine.contract import Engine, EngineOptions, EngineSupport
from myelin.model.source import ModelSource, SourceOptions
from myelin.planner.run_plan import PlanRequest, RunPlan
from myelin.plugins.markers import hookspec
from myelin.telemetry.sink import TelemetrySink
from myelin.transport.contract import Transport, TransportOptions

if TYPE_CHECKING:
    import typer
    from opentelemetry.sdk.trace.export import SpanExporter  # its import takes longer than all the rest of this room

GROUPS = {
    "myelin.providers": "provider",
    "myelin.transports": "transport",
    "myelin.planners": "planner",
    "myelin.engines": "engine",
    "myelin.telemetry": "telemetry",
    "myelin.sources": "source",
}
"""Entry-point groups, and what people call what is in them."""


@dataclass(frozen=True, slots=True)
class ConfigSection:
    """A plugin's own part of the configuration.

    Attributes:
        name: The TOML table and the middle of ``MYELIN_<NAME>_<FIELD>``.
        model: Its fields, with defaults for all; secrets are ``SecretStr``.
    """

    name: str
    model: type[BaseModel]


@dataclass(frozen=True, slots=True)
class TelemetryContext:
    """What a telemetry sink is made with.

    Attributes:
        service: The service's name.
        trace_file: Where ``--trace-file`` points; empty if nowhere.
        section: The plugin's own configuration section.
        frame_log, frame_log_bytes: Where ``--telemetry-frame-log`` points, and the size at which the file is put aside.
    """

    service: str
    trace_file: str
    section: BaseModel | None = None
    frame_log: str = ""
    frame_log_bytes: int = 0


@hookspec
def myelin_config_section() -> ConfigSection | None:
    """The plugin's configuration section.

    Called once after loading, before configuration is read. Any group. Return None where there is nothing to configure.
    A name that is taken is an error that names both distributions.
    """


@hookspec
def myelin_not_ready() -> str | None:
    """Why the installed plugin can't be used yet, in one line for people, or None where it can.

    Called once after loading. A plugin that answers a text is shown by ``myelin plugins`` with the state ``not-ready``,
    and using it is an error with this text. It needn't have the hook of its group yet.
    """


@hookspec
def myelin_commands() -> typer.Typer | None:
    """Commands of the plugin's own, beneath ``myelin NAME``, where NAME is the entry point's.

    Called where that name is on the command line, and is none of Myelin's own commands. Any group. What takes long to
    import belongs inside the commands.
    """


@hookspec(firstresult=True)
def myelin_provider(name: str, context: ProviderContext) -> Provider | None:
    """Make the provider ``name``.

    Called once a run, for the provider that the configuration names.

    Raises:
        ProviderError, ConfigError: It can't work as configured (no credentials, say).
    """


@hookspec(firstresult=True)
def myelin_transport(name: str, options: TransportOptions) -> Transport | None:
    """Make the transport ``name``. Called once in each process that takes part in a run."""


@hookspec(firstresult=True)
def myelin_plan(request: PlanRequest) -> RunPlan | None:
    """Decide which node holds which layers; None declines, and the next planner is asked.

    Called once a run, and again when nodes change. The built-in planner comes last. With ``runtime.planner`` set, only
    the named one is asked. Pure: the same request gives the same plan.

    Raises:
        PlanError: The request can't be met, with what would fit.
    """


@hookspec
def myelin_engine_support() -> EngineSupport | None:
    """What the plugin's engine computes on this machine.

    Called for each installed engine where ``runtime.engine`` is ``auto``, and by ``myelin doctor``. May look at the
    machine, must not import a heavy package.
    """


@hookspec(firstresult=True)
def myelin_engine(name: str, options: EngineOptions) -> Engine | None:
    """Make the engine ``name``. Called in the worker, once a stage; this is where heavy imports belong.

    Raises:
        EngineError: It can't run on this machine.
    """


@hookspec(firstresult=True)
def myelin_model_source(uri: str, options: SourceOptions) -> ModelSource | None:
    """Recognise a model source by its spelling; None where it isn't ours. No I/O: opening comes later.

    Called in the orchestrator and in each worker.

    Raises:
        UsageError: It is ours, and misspelt.
    """


@hookspec
def myelin_telemetry(context: TelemetryContext) -> Sequence[SpanExporter | TelemetrySink] | None:
    """The sinks of this plugin; None or empty where it isn't configured. Called once a run, in the orchestrator.

    OpenTelemetry's own span exporters take spans; a :class:`~myelin.telemetry.sink.TelemetrySink` takes OTLP requests
    of whichever signals it names. Nodes ask no plugin: what they have to tell comes by the relay, and reaches the sinks
    as if it had been told here.

    Raises:
        ConfigError: It can't work as configured.
    """
