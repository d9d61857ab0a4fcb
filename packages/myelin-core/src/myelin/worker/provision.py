"""Loading a stage: from the orchestrator's request to an engine that is ready."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pydantic import SecretStr

from myelin.cluster.boot import CORES_VARIABLE
from myelin.config.hub_cache import default_hub_cache
from myelin.engine.contract import Engine, EngineOptions, LoadReport, Progress
from myelin.errors import ModelError, WireError
from myelin.model.opening import close_all
from myelin.model.shard import ByteSource, ShardPlan, StageSlice
from myelin.model.source import PUBLIC_HUB, ModelSource, SourceOptions
from myelin.wire.control_pb2 import Provision
from myelin.worker.segments import BatchLimits
from myelin.worker.stage import LoadedStage

if TYPE_CHECKING:
    from myelin.model.facts import ModelFacts
    from myelin.model.remote.fetch import ShardFetch
    from myelin.model.shard import ShardReader

MAX_POSITIONS = 1 << 31
"""Above any context; positions and row counts stay within 32 bits."""


class StagePlugins(Protocol):
    """What loading asks of the plugin registry."""

    def engine(self, name: str, options: EngineOptions) -> Engine:
        """Make the engine ``name``."""

    def model_source(self, uri: str, options: SourceOptions) -> ModelSource:
        """The source that recognises ``uri``."""


@dataclass(frozen=True, slots=True)
class StageRequest:
    """A checked :class:`Provision`: which model, which layers, which engine.

    Attributes:
        model_uri: The model's source.
        engine: The engine's name.
        options: The engine's.
        index, count: Which stage of how many.
        first_layer, end_layer: Its layers, ``[first, end)``.
        end_tokens: Ids that end a generation.
        cache_dir: Where remote files are kept.
        part_sizes: Bytes of the model's parts as the orchestrator saw them; empty where it doesn't say.
        header_digest: The fingerprint of the model's headers as the orchestrator saw them; empty where it doesn't say.
        part_fingerprints: Which version of each part the orchestrator saw; empty where its source can't tell.
        facts: Summary of the header of those versions; empty where it isn't given.
    """

    model_uri: str
    engine: str
    options: EngineOptions
    index: int
    count: int
    first_layer: int
    end_layer: int
    end_tokens: frozenset[int]
    cache_dir: Path
    part_sizes: tuple[int, ...]
    header_digest: bytes
    part_fingerprints: tuple[str, ...] = ()
    facts: bytes = b""


def stage_request(
    message: Provision, *, default_engine: str, default_cache_dir: Path, default_threads: int
) -> StageRequest:
    """Check what the orchestrator asked for, and put this node's own words where it left something open.

    Raises:
        WireError: A number is out of range, or numbers contradict each other.
    """
    options = message.options
    for name, value in (
        ("max_context", options.max_context),
        ("max_sequences", options.max_sequences),
        ("max_batch_tokens", options.max_batch_tokens),
    ):
        if not 1 <= value <= MAX_POSITIONS:
            raise WireError(f"a stage was asked for with {name} {value}")
    if not 0 <= message.stage_index < message.stage_count:
        raise WireError(f"stage {message.stage_index} was asked for, of {message.stage_count}")
    if not message.first_layer < message.end_layer:
        raise WireError(f"layers {message.first_layer} to {message.end_layer} were asked for")
    if (message.first_layer == 0) != (message.stage_index == 0):
        raise WireError(f"stage {message.stage_index} was asked for from layer {message.first_layer}")
    return StageRequest(
        model_uri=message.model_uri,
        engine=message.engine or default_engine,
        options=EngineOptions(
            threads=options.threads or default_threads,
            max_context=options.max_context,
            max_sequences=options.max_sequences,
            max_batch_tokens=options.max_batch_tokens,
            kv_dtype=options.kv_dtype or EngineOptions().kv_dtype,
            memory_bytes=options.memory_bytes,
        ),
        index=message.stage_index,
        count=message.stage_count,
        first_layer=message.first_layer,
        end_layer=message.end_layer,
        end_tokens=frozenset(message.end_tokens),
        cache_dir=Path(message.model_cache_dir) if message.model_cache_dir else default_cache_dir,
        part_sizes=tuple(message.part_sizes),
        header_digest=message.header_digest,
        part_fingerprints=tuple(message.part_fingerprints),
        facts=message.facts,
    )


def source_options(cache_dir: Path, environment: Mapping[str, str]) -> SourceOptions:
    """What sources may use on this node, by the Hub's own variables."""
    token = environment.get("HF_TOKEN", "")
    offline = environment.get("HF_HUB_OFFLINE", "").strip().lower() in ("1", "true", "yes", "on")
    return SourceOptions(
        cache_dir=cache_dir,
        token=SecretStr(token) if token else None,
        offline=offline,
        hub_endpoint=environment.get("HF_ENDPOINT", "").rstrip("/") or PUBLIC_HUB,
        hub_cache_dir=default_hub_cache(environment),
    )


def load_stage(
    request: StageRequest, plugins: StagePlugins, environment: Mapping[str, str], progress: Progress
) -> LoadedStage:
    """Open the model, check that it is the one that was planned, and have the engine load its stage.

    Blocking; called on the thread that will own the engine. Progress phases: ``open``, ``fetch``, then the engine's.

    Raises:
        ModelError: The model can't be opened, or it is another one than the orchestrator planned.
        EngineError: The engine can't load it.
        MyelinError: Anything else that a plugin says.
    """
    from myelin.model.architecture import describe
    from myelin.model.shard import ShardReader, plan_shard

    progress("open", 0, 0)
    source = plugins.model_source(request.model_uri, source_options(request.cache_dir, environment))
    parts = source.open(lambda done, total: progress("fetch", done, total))
    try:
        sizes = tuple(part.size for part in parts)
        if request.part_sizes and sizes != request.part_sizes:
            raise _another_model(f"its files have {_listed(sizes)} bytes here, {_listed(request.part_sizes)} there")
        facts = _facts(request, parts)
        parameters = describe(facts)
        if request.end_layer > parameters.n_layers:
            raise _another_model(f"it has {parameters.n_layers} layers here, and layer {request.end_layer - 1} is due")
        stage = StageSlice(request.first_layer, request.end_layer, parameters.n_layers)
        if stage.is_tail != (request.index == request.count - 1):
            raise _another_model(f"stage {request.index} of {request.count} ends with layer {request.end_layer}")
        reader = ShardReader(facts, parameters, stage, parts)
        shard = plan_shard(facts, parameters, stage)
        engine = plugins.engine(request.engine, request.options)
        try:
            report, network_bytes = _fetch_and_load(engine, reader, parts, shard, progress)
        except BaseException:
            engine.close()
            raise
    except BaseException:
        close_all(parts)
        raise
    return LoadedStage(
        engine=engine,
        slice=stage,
        index=request.index,
        count=request.count,
        width=parameters.width,
        vocab_size=parameters.vocab_size,
        limits=BatchLimits(
            request.options.max_context, request.options.max_sequences, request.options.max_batch_tokens
        ),
        end_tokens=request.end_tokens,
        report=report,
        fetched_bytes=reader.bytes_read,
        threads=request.options.threads,
        close_model=lambda: close_all(parts),
        shard=shard,
        network_bytes=network_bytes,
    )


def _facts(request: StageRequest, parts: tuple[ByteSource, ...]) -> ModelFacts:
    """What the header says: as the orchestrator summed it up where these are the same versions of the same files, and
    read here otherwise."""
    from myelin.model.digest import header_digest
    from myelin.model.gguf import read_facts
    from myelin.model.shard import fingerprints
    from myelin.model.summary import unpack_facts

    if request.facts and request.part_fingerprints and fingerprints(parts) == request.part_fingerprints:
        return unpack_facts(request.facts)
    facts = read_facts(parts)
    if request.header_digest and header_digest(facts, parts) != request.header_digest:
        raise _another_model("its header differs")
    return facts


def _fetch_and_load(
    engine: Engine, reader: ShardReader, parts: tuple[ByteSource, ...], shard: ShardPlan, progress: Progress
) -> tuple[LoadReport, int]:
    """Load the stage; what is on another machine comes meanwhile, and each tensor is read as soon as it is there.

    Returns:
        The engine's report, and what came over the network.
    """
    from myelin.model.remote.fetch import ShardFetch, is_remote

    if not any(is_remote(part) for part in parts):
        return engine.load(reader, progress), 0
    told = _FetchingProgress(progress)
    fetch = ShardFetch(parts, shard.ranges, told.fetch)
    told.watched = fetch
    try:
        report = engine.load(reader, told.load)
        fetch.wait()
    except BaseException:
        fetch.stop()
        raise
    progress("load", shard.tensor_bytes, shard.tensor_bytes)
    return report, fetch.fetched_bytes


class _FetchingProgress:
    """One story out of two: while bytes come, how many have; what the engine does with them, afterwards."""

    def __init__(self, progress: Progress) -> None:
        self.watched: ShardFetch | None = None
        self._progress = progress

    def fetch(self, done: int, total: int) -> None:
        """Bytes have come."""
        self._progress("fetch", done, total)

    def load(self, phase: str, done: int, total: int) -> None:
        """The engine got further: what it waits for meanwhile is told instead."""
        if phase != "load" or self.watched is None or self.watched.finished:
            self._progress(phase, done, total)


def node_cores(environment: Mapping[str, str]) -> int:
    """Cores that are this node's to use: its part, where its provider has told it one, or all that it may use."""
    told = environment.get(CORES_VARIABLE, "")
    if told.isascii() and told.isdigit() and int(told) > 0:
        return int(told)
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS, Windows
        return os.cpu_count() or 1


def _listed(sizes: tuple[int, ...]) -> str:
    return " + ".join(f"{size:,}" for size in sizes)


def _another_model(why: str) -> ModelError:
    return ModelError(
        f"this node opened another model than the one that was planned: {why}",
        "make sure that every node has the same revision of the model's files",
        reason="different-model",
    )
