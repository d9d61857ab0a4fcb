"""The composition root: from a command's words to settings, plugins, and the request for a run."""

from __future__ import annotations

import secrets
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from myelin.cli.options import Invocation
from myelin.config.model_choice import model_uri
from myelin.config.settings import Settings, peek_disabled_plugins, resolve
from myelin.engine.contract import EngineOptions
from myelin.model.source import SourceOptions
from myelin.orchestrator.request import RunRequest
from myelin.plugins.registry import ENGINES, PLANNERS, PROVIDERS, TRANSPORTS, Registry
from myelin.plugins.report import PluginState
from myelin.values import RunId, SamplingParams

if TYPE_CHECKING:
    from myelin.orchestrator.events import Observer
    from myelin.orchestrator.pipeline import Pipeline
    from myelin.orchestrator.planning import PlannedRun
    from myelin.serve.prompts import Prompter


@dataclass(frozen=True, slots=True)
class Root:
    """Settings and plugins of one command."""

    settings: Settings
    registry: Registry


def assemble(invocation: Invocation) -> Root:
    """Find the plugins, and read the settings with their sections.

    Raises:
        ConfigError: Something in the settings is wrong.
    """
    inputs = invocation.inputs()
    registry = Registry.discover(disabled=peek_disabled_plugins(inputs))
    sections = {section.name: section.model for section in registry.config_sections()}
    unreadable = {
        row.name
        for row in registry.report()
        if row.state not in (PluginState.LOADED, PluginState.NOT_READY) and row.name not in sections
    }
    settings = resolve(inputs, sections, sorted(unreadable))
    _set_up_logging(settings.observability.log_level)
    return Root(settings, registry)


def _set_up_logging(level: str) -> None:
    import logging

    logging.basicConfig(format="%(name)s: %(message)s", level=logging.WARNING)
    logging.getLogger("myelin").setLevel(level.upper())


def source_options(settings: Settings) -> SourceOptions:
    """What model sources may use."""
    model = settings.model
    return SourceOptions(
        cache_dir=model.cache_dir,
        token=model.token,
        offline=model.offline,
        hub_endpoint=model.hub_endpoint,
        hub_cache_dir=model.hub_cache_dir,
    )


def named_plugins(settings: Settings) -> dict[str, list[str]]:
    """The plugins that the settings name, by group."""
    runtime = settings.runtime
    return {
        PROVIDERS: [settings.provider.name],
        TRANSPORTS: [runtime.transport],
        PLANNERS: [runtime.planner] if runtime.planner else [],
        ENGINES: [runtime.engine] if runtime.engine != "auto" else [],
    }


def run_request(root: Root, *, live: bool = False) -> RunRequest:
    """The run that the settings ask for.

    Args:
        live: Somebody watches it.

    Raises:
        PluginError: A plugin that the settings name can't be used; all of them at once.
        ConfigError: The cached copy of the model isn't there.
    """
    settings, runtime = root.settings, root.settings.runtime
    root.registry.require(named_plugins(settings))
    section = root.registry.section_of(PROVIDERS, settings.provider.name)
    return RunRequest(
        run=RunId(runtime.run_id or f"run-{secrets.token_hex(4)}"),
        model_uri=model_uri(settings),
        stages=runtime.pipeline_stages,
        source_options=source_options(settings),
        engine_options=EngineOptions(
            threads=runtime.threads,
            max_context=runtime.max_context,
            max_sequences=runtime.max_sequences,
            max_batch_tokens=runtime.max_batch_tokens,
            kv_dtype=runtime.kv_dtype,
        ),
        split=runtime.split,
        provider=settings.provider.name,
        provider_section=settings.sections.get(section),
        engine=runtime.engine,
        transport=runtime.transport,
        planner=runtime.planner,
        endpoint_mask=settings.relay.endpoint_addr_mask,
        startup_timeout_s=runtime.startup_timeout_s,
        load_stall_s=runtime.load_stall_s,
        stop_grace_s=runtime.stop_grace_s,
        max_attempts=settings.provider.max_attempts,
        recover=runtime.recover,
        recover_attempts=runtime.recover_attempts,
        recover_window_s=runtime.recover_window_s,
        dead_man_s=runtime.dead_man_s,
        tokenizer_path=settings.model.tokenizer_local_path,
        log_dir=log_folder(settings),
        state_dir=runtime.state_dir,
        max_dollars_per_hour=settings.provider.max_dph_total,
        trace_file=str(settings.observability.trace_file or ""),
        live=live,
        frame_log=str(settings.observability.telemetry_frame_log or ""),
        frame_log_bytes=settings.observability.telemetry_frame_log_mb * 1_000_000,
    )


def log_folder(settings: Settings) -> Path:
    """Where the output of nodes is kept."""
    return settings.runtime.log_dir or settings.runtime.state_dir / "logs"


def sampling(settings: Settings) -> SamplingParams:
    """How tokens are chosen unless a request says otherwise."""
    prompt = settings.prompt
    return SamplingParams(prompt.temperature, prompt.top_k, prompt.top_p, prompt.seed)


def open_pipeline(request: RunRequest, registry: Registry, observer: Observer) -> AbstractAsyncContextManager[Pipeline]:
    """A live pipeline, released on exit. The commands' only way to one."""
    from myelin.orchestrator.bootstrap import running

    return running(request, registry, observer)


def prompter(pipeline: Pipeline) -> Prompter:
    """What turns words into tokens for the pipeline's model."""
    from myelin.model.chat_template import ChatTemplate
    from myelin.serve.prompts import Prompter

    template = ChatTemplate.from_facts(pipeline.facts, pipeline.tokenizer)
    return Prompter(pipeline.tokenizer, template, pipeline.options.max_context)


async def plan_run(request: RunRequest, registry: Registry, observer: Observer) -> PlannedRun:
    """The plan for a request; starts nothing."""
    from myelin.orchestrator.bootstrap import planned

    return await planned(request, registry, observer)
