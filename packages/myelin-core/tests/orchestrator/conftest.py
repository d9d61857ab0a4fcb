"""A whole run in one process: nodes are tasks, streams are in memory, the model is a toy on disk.

A node is whatever a test says: a real worker agent, or a script that misbehaves.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from myelin.cluster.provider import BootSpec, LaunchKey, Provider, ProviderContext
from myelin.engine.contract import EngineOptions
from myelin.model.source import SourceOptions
from myelin.orchestrator.events import NodeEvent, NodeLog, PhaseEvent, ProgressEvent
from myelin.orchestrator.request import RunRequest
from myelin.plugins.registry import Registry
from myelin.plugins.specs import TelemetryContext
from myelin.telemetry.hub import TelemetryHub
from myelin.telemetry.tracing import Tracing
from myelin.transport.contract import CONTROL_PROTOCOL, Endpoint, MessageStream, PeerIdentity, TransportOptions
from myelin.transport.memory import MemoryTransport
from myelin.values import LeaseId, NodeId, RunId
from myelin.wire import control_pb2 as pb
from myelin.wire.codec import decode, encode
from myelin.worker.main import run_worker
from myelin_testkit.memory_provider import Announce, Cloud, Life, Machine, MemoryProvider, Say
from myelin_testkit.synthetic import Recipe, write_model


class TaskProvider(MemoryProvider):
    """The testkit's provider, whose nodes are tasks of this loop, with short names for what tests look at."""

    def __init__(self, life: Life) -> None:
        super().__init__(RunId("test-run"), Cloud(life))

    @property
    def life(self) -> Life:
        """What a node does."""
        return self.cloud.life

    @life.setter
    def life(self, life: Life) -> None:
        self.cloud.life = life

    @property
    def started(self) -> list[LaunchKey]:
        """Every launch key, in order."""
        return self.cloud.started

    @property
    def running(self) -> dict[LeaseId, Machine]:
        """What is not released yet."""
        return self.cloud.running

    def kill(self, node: NodeId | str) -> None:
        """End a node as SIGKILL would: without a word."""
        self.cloud.kill(node)


class ToyRegistry(Registry):
    """The real registry, with a provider of ours and spans kept in memory."""

    provider_of_ours: Provider
    exporter: InMemorySpanExporter
    extra_exporters: tuple[object, ...] = ()

    def provider(self, name: str, context: ProviderContext) -> Provider:
        return self.provider_of_ours

    def require(self, wanted: Mapping[str, object]) -> None:  # type: ignore[override]  # the provider has no entry point
        super().require({group: names for group, names in wanted.items() if group != "myelin.providers"})

    def telemetry(self, context: TelemetryContext, *rest: object) -> tuple[InMemorySpanExporter, ...]:
        return (self.exporter, *self.extra_exporters)


class Recorder:
    """An observer that keeps everything."""

    def __init__(self) -> None:
        self.phases: list[PhaseEvent] = []
        self.progresses: list[ProgressEvent] = []
        self.logs: list[NodeLog] = []
        self.nodes: list[NodeEvent] = []
        self.on_started: dict[str, Callable[[], None]] = {}

    def phase(self, event: PhaseEvent) -> None:
        self.phases.append(event)
        if event.state == "started" and event.phase in self.on_started:
            self.on_started[event.phase]()

    def node(self, event: NodeEvent) -> None:
        self.nodes.append(event)

    def progress(self, event: ProgressEvent) -> None:
        self.progresses.append(event)

    def log(self, event: NodeLog) -> None:
        self.logs.append(event)

    def ended(self, state: str = "done") -> list[str]:
        """Phases that ended in ``state``, in that order."""
        return [event.phase for event in self.phases if event.state == state]


@dataclass
class Toy:
    """Everything that a test of a run needs."""

    request: RunRequest
    registry: ToyRegistry
    provider: TaskProvider
    recorder: Recorder
    exporter: InMemorySpanExporter

    def ask(self, **changes: object) -> RunRequest:
        """The request with some changes."""
        return replace(self.request, **changes)


@pytest.fixture(scope="session")
def toy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of 4 layers with random weights."""
    path = tmp_path_factory.mktemp("model") / "toy.gguf"
    recipe = Recipe(
        n_layers=4, width=64, n_heads=4, n_kv_heads=2, head_dim=16, ffn_width=64, vocab_size=301, context_length=64
    )
    return write_model(recipe, path)[0]


async def real_worker(boot: BootSpec, announce: Announce, say: Say) -> None:
    """A real agent in this loop."""
    code = await run_worker(boot, Registry.discover(), on_listening=announce, parent_gone=asyncio.Event())
    if code:
        raise RuntimeError(f"exit code {code}")


@pytest.fixture
def toy(toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toy:
    """A run of two stages of the toy model by the reference engine."""
    for name in ("OTEL_SDK_DISABLED", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_EXPORTER"):
        monkeypatch.delenv(name, raising=False)
    # Nobody is away in these tests: what a run tells of itself arrives, however busy the machine is.
    monkeypatch.setattr(Tracing.shutdown, "__defaults__", (60.0,))
    monkeypatch.setattr(TelemetryHub.close, "__defaults__", (60.0,))
    monkeypatch.setattr("myelin.worker.telemetry.FINISH_SECONDS", 20.0)
    registry = ToyRegistry.discover()
    assert isinstance(registry, ToyRegistry)
    provider = TaskProvider(real_worker)
    registry.provider_of_ours = provider
    registry.exporter = InMemorySpanExporter()
    request = RunRequest(
        run=RunId("test-run"),
        model_uri=str(toy_model),
        stages=2,
        source_options=SourceOptions(tmp_path / "cache"),
        engine_options=EngineOptions(threads=1, max_context=0, max_sequences=2, max_batch_tokens=32),
        provider="tasks",
        engine="reference",
        transport="memory",
        startup_timeout_s=60.0,
        load_stall_s=60.0,
        stop_grace_s=1.0,
    )
    return Toy(request, registry, provider, Recorder(), registry.exporter)


class ScriptedNode:
    """A node that does as a test says, message by message.

    Args:
        answers: By the body's name: a function of the message to what is answered, one or more envelopes, or nothing.
            What isn't named is answered as a good node would.
        identity: Who it claims to be in its Welcome; by default, who it was meant to be.
    """

    def __init__(
        self,
        answers: Mapping[str, Callable[[pb.Envelope], Sequence[pb.Envelope] | pb.Envelope | None]] | None = None,
        *,
        welcome: Callable[[BootSpec], pb.Welcome] | None = None,
    ) -> None:
        self.answers = dict(answers or {})
        self.welcome = welcome or (lambda boot: pb.Welcome(run=boot.run, node=boot.node, attempt=boot.attempt))
        self.received: list[str] = []
        self.envelopes: list[pb.Envelope] = []
        self.got: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    async def __call__(self, boot: BootSpec, announce: Announce, say: Say) -> None:
        options = TransportOptions(PeerIdentity(boot.run, boot.node, boot.attempt), boot.secret)
        transport, done = MemoryTransport(options), asyncio.Event()

        async def control(stream: MessageStream) -> None:
            while True:
                envelope = decode(await stream.receive())
                kind = envelope.WhichOneof("body")
                assert kind is not None
                self.received.append(kind)
                self.got[kind].set()
                self.envelopes.append(envelope)
                for answer in self._answers(boot, kind, envelope):
                    await stream.send(encode(answer))
                    if answer.WhichOneof("body") == "goodbye":
                        done.set()

        async def no_edge(stream: MessageStream) -> None:
            await asyncio.Event().wait()

        listener = await transport.listen(boot.bind, {CONTROL_PROTOCOL: control, "myelin/edge/1": no_edge})
        try:
            announce(Endpoint((listener.address,)))
            await done.wait()
        finally:
            await listener.close()
            await transport.close()

    def _answers(self, boot: BootSpec, kind: str, envelope: pb.Envelope) -> Sequence[pb.Envelope]:
        if kind in self.answers:
            answer = self.answers[kind](envelope)
            return () if answer is None else (answer,) if isinstance(answer, pb.Envelope) else answer
        good = {
            "hello": lambda: pb.Envelope(welcome=self.welcome(boot)),
            "ready_query": lambda: pb.Envelope(
                ready_ack=pb.ReadyAck(nonce=envelope.ready_query.nonce, attempt=boot.attempt)
            ),
            "provision": lambda: pb.Envelope(provisioned=pb.Provisioned(id=envelope.provision.id, weight_bytes=1)),
            "open_edges": lambda: pb.Envelope(edges_open=pb.EdgesOpen(epoch=envelope.open_edges.epoch)),
            "status_query": lambda: pb.Envelope(status=pb.Status()),
            "shutdown": lambda: pb.Envelope(goodbye=pb.Goodbye()),
        }
        return (good[kind](),)


@pytest.fixture
def scripted() -> type[ScriptedNode]:
    """Makes nodes that do as the test says."""
    return ScriptedNode
