"""Myelin's own configuration sections. Plugins bring theirs through the hook ``myelin_config_section``.

Each field has a key (``section.field``), an environment variable made from it (``MYELIN_<SECTION>_<FIELD>``), and often
a shorter one, given as ``environment`` in its ``json_schema_extra``; ``flag`` there is the option of the command line.
There is no field that does nothing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from platformdirs import user_cache_path, user_state_path
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr
from pydantic.config import JsonDict

from myelin.config.hub_cache import default_hub_cache

DEFAULT_REPOSITORY = "bartowski/Llama-3.2-1B-Instruct-GGUF"
DEFAULT_FILE = "Llama-3.2-1B-Instruct-Q4_K_M.gguf"


def _expanded(value: object) -> object:
    """A path with ``~`` written out; the empty string is no path."""
    if isinstance(value, str):
        return Path(value).expanduser() if value else None
    return value


OptionalPath = Annotated[Path | None, BeforeValidator(_expanded)]
FolderPath = Annotated[Path, BeforeValidator(_expanded)]


def names(*environment: str, flag: str = "") -> JsonDict:
    """The ``json_schema_extra`` of a field: its own environment variables, and its option of the command line."""
    return {"environment": list(environment), "flag": flag}


class Section(BaseModel):
    """A table of the configuration: immutable, and nothing in it but what is declared."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RuntimeSection(Section):
    """How the pipeline is made."""

    run_id: str = Field(
        "",
        pattern=r"^([A-Za-z0-9][A-Za-z0-9-]{0,62})?$",
        description="name of the run: letters, digits and -, at most 63; generated where it is empty",
        json_schema_extra=names("MYELIN_RUN_ID", flag="--run-id"),
    )
    pipeline_stages: int = Field(
        1,
        ge=1,
        le=1024,
        description="how many nodes the layers are split over",
        json_schema_extra=names("MYELIN_PIPELINE_STAGES", flag="-N/--pipeline-stages"),
    )
    split: tuple[int, ...] = Field(
        (),
        description="layers of each stage by hand, such as 10,20; planned where it is empty",
        json_schema_extra=names("MYELIN_SPLIT", flag="--split"),
    )
    engine: str = Field(
        "auto",
        description="the engine that computes the layers; auto takes the best that can compute this model here",
        json_schema_extra=names("MYELIN_ENGINE", flag="--engine"),
    )
    threads: int = Field(
        0,
        ge=0,
        le=1024,
        description="compute threads of each node; 0 shares a machine's cores among its nodes",
        json_schema_extra=names("MYELIN_THREADS", flag="--threads"),
    )
    max_context: int = Field(
        0,
        ge=0,
        le=1 << 24,
        description="positions of one sequence; 0 is the model's own, at most 4096",
        json_schema_extra=names("MYELIN_MAX_CONTEXT", flag="--max-context"),
    )
    max_sequences: int = Field(4, ge=1, le=4096, description="sequences served at once")
    max_batch_tokens: int = Field(512, ge=1, le=1 << 16, description="tokens of one step at most")
    kv_dtype: Literal["f16", "f32", "q8_0"] = Field(
        "f16", description="how keys and values are kept; q8_0 takes half of f16's memory"
    )
    transport: str = Field("tcp", description="what carries messages between nodes")
    planner: str = Field("", description="the planner to ask; all are asked where it is empty")
    dashboard: bool | None = Field(
        None,
        description="show the live page over HTTP; where it is empty, `myelin serve` does, and prompt and chat don't",
        json_schema_extra=names("MYELIN_DASHBOARD", flag="--dashboard/--no-dashboard"),
    )
    startup_timeout_s: float = Field(60.0, gt=0, description="seconds from a node's launch until it must be ready")
    load_stall_s: float = Field(120.0, gt=0, description="seconds without progress until a loading node has failed")
    stop_grace_s: float = Field(5.0, ge=0, description="seconds that nodes get to stop by themselves")
    recover: bool = Field(True, description="whether a lost node is replaced while requests wait, or ends the run")
    recover_attempts: int = Field(8, ge=0, le=10_000, description="rounds of mending within the window, at most")
    recover_window_s: float = Field(300.0, gt=0, description="the window for runtime.recover_attempts, in seconds")
    dead_man_s: float = Field(
        0.0, ge=0, description="seconds that a node waits for another orchestrator when its own is gone; 0 is 30"
    )
    log_dir: OptionalPath = Field(
        None, description="folder where the nodes' output is kept; logs in the state folder if empty"
    )
    state_dir: FolderPath = Field(
        default_factory=lambda: user_state_path("myelin"),
        description="folder of the ledger of runs, which holds their secrets: for this user alone",
        json_schema_extra=names("MYELIN_STATE_DIR"),
    )
    disabled_plugins: tuple[str, ...] = Field(
        (), description="plugins or distributions to leave alone, such as docker or providers:docker"
    )


class ProviderSection(Section):
    """Who starts the nodes."""

    name: str = Field(
        "process",
        description="the provider that starts nodes",
        json_schema_extra=names("MYELIN_NODE_PROVIDER", flag="--provider"),
    )
    max_attempts: int = Field(
        3, ge=1, le=100, description="how often a node is started until it serves, on another offer where there is one"
    )
    max_dph_total: float = Field(
        0.0,
        ge=0,
        description="dollars an hour that all nodes of a run may cost together; 0 is no limit",
        json_schema_extra=names("MYELIN_MAX_COST", flag="--max-cost"),
    )


class RelaySection(Section):
    """How nodes are reached."""

    endpoint_addr_mask: str = Field(
        "",
        description="use only addresses of nodes that begin with this; all where it is empty",
        json_schema_extra=names("MYELIN_ENDPOINT_ADDR_MASK"),
    )


class PromptSection(Section):
    """How prompts are answered."""

    rpc_addr: str = Field(
        "127.0.0.1:19777",
        description="where `myelin serve` takes prompts, host:port; port 0 takes a free one",
        json_schema_extra=names("MYELIN_PROMPT_RPC_BIND", flag="--rpc-bind"),
    )
    max_tokens: int = Field(
        64,
        ge=1,
        le=1 << 24,
        description="new tokens at most",
        json_schema_extra=names(flag="--max-tokens"),
    )
    temperature: float = Field(
        0.0,
        ge=0,
        le=100,
        description="how freely tokens are drawn; 0 always takes the likeliest",
        json_schema_extra=names(flag="--temperature"),
    )
    top_k: int = Field(0, ge=0, description="keep only the k most likely tokens; 0 keeps all")
    top_p: float = Field(1.0, gt=0, le=1, description="keep the likeliest tokens that add up to this probability")
    seed: int = Field(
        0, ge=0, lt=1 << 64, description="the same seed gives the same tokens", json_schema_extra=names(flag="--seed")
    )
    stop: tuple[str, ...] = Field((), description="texts that end an answer; they aren't part of it")


class ServeSection(Section):
    """What is served over HTTP, and to whom."""

    http: str = Field(
        "127.0.0.1:8080",
        description="where HTTP is answered (page, health, metrics), host:port; port 0 takes a free one; nowhere if "
        "empty",
        json_schema_extra=names(flag="--http-bind"),
    )
    token: SecretStr | None = Field(
        None,
        min_length=16,
        description="what HTTP clients must show, at least 16 characters; needed where other machines can reach it",
    )


class ModelSection(Section):
    """Which model is served, and where it is kept."""

    source: str = Field(
        "",
        description="the model: a path, pkg:package/file.gguf, hf:owner/repo/file.gguf[@revision] or an https: URL",
        json_schema_extra=names("MYELIN_MODEL", flag="--model"),
    )
    gguf_repo: str = Field(
        DEFAULT_REPOSITORY,
        description="repository on the Hugging Face Hub",
        json_schema_extra=names("MYELIN_GGUF_REPO", flag="--gguf-repo"),
    )
    gguf_file: str = Field(
        DEFAULT_FILE,
        description="file in that repository",
        json_schema_extra=names("MYELIN_GGUF_FILE", flag="--gguf-file"),
    )
    gguf_revision: str = Field(
        "",
        description="branch, tag or commit of that repository; its main branch where it is empty",
        json_schema_extra=names("MYELIN_GGUF_REVISION", flag="--gguf-revision"),
    )
    gguf_local_path: OptionalPath = Field(
        None,
        description="a GGUF file on this machine, instead of the repository",
        json_schema_extra=names("MYELIN_GGUF_LOCAL_PATH", flag="--gguf-local-path"),
    )
    cached_model_host_path: OptionalPath = Field(
        None,
        description="a copy of the repository's file (or the folder that has it) that is used in place of fetching it",
        json_schema_extra=names("MYELIN_CACHED_MODEL_HOST_PATH", flag="--cached-model-host-path"),
    )
    tokenizer_local_path: OptionalPath = Field(
        None,
        description="a tokenizer.json to use instead of the model's own tokenizer",
        json_schema_extra=names("MYELIN_TOKENIZER_LOCAL_PATH"),
    )
    cache_dir: FolderPath = Field(
        default_factory=lambda: user_cache_path("myelin") / "models",
        description="folder where fetched parts of models are kept",
    )
    hub_cache_dir: OptionalPath = Field(
        default_factory=lambda: default_hub_cache(os.environ),
        description="where the Hub's own tools keep files, which are used in place; nowhere if empty",
        json_schema_extra=names("HF_HUB_CACHE"),
    )
    token: SecretStr | None = Field(None, description="for gated repositories", json_schema_extra=names("HF_TOKEN"))
    offline: bool = Field(
        False, description="use only what is on disk", json_schema_extra=names("MYELIN_OFFLINE", "HF_HUB_OFFLINE")
    )
    hub_endpoint: str = Field(
        "https://huggingface.co", description="base URL of the Hub", json_schema_extra=names("HF_ENDPOINT")
    )


class ObservabilitySection(Section):
    """What is recorded of a run."""

    trace_file: OptionalPath = Field(
        None,
        description="file to which spans are written as OTLP JSON lines",
        json_schema_extra=names("MYELIN_TRACE_FILE", flag="--trace-file"),
    )
    telemetry_frame_log: OptionalPath = Field(
        None,
        description="file to which spans, metrics and logs are written as OTLP JSON lines",
        json_schema_extra=names("MYELIN_TELEMETRY_FRAME_LOG", flag="--telemetry-frame-log"),
    )
    telemetry_frame_log_mb: int = Field(
        64, ge=0, description="megabytes at which that file is put aside (three older ones are kept); 0 lets it grow"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "warning",
        description="what is told on stderr: info adds the phases, debug also what the nodes write",
        json_schema_extra=names("MYELIN_LOG_LEVEL", flag="--log-level"),
    )


CORE_SECTIONS: dict[str, type[Section]] = {
    "runtime": RuntimeSection,
    "provider": ProviderSection,
    "relay": RelaySection,
    "prompt": PromptSection,
    "serve": ServeSection,
    "model": ModelSection,
    "observability": ObservabilitySection,
}
"""Myelin's own sections, by their names in ``myelin.toml``."""
