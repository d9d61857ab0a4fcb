"""Options that set a setting, the same for every command that has them, and the decorator that gives a command its own.

An option's value is text until the configuration has read it, together with all other layers: what is wrong with it is
said in the same words as of a line in ``myelin.toml``. The list is held to the fields' ``flag`` by a test, so that it
can be known without importing what validates them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from myelin.config.settings import Inputs


@dataclass(frozen=True, slots=True)
class Option:
    """An option that sets the setting ``key``. A switch takes no value: its first flag says true, its second false."""

    key: str
    flags: tuple[str, ...]
    metavar: str
    help: str
    panel: str
    switch: bool = False


MODEL = "Model"
PIPELINE = "Pipeline"
ANSWER = "Answer"
PAGE = "Live page"
RECORD = "What is recorded"
SETTINGS = "Settings"

MODEL_OPTIONS = (
    Option("model.source", ("--model",), "SOURCE", "path, pkg:package/file, hf:owner/repo/file@revision or URL", MODEL),
    Option("model.gguf_repo", ("--gguf-repo",), "REPO", "repository on the Hugging Face Hub", MODEL),
    Option("model.gguf_file", ("--gguf-file",), "FILE", "file in that repository", MODEL),
    Option("model.gguf_revision", ("--gguf-revision",), "REVISION", "branch, tag or commit of it", MODEL),
    Option("model.gguf_local_path", ("--gguf-local-path",), "PATH", "a GGUF file on this machine", MODEL),
    Option(
        "model.cached_model_host_path",
        ("--cached-model-host-path",),
        "PATH",
        "a copy of the repository's file, used in place of fetching it",
        MODEL,
    ),
)

PIPELINE_OPTIONS = (
    Option(
        "runtime.pipeline_stages", ("-N", "--pipeline-stages"), "N", "nodes that the layers are split over", PIPELINE
    ),
    Option("runtime.split", ("--split",), "A,B,…", "layers of each stage by hand", PIPELINE),
    Option("provider.name", ("--provider",), "NAME", "who starts the nodes", PIPELINE),
    Option("provider.max_dph_total", ("--max-cost",), "$/H", "what all nodes together may cost an hour", PIPELINE),
    Option("runtime.engine", ("--engine",), "NAME", "what computes the layers; auto takes the best", PIPELINE),
    Option(
        "runtime.threads",
        ("--threads",),
        "N",
        "compute threads of each node; 0 shares a machine's cores among its nodes",
        PIPELINE,
    ),
    Option("runtime.max_context", ("--max-context",), "TOKENS", "positions of one sequence", PIPELINE),
    Option("runtime.run_id", ("--run-id",), "NAME", "name of the run", PIPELINE),
)

ANSWER_OPTIONS = (
    Option("prompt.max_tokens", ("--max-tokens",), "N", "new tokens at most", ANSWER),
    Option("prompt.temperature", ("--temperature",), "T", "how freely tokens are drawn; 0 takes the likeliest", ANSWER),
    Option("prompt.seed", ("--seed",), "N", "the same seed gives the same tokens", ANSWER),
)

SERVE_OPTIONS = (Option("prompt.rpc_addr", ("--rpc-bind",), "HOST:PORT", "where prompts are taken", ANSWER),)

PAGE_OPTIONS = (
    Option("runtime.dashboard", ("--dashboard", "--no-dashboard"), "", "the live page, over HTTP", PAGE, switch=True),
    Option("serve.http", ("--http-bind",), "HOST:PORT", "where HTTP is answered; nowhere if empty", PAGE),
)

RECORD_OPTIONS = (
    Option("observability.trace_file", ("--trace-file",), "PATH", "write spans there, as OTLP JSON lines", RECORD),
    Option(
        "observability.telemetry_frame_log",
        ("--telemetry-frame-log",),
        "PATH",
        "write spans, metrics and logs there, as OTLP JSON lines",
        RECORD,
    ),
    Option("observability.log_level", ("--log-level",), "LEVEL", "debug, info, warning or error", RECORD),
)

RUN_OPTIONS = MODEL_OPTIONS + PIPELINE_OPTIONS + RECORD_OPTIONS

ALL_OPTIONS = MODEL_OPTIONS + PIPELINE_OPTIONS + ANSWER_OPTIONS + SERVE_OPTIONS + PAGE_OPTIONS + RECORD_OPTIONS


@dataclass(frozen=True, slots=True)
class Invocation:
    """How a command was called: what its shared options were, before anything is read.

    Attributes:
        options: Settings by option: ``{"runtime.threads": ("--threads", "2")}``.
        assignments: What followed each ``--set``.
        config: The file that ``--config`` named.
        profile: What followed ``--profile``.
        json: Whether the answer is one JSON document.
        yes: Whether the price is agreed to.
    """

    options: Mapping[str, tuple[str, str]]
    assignments: tuple[str, ...] = ()
    config: Path | None = None
    profile: str = ""
    json: bool = False
    yes: bool = False

    def inputs(self) -> Inputs:
        """What the configuration is read from, with this process's environment and folder."""
        import os

        from myelin.config.settings import Inputs

        return Inputs(
            file=self.config,
            environment=dict(os.environ),
            options=dict(self.options),
            assignments=self.assignments,
            profile=self.profile,
        )


_YES = Annotated[bool, typer.Option("-y", "--yes", help="Agree to what the nodes cost.", rich_help_panel=PIPELINE)]
_JSON = Annotated[bool, typer.Option("--json", help="Answer with one JSON document.")]
_DEBUG = Annotated[
    bool, typer.Option("--debug", help="Show a traceback where something fails.", rich_help_panel=SETTINGS)
]
_CONFIG = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="PATH", help="The file of settings, instead of ./myelin.toml.", rich_help_panel=SETTINGS
    ),
]
_PROFILE = Annotated[str, typer.Option("--profile", metavar="NAME", help="local or deploy.", rich_help_panel=SETTINGS)]
_SET = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any setting; may be repeated.", rich_help_panel=SETTINGS),
]


def with_options(
    *groups: Sequence[Option], settings: bool = True, json: bool = True, yes: bool = False
) -> Callable[[Callable[..., int | None]], Callable[..., int | None]]:
    """Give a command shared options; it gets them as its first argument, an :class:`Invocation`.

    Args:
        groups: Which options that set a setting.
        settings: Also ``--set``, ``--profile`` and ``--config``.
        json: Also ``--json``.
        yes: Also ``--yes``.
    """
    options = [option for group in groups for option in group]

    def decorate(function: Callable[..., int | None]) -> Callable[..., int | None]:
        hints = get_type_hints(function, include_extras=True)
        own = list(inspect.signature(function).parameters.values())[1:]
        parameters = [parameter.replace(annotation=hints[parameter.name]) for parameter in own]
        parameters += [_parameter(_name(option), _annotation(option), None) for option in options]
        if settings:
            parameters += [
                _parameter("set_", _SET, None),
                _parameter("profile_", _PROFILE, ""),
                _parameter("config_", _CONFIG, None),
            ]
        if yes:
            parameters.append(_parameter("yes_", _YES, False))
        if json:
            parameters.append(_parameter("json_", _JSON, False))
        parameters.append(_parameter("debug_", _DEBUG, False))

        @functools.wraps(function)
        def wrapper(**given: Any) -> int | None:
            chosen = {}
            for option in options:
                text = given.pop(_name(option), None)
                if text is not None:
                    chosen[option.key] = _chosen(option, text)
            given.pop("debug_")
            invocation = Invocation(
                options=chosen,
                assignments=tuple(given.pop("set_", None) or ()),
                config=given.pop("config_", None),
                profile=given.pop("profile_", ""),
                json=given.pop("json_", False),
                yes=given.pop("yes_", False),
            )
            return function(invocation, **given)

        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
        wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return wrapper

    return decorate


def _name(option: Option) -> str:
    return option.key.replace(".", "_")


def _chosen(option: Option, given: str | bool) -> tuple[str, str]:
    """The flag that was given, and its value as text."""
    if isinstance(given, bool):
        return (option.flags[0], "true") if given else (option.flags[1], "false")
    return option.flags[0], given


def _annotation(option: Option) -> object:
    if option.switch:
        return Annotated[
            bool | None, typer.Option("/".join(option.flags), help=option.help, rich_help_panel=option.panel)
        ]
    info = typer.Option(*option.flags, metavar=option.metavar, help=option.help, rich_help_panel=option.panel)
    return Annotated[str | None, info]


def _parameter(name: str, annotation: object, default: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
