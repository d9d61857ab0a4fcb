"""A provision on its node: what it asks for is loaded once, and told as often as the orchestrator asks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from contextvars import copy_context
from pathlib import Path

from myelin.engine.contract import Progress as EngineProgress
from myelin.errors import MyelinError, NodeError
from myelin.telemetry import attributes
from myelin.telemetry.tracing import span
from myelin.wire.control_pb2 import Envelope, Progress, Provision, Provisioned
from myelin.worker.context import NodeContext
from myelin.worker.control import ControlLink, failure
from myelin.worker.engine_thread import EngineThread
from myelin.worker.placement import keep_to, own_cores
from myelin.worker.provision import StagePlugins, StageRequest, node_cores, stage_request
from myelin.worker.stage import LoadedStage
from myelin.worker.telemetry import LoadSpans

PROGRESS_SECONDS = 0.15
"""Progress is told this often while a stage is being loaded."""

Loader = Callable[[StageRequest, StagePlugins, Mapping[str, str], EngineProgress], LoadedStage]


class _Loading:
    """One provision: what is being loaded, how far it is, and how it ended."""

    def __init__(self, identifier: int, content: bytes) -> None:
        self.id = identifier
        self.content = content
        self.phase = "open"
        self.done = 0
        self.total = 0
        self.answer: Envelope | None = None

    @property
    def ok(self) -> bool:
        """Whether it is under way, or has ended well."""
        return self.answer is None or self.answer.WhichOneof("body") == "provisioned"

    def ask(self, identifier: int) -> None:
        """The same content was asked for, perhaps by another number: answers bear that one from now on."""
        self.id = identifier
        if self.answer is not None and self.ok:
            self.answer.provisioned.id = identifier

    def progress(self) -> Envelope:
        """How far it is."""
        return Envelope(progress=Progress(id=self.id, phase=self.phase, done=self.done, total=self.total))


class StageLoading:
    """What one node loads, and what it answers about it. The event loop owns it.

    Args:
        node: Whose.
        plugins: Engines and sources; asked on the engine's thread.
        loader: Loads a stage; blocking, on the engine's thread.
        start: Runs work until it is done or the node ends.
        tell: Tells the orchestrator, if it listens.
        on_loaded: Given the stage before the orchestrator is told of it.

    Attributes:
        loaded: The stage, once it is loaded.
    """

    def __init__(
        self,
        node: NodeContext,
        plugins: StagePlugins,
        loader: Loader,
        *,
        start: Callable[[Coroutine[None, None, None]], object],
        tell: Callable[[Envelope], None],
        on_loaded: Callable[[LoadedStage], None],
    ) -> None:
        self._node = node
        self._plugins = plugins
        self._loader = loader
        self._start = start
        self._tell = tell
        self._on_loaded = on_loaded
        self._loading: _Loading | None = None
        self.loaded: LoadedStage | None = None

    def begin(self, link: ControlLink, message: Provision, traceparent: str, thread: EngineThread) -> None:
        """Begin to load, or answer again what is known of it already."""
        loading, content = self._loading, _content(message)
        if loading is not None and loading.content == content and (loading.id == message.id or loading.ok):
            # Asked again; by another orchestrator, perhaps, which then need not wait for what is loaded already.
            loading.ask(message.id)
            link.tell(loading.answer or loading.progress())
            return
        if self.loaded is not None or (loading is not None and (loading.answer is None or loading.id == message.id)):
            error = NodeError(
                f"provision {message.id} came to a node that has provision {loading.id if loading else 0} at work",
                "start another node for another stage",
                reason="already-provisioned",
            )
            link.tell(failure(error))
            return
        self._loading = _Loading(message.id, content)
        link.tell(self._loading.progress())
        self._start(self._load(self._loading, message, traceparent, thread))

    async def _load(self, loading: _Loading, message: Provision, traceparent: str, thread: EngineThread) -> None:
        ticker = asyncio.create_task(self._tick(loading))
        began = time.perf_counter()
        try:
            with span(self._node.tracer, "worker.provision", self._node.fields, parent=traceparent) as current:
                request = stage_request(
                    message,
                    default_engine=self._node.boot.engine,
                    default_cache_dir=Path(self._node.environment.get("MYELIN_MODEL_CACHE_DIR") or _default_cache()),
                    default_threads=node_cores(self._node.environment),
                )
                current.set_attributes(
                    {
                        attributes.MODEL: request.model_uri,
                        attributes.ENGINE: request.engine,
                        attributes.STAGE: request.index,
                        attributes.FIRST_LAYER: request.first_layer,
                        attributes.END_LAYER: request.end_layer,
                    }
                )
                self._node.log.info(
                    "loading",
                    model=request.model_uri,
                    engine=request.engine,
                    stage=request.index,
                    layers=[request.first_layer, request.end_layer],
                )
                # Before memory is touched: where a machine has several, it is then the one next to these cores.
                keep_to(own_cores(self._node.environment, request.options.threads))
                loaded = await self._load_on_thread(loading, request, thread)
        except MyelinError as error:
            self._node.log.error("loading failed", reason=error.reason, message=error.message)
            loading.answer = failure(error)
        except Exception as error:
            self._node.log.error("loading failed", error=error)
            loading.answer = failure(error)
        else:
            seconds = time.perf_counter() - began
            self.loaded = loaded
            self._on_loaded(loaded)
            self._node.log.info("loaded", seconds=round(seconds, 3), fetched_bytes=loaded.fetched_bytes)
            loading.answer = Envelope(
                provisioned=Provisioned(
                    id=loading.id,
                    weight_bytes=loaded.report.weight_bytes,
                    kv_bytes=loaded.report.kv_bytes,
                    fetched_bytes=loaded.fetched_bytes,
                    seconds=seconds,
                    threads=loaded.threads,
                )
            )
        finally:
            ticker.cancel()
        self._tell(loading.answer)

    async def _load_on_thread(self, loading: _Loading, request: StageRequest, thread: EngineThread) -> LoadedStage:
        loop = asyncio.get_running_loop()

        def progress(phase: str, done: int, total: int) -> None:
            """On the engine's thread: note it; a new phase is told at once, the rest as the ticker comes by."""
            spans.progress(phase, done, total)
            changed = phase != loading.phase
            loading.phase, loading.done, loading.total = phase, max(0, done), max(0, total)
            if changed:
                loop.call_soon_threadsafe(self._tell, loading.progress())

        with span(self._node.tracer, "worker.load", self._node.fields) as current:
            spans = LoadSpans(self._node.tracer, current, self._node.fields)
            try:
                loaded: LoadedStage = await thread.call(
                    copy_context().run, self._loader, request, self._plugins, self._node.environment, progress
                )
            except BaseException as error:
                spans.end(error)
                raise
            spans.end()
            current.set_attributes(
                {
                    attributes.WEIGHT_BYTES: loaded.report.weight_bytes,
                    attributes.KV_BYTES: loaded.report.kv_bytes,
                    attributes.FETCHED_BYTES: loaded.fetched_bytes,
                    attributes.SHARD_NETWORK_BYTES: loaded.network_bytes,
                    attributes.THREADS: loaded.threads,
                }
            )
            if loaded.shard is not None:
                current.set_attributes(
                    {
                        attributes.SHARD_RANGES: len(loaded.shard.ranges),
                        attributes.SHARD_BYTES: loaded.shard.range_bytes,
                        attributes.SHARD_FRACTION: loaded.shard.fraction,
                    }
                )
        return loaded

    async def _tick(self, loading: _Loading) -> None:
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            self._tell(loading.progress())


def _content(message: Provision) -> bytes:
    """What a provision asks for, whatever its number; equal for equal content within one version of the library."""
    content = Provision()
    content.CopyFrom(message)
    content.id = 0
    return content.SerializeToString(deterministic=True)


def _default_cache() -> str:
    import platformdirs

    return str(platformdirs.user_cache_path("myelin") / "models")
