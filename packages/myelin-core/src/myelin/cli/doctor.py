"""``myelin doctor``: whether this machine can do what Myelin needs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from myelin.cli.options import RECORD_OPTIONS, SERVE_OPTIONS, Invocation, with_options

if TYPE_CHECKING:
    from myelin.cli.composition import Root

NAME = "doctor"

OK = "ok"
WARNING = "warning"
FAILED = "failed"

DOCTOR_TIMEOUT_S = 3.0
"""How long a collector may take to answer."""
LEAST_PYTHON = (3, 11)
INSTRUCTIONS = ("avx2", "fma", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8", "asimd", "asimddp", "i8mm", "sve")
"""CPU flags worth knowing of, as Linux spells them."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at: ``state`` is ``ok``, ``warning`` or ``failed``; a remedy where it isn't ok."""

    name: str
    state: str
    detail: str
    remedy: str = ""


@with_options(RECORD_OPTIONS, SERVE_OPTIONS)
def command(invocation: Invocation) -> int:
    """Look at this machine: Python, processor, memory, plugins, engines, cache, port. Exit code 1 if any fails."""
    from myelin.cli.composition import assemble
    from myelin.cli.output import answer, answer_json, table

    checks = examine(assemble(invocation))
    if invocation.json:
        answer_json([asdict(check) for check in checks])
    else:
        rows = [(check.name, check.state, check.detail, check.remedy) for check in checks]
        answer(table(("check", "state", "what", "remedy"), rows))
    return 1 if any(check.state == FAILED for check in checks) else 0


def examine(root: Root) -> list[Check]:
    """All checks, in the order in which they are shown."""
    return [
        check_python(),
        check_processor(),
        check_memory(),
        *check_plugins(root),
        *check_engines(root),
        check_folder(root.settings.model.cache_dir),
        check_port(root.settings.prompt.rpc_addr),
        *check_telemetry(root),
    ]


def check_python() -> Check:
    """The interpreter's version."""
    import platform
    import sys

    detail = f"{platform.python_implementation()} {platform.python_version()}"
    if sys.version_info < LEAST_PYTHON:
        return Check("python", FAILED, detail, "use Python 3.11 or newer")
    return Check("python", OK, detail)


def check_processor() -> Check:
    """How many cores this process may use, and what they can do."""
    import os
    import platform

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    flags = [flag for flag in INSTRUCTIONS if flag in _cpu_flags()]
    known = f", {' '.join(flags)}" if flags else ""
    return Check("processor", OK, f"{cores} core{'s' if cores != 1 else ''}, {platform.machine()}{known}")


def _cpu_flags() -> frozenset[str]:
    """The first processor's flags, where the system lists them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    listed = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return frozenset(listed.partition(":")[2].split())


def check_memory() -> Check:
    """How much memory there is."""
    import psutil

    from myelin.cli.output import human_bytes

    memory = psutil.virtual_memory()
    detail = f"{human_bytes(memory.available)} available of {human_bytes(memory.total)}"
    if memory.available < 512 * 1000 * 1000:
        return Check("memory", WARNING, detail, "end something else, or use a smaller model")
    return Check("memory", OK, detail)


def check_plugins(root: Root) -> list[Check]:
    """The plugins that the settings name must work; one of others that doesn't is worth a word."""
    from myelin.cli.composition import named_plugins
    from myelin.errors import PluginError
    from myelin.plugins.report import PluginState, remedy

    checks = []
    try:
        root.registry.require(named_plugins(root.settings))
    except PluginError as error:
        checks.append(Check("plugins", FAILED, error.message, error.hint))
    rows = root.registry.report()
    usable = [row for row in rows if row.state is PluginState.LOADED]
    if not checks:
        checks.append(Check("plugins", OK, f"{len(usable)} of {len(rows)} can be used"))
    bad = (PluginState.CONFLICTING, PluginState.INCOMPATIBLE, PluginState.BROKEN, PluginState.INVALID)
    for row in rows:
        if row.state in bad:
            where = f"plugin {row.group.removeprefix('myelin.')}:{row.name}"
            checks.append(Check(where, WARNING, f"{row.state.value}: {row.reason}", remedy(row)))
    return checks


def check_engines(root: Root) -> list[Check]:
    """Which engines run here; one must."""
    supports = root.registry.engine_support()
    checks = [
        Check(
            f"engine {support.name}",
            WARNING if support.unavailable else OK,
            support.unavailable or f"{len(support.types)} tensor types, {len(support.architectures)} architectures",
        )
        for support in supports
    ]
    if all(support.unavailable for support in supports):
        checks.append(Check("engines", FAILED, "none runs here", "pip install myelin-worker-cpu"))
    elif all(support.rank == 0 for support in supports if not support.unavailable):
        checks.append(Check("engines", WARNING, "only the slow reference runs here", "pip install myelin-worker-cpu"))
    return checks


def check_folder(folder: Path) -> Check:
    """Whether fetched models can be kept where they should be, and how much room there is."""
    import os
    import shutil

    from myelin.cli.output import human_bytes

    existing = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return Check("model cache", FAILED, f"{folder} can't be written", "set model.cache_dir to a folder that can")
    free = shutil.disk_usage(existing).free
    return Check("model cache", OK, f"{folder}, {human_bytes(free)} free")


def check_port(address: str) -> Check:
    """Whether `myelin serve` could listen where the settings say."""
    from myelin.errors import MyelinError
    from myelin.serve.prompt_rpc import bind

    try:
        bind(address).close()
    except MyelinError as error:
        return Check("prompt RPC", WARNING, error.message, error.hint)
    return Check("prompt RPC", OK, f"{address} is free")


def check_telemetry(root: Root) -> list[Check]:
    """Whether a synthetic event arrives at each sink that is configured; nothing is said where none is."""
    from myelin.errors import MyelinError
    from myelin.plugins.specs import TelemetryContext
    from myelin.telemetry.preflight import preflight
    from myelin.telemetry.sink import as_sinks
    from myelin.telemetry.tracing import ORCHESTRATOR_SERVICE, service_resource

    observability = root.settings.observability
    context = TelemetryContext(
        ORCHESTRATOR_SERVICE,
        str(observability.trace_file or ""),
        frame_log=str(observability.telemetry_frame_log or ""),
    )
    try:
        sinks = as_sinks(root.registry.telemetry(context, root.settings.sections))
    except MyelinError as error:
        return [Check("telemetry", FAILED, error.message, error.hint)]
    if not sinks:
        return []
    resource = service_resource(ORCHESTRATOR_SERVICE, "doctor").attributes
    checks = []
    for found in preflight(sinks, {key: str(value) for key, value in resource.items()}, timeout_s=DOCTOR_TIMEOUT_S):
        stages = ("configured", "connected" if found.connected or found.observed else "not connected")
        told = ", ".join(
            [*stages, "sent" if found.sent else "not sent", "observed" if found.observed else "not observed"]
        )
        detail = f"{told}: {found.detail}" if found.detail else told
        remedy = "" if found.ok else "check the collector, and OTEL_EXPORTER_OTLP_ENDPOINT"
        checks.append(Check(f"telemetry {found.sink}", OK if found.ok else WARNING, detail, remedy))
    for sink in sinks:
        sink.close()
    return checks
