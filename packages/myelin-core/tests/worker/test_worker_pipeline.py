"""Whole pipelines: agents in one process over the memory transport, with an engine whose arithmetic is exact."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import SecretStr

from myelin.cluster.provider import BootSpec
from myelin.engine.contract import LoadReport, Progress, Sample, Segment, StageBatch, StageOutput
from myelin.errors import EngineError, ModelError, StreamClosed, TransportError
from myelin.model.shard import StageSlice
from myelin.telemetry.tracing import Tracing, configure_tracing
from myelin.transport import memory
from myelin.transport.contract import (
    CONTROL_PROTOCOL,
    EDGE_PROTOCOL,
    ORCHESTRATOR,
    Endpoint,
    MessageStream,
    PeerIdentity,
    TransportOptions,
)
from myelin.transport.memory import MemoryTransport
from myelin.values import Attempt, Epoch, FinishReason, NodeId, RunId, SamplingParams, SequenceId
from myelin.wire import control_pb2 as control
from myelin.wire.codec import decode, encode
from myelin.wire.record import PayloadType, Record, RecordFlags, RecordKind, pack, unpack
from myelin.wire.requests import (
    Fault,
    Finished,
    NewToken,
    Submit,
    cancel_record,
    read_fault,
    read_finished,
    read_tokens,
    submit_record,
)
from myelin.worker.agent import Agent
from myelin.worker.control import DEFAULT_PATIENCE, Patience
from myelin.worker.provision import StageRequest
from myelin.worker.segments import BatchLimits, pack_batch
from myelin.worker.stage import LoadedStage

RUN = RunId("run")
SECRET = SecretStr("a secret of this run")
LAYERS = 6
WIDTH = 3
VOCABULARY = 101
PRIME = 65_521
Event = NewToken | Finished | Fault


# A model with a memory, whose every number is a small integer: exact in float32, wherever it is cut.


def layer(number: int, value: int, held: int) -> int:
    return (value * 31 + number * 7 + held) % PRIME


def expected_tokens(prompt: tuple[int, ...], count: int, seed: int = 0) -> list[int]:
    """The slow, obvious twin of the engine below."""
    memory = [0] * LAYERS
    tokens: list[int] = []
    history = list(prompt)
    for position in range(len(prompt) + count - 1):
        value = history[position] + 1
        for number in range(LAYERS):
            memory[number] = (memory[number] + value) % PRIME
            value = layer(number, value, memory[number])
        if position >= len(prompt) - 1:
            tokens.append((value + seed) % VOCABULARY)
            history.append(tokens[-1])
    return tokens


class ToyEngine:
    """Keeps, for each sequence and layer, the running sum of what it saw; the contract's bounds are checked."""

    def __init__(self, stage: StageSlice, limits: BatchLimits) -> None:
        self.stage = stage
        self.limits = limits
        self.memory: dict[int, list[list[int]]] = {}  # sequence: for each position, the sums of its layers
        self.released: list[int] = []
        self.seen: set[int] = set()
        self.batches: list[StageBatch] = []
        self.most_sequences_in_a_batch = 0
        self.thread = 0
        self.closed = False
        self.fail_at_step = -1
        self.steps = 0
        self.hold: threading.Event | None = None
        self.output_hidden: NDArray[np.float32] | None = None

    def load(self, shard: Any, progress: Progress) -> LoadReport:
        raise AssertionError("loaded by the test")

    def step(self, batch: StageBatch) -> StageOutput:
        self._same_thread()
        if self.hold is not None:
            self.hold.wait(5)
        self.steps += 1
        self.batches.append(batch)
        if self.steps == self.fail_at_step:
            raise EngineError("a wire came loose", "plug it in", reason="loose-wire")
        rows = sum(segment.count for segment in batch.segments)
        assert 1 <= rows <= self.limits.max_batch_tokens
        self.most_sequences_in_a_batch = max(self.most_sequences_in_a_batch, len(batch.segments))
        if self.stage.is_head:
            assert batch.tokens is not None
            assert batch.hidden is None
            values = [int(token) + 1 for token in batch.tokens]
        else:
            assert batch.tokens is None
            assert batch.hidden is not None
            assert batch.hidden.shape == (rows, WIDTH)
            assert batch.hidden.flags.writeable
            values = [int(value) for value in batch.hidden[:, 0]]
            batch.hidden[:] = -1  # an engine may
        samples = []
        row = 0
        for segment in batch.segments:
            self.seen.add(segment.sequence)
            positions = self.memory.setdefault(segment.sequence, [])
            assert segment.start == len(positions), "positions are consecutive"
            for _ in range(segment.count):
                sums = list(positions[-1]) if positions else [0] * (self.stage.end_layer - self.stage.first_layer)
                for index, number in enumerate(range(self.stage.first_layer, self.stage.end_layer)):
                    sums[index] = (sums[index] + values[row]) % PRIME
                    values[row] = layer(number, values[row], sums[index])
                positions.append(sums)
                row += 1
            assert len(positions) <= self.limits.max_context
            if segment.output and self.stage.is_tail:
                token = (values[row - 1] + segment.sampling.seed) % VOCABULARY
                samples.append(Sample(segment.sequence, segment.start + segment.count, token, -0.25))
        assert len(self.memory) <= self.limits.max_sequences
        if self.stage.is_tail:
            return StageOutput(samples=tuple(samples))
        if self.output_hidden is not None:
            return StageOutput(hidden=self.output_hidden)
        hidden = np.zeros((rows, WIDTH), dtype=np.float32)
        hidden[:, 0] = values
        return StageOutput(hidden=hidden)

    def release(self, sequence: SequenceId) -> None:
        self._same_thread()
        self.released.append(sequence)
        self.memory.pop(sequence, None)

    def close(self) -> None:
        self._same_thread()
        self.closed = True

    def _same_thread(self) -> None:
        self.thread = self.thread or threading.get_ident()
        assert threading.get_ident() == self.thread, "an engine belongs to one thread"
        assert threading.current_thread() is not threading.main_thread(), "the event loop never computes"


class MemoryPlugins:
    """A registry that knows the memory transport alone; the tests bring their own loader."""

    def transport(self, name: str, options: TransportOptions) -> MemoryTransport:
        return MemoryTransport(options)

    def engine(self, name: str, options: Any) -> Any:
        raise AssertionError("the tests load by themselves")

    def model_source(self, uri: str, options: Any) -> Any:
        raise AssertionError("the tests load by themselves")


class Node:
    """One agent, and the orchestrator's control stream to it."""

    def __init__(
        self,
        index: int,
        patience: Patience = DEFAULT_PATIENCE,
        tracing: Tracing | None = None,
    ) -> None:
        self.name = NodeId(f"stage-{index}")
        boot = BootSpec(RUN, self.name, Attempt(1), SECRET, transport="memory", engine="toy", bind="memory:")
        self.engine: ToyEngine | None = None
        self.loads = 0
        self.load_delay = 0.0
        self.load_error: Exception | None = None
        self.agent = Agent(boot, MemoryPlugins(), patience=patience, tracing=tracing, loader=self._load)
        self.endpoint: asyncio.Future[Endpoint] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(self.agent.run(self.endpoint.set_result))
        self.control: MessageStream | None = None

    def _load(self, request: StageRequest, plugins: Any, environment: Mapping[str, str], progress: Progress) -> Any:
        self.loads += 1
        progress("load", 0, 100)
        threading.Event().wait(self.load_delay)
        if self.load_error is not None:
            raise self.load_error
        progress("load", 100, 100)
        stage = StageSlice(request.first_layer, request.end_layer, LAYERS)
        options = request.options
        limits = BatchLimits(options.max_context, options.max_sequences, options.max_batch_tokens)
        self.engine = ToyEngine(stage, limits)
        return LoadedStage(
            engine=self.engine,
            slice=stage,
            index=request.index,
            count=request.count,
            width=WIDTH,
            vocab_size=VOCABULARY,
            limits=limits,
            end_tokens=request.end_tokens,
            report=LoadReport(weight_bytes=1000, kv_bytes=500, seconds=0.1),
            fetched_bytes=1000,
            threads=1,
        )

    async def tell(self, **body: Any) -> None:
        """Send one message; ``traceparent`` may come with it."""
        assert self.control is not None
        await self.control.send(encode(control.Envelope(**body)))

    async def hear(self, wanted: str) -> Any:
        """The next message of this kind; progress may come between, nothing else."""
        assert self.control is not None
        while True:
            envelope = decode(await asyncio.wait_for(self.control.receive(), 60))
            kind = envelope.WhichOneof("body")
            if kind == wanted:
                return getattr(envelope, wanted)
            assert kind == "progress", f"{kind} came, not {wanted}: {envelope}"


def provision(index: int, cuts: tuple[int, ...], identifier: int = 1, **options: int) -> control.Provision:
    bounds = (0, *cuts, LAYERS)
    fields: dict[str, Any] = {"threads": 1, "max_context": 64, "max_sequences": 4, "max_batch_tokens": 32, **options}
    return control.Provision(
        id=identifier,
        model_uri="toy",
        engine="toy",
        options=control.EngineOptions(**fields),
        stage_index=index,
        stage_count=len(bounds) - 1,
        first_layer=bounds[index],
        end_layer=bounds[index + 1],
    )


class Cluster:
    """The orchestrator of these tests: it does what the real one does, and nothing more."""

    def __init__(self, nodes: list[Node], transport: MemoryTransport) -> None:
        self.nodes = nodes
        self.transport = transport
        self.epoch = Epoch(0)
        self.edge: MessageStream | None = None
        self.sent = 0
        self.inboxes: dict[int, asyncio.Queue[Event]] = {}
        self.faults: asyncio.Queue[Fault] = asyncio.Queue()
        self.reader: asyncio.Task[None] | None = None

    @property
    def engines(self) -> list[ToyEngine]:
        engines = [node.engine for node in self.nodes]
        assert all(engine is not None for engine in engines)
        return [engine for engine in engines if engine is not None]

    async def dial(self, node: Node) -> None:
        stream = await self.transport.connect(await node.endpoint, CONTROL_PROTOCOL, expect=node.name)
        node.control = stream
        await node.tell(hello=control.Hello(run=RUN, node=node.name, attempt=1, version="0"))
        welcome = await node.hear("welcome")
        assert (welcome.run, welcome.node, welcome.attempt) == (RUN, node.name, 1)
        assert welcome.process_id > 0
        assert welcome.memory_bytes >= welcome.memory_available_bytes > 0

    async def open(self, epoch: int) -> None:
        """Open an epoch on every node, then the edge to the head."""
        if self.edge is not None:
            await self.edge.close()
        if self.reader is not None:
            await self.reader
        self.epoch = Epoch(epoch)
        for index, node in enumerate(self.nodes):
            following = self.nodes[(index + 1) % len(self.nodes)]
            endpoint = await following.endpoint
            await node.tell(
                open_edges=control.OpenEdges(
                    epoch=epoch, next_node=following.name, next_candidates=list(endpoint.candidates)
                )
            )
        for node in self.nodes:
            assert (await node.hear("edges_open")).epoch == epoch
        head = self.nodes[0]
        self.edge = await self.transport.connect(await head.endpoint, EDGE_PROTOCOL, expect=head.name)
        self.sent = 0
        self.reader = asyncio.create_task(self._read(self.edge))

    async def _read(self, edge: MessageStream) -> None:
        received = 0
        while True:
            try:
                record = unpack(await edge.receive())
            except TransportError:
                return
            assert record.sequence == received
            received += 1
            assert record.epoch == self.epoch
            events: list[Event]
            if record.kind is RecordKind.TOKENS:
                events = list(read_tokens(record))
            elif record.kind is RecordKind.FINISHED:
                events = [read_finished(record)]
            else:
                fault = read_fault(record)
                if fault.sequence is None:
                    self.faults.put_nowait(fault)
                    continue
                events = [fault]
            for event in events:
                assert event.sequence is not None
                self.inboxes[event.sequence].put_nowait(event)

    async def send(self, record: Callable[[int], Record]) -> None:
        assert self.edge is not None
        number, self.sent = self.sent, self.sent + 1
        await self.edge.send(pack(record(number)))

    async def submit(self, submit: Submit, epoch: int = 0, flags: RecordFlags = RecordFlags.NONE) -> None:
        self.inboxes[submit.sequence] = asyncio.Queue()
        meant = Epoch(epoch or self.epoch)
        await self.send(lambda number: submit_record(submit, epoch=meant, sequence=number, flags=flags))

    async def cancel(self, sequence: int) -> None:
        await self.send(lambda number: cancel_record(SequenceId(sequence), epoch=self.epoch, sequence=number))

    async def next(self, sequence: int) -> Event:
        return await asyncio.wait_for(self.inboxes[sequence].get(), 60)

    async def rest(self, sequence: int) -> tuple[list[int], Event]:
        """The tokens that still come, and the end."""
        tokens = []
        while isinstance(event := await self.next(sequence), NewToken):
            tokens.append(event.token)
        return tokens, event

    async def released_everywhere(self) -> None:
        """Wait until no stage holds anything; then each sequence was released once on each stage that saw it."""
        async with asyncio.timeout(60):
            while any(engine.memory for engine in self.engines):  # noqa: ASYNC110 - engines set no events
                await asyncio.sleep(0.005)
        for engine in self.engines:
            assert sorted(engine.released) == sorted(engine.seen)


@asynccontextmanager
async def nodes(count: int, patience: Patience | None = None, tracing: Tracing | None = None) -> AsyncIterator[Cluster]:
    """Agents that listen and are dialled, with nothing loaded yet."""
    identity = PeerIdentity(RUN, ORCHESTRATOR, Attempt(1))
    transport = MemoryTransport(TransportOptions(identity, SECRET))
    cluster = Cluster([Node(index, patience or Patience(), tracing) for index in range(count)], transport)
    try:
        for node in cluster.nodes:
            await cluster.dial(node)
        yield cluster
    finally:
        for node in cluster.nodes:
            node.agent.stop("the test is over")
        await asyncio.wait_for(asyncio.gather(*(node.task for node in cluster.nodes), return_exceptions=True), 60)
        if cluster.reader is not None:
            cluster.reader.cancel()
        await transport.close()


@asynccontextmanager
async def pipeline(*cuts: int, **options: int) -> AsyncIterator[Cluster]:
    """A pipeline cut before these layers, with its first epoch open."""
    async with nodes(len(cuts) + 1) as cluster:
        for index, node in enumerate(cluster.nodes):
            await node.tell(provision=provision(index, cuts, **options))
        for node in cluster.nodes:
            assert (await node.hear("provisioned")).weight_bytes == 1000
        await cluster.open(1)
        yield cluster


CUTS = [(), (3,), (1,), (2, 4), (1, 5), (1, 2, 3, 4, 5)]


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("length", [1, 7, 8, 9, 40])
async def test_the_same_tokens_wherever_the_model_is_cut(cuts: tuple[int, ...], length: int) -> None:
    prompt = tuple((index * 17 + 3) % VOCABULARY for index in range(length))
    async with pipeline(*cuts) as cluster:
        await cluster.submit(Submit(SequenceId(5), prompt, 12))
        tokens = []
        for position in range(length, length + 12):
            event = await cluster.next(5)
            assert isinstance(event, NewToken)
            assert event.position == position
            tokens.append(event.token)
        assert tokens == expected_tokens(prompt, 12)
        assert await cluster.next(5) == Finished(SequenceId(5), FinishReason.LENGTH, 12)
        await cluster.released_everywhere()


async def test_sampling_reaches_the_tail() -> None:
    async with pipeline(2, 4) as cluster:
        sampling = SamplingParams(temperature=0.3, top_k=3, top_p=0.7, seed=41)
        await cluster.submit(Submit(SequenceId(1), (1, 2, 3), 5, sampling))
        assert (await cluster.rest(1))[0] == expected_tokens((1, 2, 3), 5, seed=41)
        tail = cluster.engines[-1]
        assert {segment.sampling for batch in tail.batches for segment in batch.segments} == {sampling}


@pytest.mark.parametrize("cuts", [(), (3,), (2, 4)])
async def test_many_streams_at_once(cuts: tuple[int, ...]) -> None:
    async with pipeline(*cuts, max_sequences=3) as cluster:
        prompts = {
            number: tuple((number * 13 + index) % VOCABULARY for index in range(number * 5)) for number in range(1, 9)
        }
        for number, prompt in prompts.items():
            await cluster.submit(Submit(SequenceId(number), prompt, 10 + number))
        for number, prompt in prompts.items():
            tokens, end = await cluster.rest(number)
            assert tokens == expected_tokens(prompt, 10 + number)
            assert end == Finished(SequenceId(number), FinishReason.LENGTH, 10 + number)
        await cluster.released_everywhere()
        assert all(engine.seen == set(prompts) for engine in cluster.engines)


async def test_an_end_token_ends_the_stream() -> None:
    tokens = expected_tokens((4, 5), 10)
    async with nodes(2) as cluster:
        for index, node in enumerate(cluster.nodes):
            message = provision(index, (3,))
            message.end_tokens.append(tokens[6])
            await node.tell(provision=message)
            await node.hear("provisioned")
        await cluster.open(1)
        await cluster.submit(Submit(SequenceId(1), (4, 5), 50))
        assert tokens[6] not in tokens[:6]
        assert await cluster.rest(1) == (tokens[:6], Finished(SequenceId(1), FinishReason.STOP, 6))
        await cluster.submit(Submit(SequenceId(2), (4, 5), 10, ignore_end=True))
        assert (await cluster.rest(2))[0] == tokens


@pytest.mark.parametrize("cuts", [(), (3,), (2, 4)])
async def test_cancelling_in_the_middle(cuts: tuple[int, ...]) -> None:
    async with pipeline(*cuts, max_context=5000) as cluster:
        await cluster.submit(Submit(SequenceId(1), (1, 2, 3), 4000))
        await cluster.submit(Submit(SequenceId(2), (7, 8, 9), 60))
        for _ in range(5):
            assert isinstance(await cluster.next(1), NewToken)
        await cluster.cancel(1)
        tokens, end = await cluster.rest(1)
        assert end == Finished(SequenceId(1), FinishReason.CANCELLED, 5 + len(tokens))
        await cluster.cancel(1)  # again: nothing happens
        await cluster.cancel(99)  # never heard of: nothing happens
        assert (await cluster.rest(2))[0] == expected_tokens((7, 8, 9), 60)
        await cluster.released_everywhere()


async def test_a_prompt_that_does_not_fit_is_refused_alone() -> None:
    async with pipeline(3) as cluster:
        await cluster.submit(Submit(SequenceId(1), (1,) * 64, 5))
        fault = await cluster.next(1)
        assert isinstance(fault, Fault)
        assert (fault.sequence, fault.reason) == (1, "prompt-too-long")
        await cluster.submit(Submit(SequenceId(2), (VOCABULARY,), 5))
        fault = await cluster.next(2)
        assert isinstance(fault, Fault)
        assert fault.reason == "token-out-of-range"
        await cluster.submit(Submit(SequenceId(3), (1,) * 63, 5))
        assert (await cluster.rest(3))[1] == Finished(SequenceId(3), FinishReason.LENGTH, 1)
        assert cluster.faults.empty()


async def test_a_dropped_edge_cancels_its_sequences() -> None:
    async with pipeline(2, 4, max_context=100_000) as cluster:
        await cluster.submit(Submit(SequenceId(1), (1, 2, 3), 90_000))
        await cluster.next(1)
        assert cluster.edge is not None
        await cluster.edge.close()
        await cluster.released_everywhere()


@pytest.mark.parametrize("failing", [0, 1, 2])
async def test_an_engine_fault_ends_the_pipeline(failing: int) -> None:
    async with pipeline(2, 4) as cluster:
        cluster.engines[failing].fail_at_step = 4
        await cluster.submit(Submit(SequenceId(1), (1, 2, 3), 50))
        fault = await asyncio.wait_for(cluster.faults.get(), 60)
        assert (fault.reason, fault.hint, fault.sequence) == ("loose-wire", "plug it in", None)
        told = await cluster.nodes[failing].hear("failure")
        assert (told.reason, told.message, told.fatal) == ("loose-wire", "a wire came loose", True)
        await cluster.submit(Submit(SequenceId(2), (1,), 5))
        later = await cluster.next(2)
        assert isinstance(later, Fault)
        assert later.reason == "pipeline-lost"
        await cluster.nodes[failing].tell(open_edges=control.OpenEdges(epoch=2))
        assert (await cluster.nodes[failing].hear("failure")).fatal


async def test_a_lost_node_is_told_to_the_orchestrator() -> None:
    async with pipeline(2, 4) as cluster:
        cluster.nodes[1].agent.stop("it was killed")
        fault = await asyncio.wait_for(cluster.faults.get(), 60)
        assert fault.reason == "edge-closed"
        told = await cluster.nodes[0].hear("failure")
        assert (told.reason, told.fatal, told.epoch) == ("edge-closed", False, 1)
        assert "stage-1" in told.message


@pytest.mark.parametrize("cuts", [(), (3,), (2, 4)])
async def test_a_new_epoch_begins_empty(cuts: tuple[int, ...]) -> None:
    async with pipeline(*cuts, max_context=100_000) as cluster:
        for number in (1, 2, 3):
            await cluster.submit(Submit(SequenceId(number), (number,), 90_000))
            await cluster.next(number)
        await cluster.open(2)
        await cluster.submit(Submit(SequenceId(10), (1, 2), 5), epoch=1)  # too late: of an older epoch
        for number in (11, 12, 13, 14):
            await cluster.submit(Submit(SequenceId(number), (number, 2), 60))
        for number in (11, 12, 13, 14):
            assert (await cluster.rest(number))[0] == expected_tokens((number, 2), 60)
        await cluster.released_everywhere()
        assert cluster.inboxes[10].empty()
        assert all(10 not in engine.seen for engine in cluster.engines)
        assert cluster.faults.empty()


async def test_a_newer_epoch_does_not_wait_for_an_older_one_at_a_dead_neighbour() -> None:
    """The neighbour takes the connection and says nothing, as a stopped process does."""
    async with pipeline(3) as cluster:
        first, taken = cluster.nodes[0], asyncio.Event()

        class Silent:
            """A listener whose handshake never ends."""

            def open(self, protocol: str, options: TransportOptions) -> Any:
                taken.set()
                return SilentStream()

        class SilentStream:
            def identify(self, peer: PeerIdentity) -> None:
                raise AssertionError("nobody is there")

            async def send(self, message: Any) -> None:
                await asyncio.Event().wait()

            async def receive(self) -> bytes:
                await asyncio.Event().wait()
                raise AssertionError

            async def abort(self, why: str) -> None:
                pass

            async def close(self) -> None:
                pass

        memory._listeners["memory:silent"] = Silent()
        try:
            await first.tell(
                open_edges=control.OpenEdges(epoch=2, next_node="stage-1", next_candidates=["memory:silent"])
            )
            await asyncio.wait_for(taken.wait(), 60)
            await asyncio.wait_for(cluster.open(3), 60)
        finally:
            del memory._listeners["memory:silent"]
        await cluster.submit(Submit(SequenceId(1), (1, 2), 5))
        assert (await cluster.rest(1))[0] == expected_tokens((1, 2), 5)


async def test_a_former_attempt_that_wakes_up_takes_no_edge_from_the_one_in_its_place() -> None:
    async with pipeline(3) as cluster:
        second = cluster.nodes[1]

        async def dial_as(attempt: int) -> MessageStream:
            identity = PeerIdentity(RUN, NodeId("stage-0"), Attempt(attempt))
            transport = MemoryTransport(TransportOptions(identity, SECRET))
            return await transport.connect(await second.endpoint, EDGE_PROTOCOL, expect=second.name)

        newer = await dial_as(2)
        zombie = await dial_as(1)
        with pytest.raises(StreamClosed):
            await asyncio.wait_for(zombie.receive(), 60)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(newer.receive(), 0.1)
        await newer.close()


async def test_who_dials_anew_hears_which_epoch_is_open() -> None:
    async with pipeline(3) as cluster:
        await cluster.open(5)
        for node in cluster.nodes:
            node.control = await cluster.transport.connect(await node.endpoint, CONTROL_PROTOCOL, expect=node.name)
            await node.tell(hello=control.Hello(run=RUN, node=node.name, attempt=1, version="0"))
            assert (await node.hear("welcome")).epoch == 5


async def test_an_epoch_may_be_opened_twice_but_not_backwards() -> None:
    async with pipeline() as cluster:
        (node,) = cluster.nodes
        await node.tell(open_edges=control.OpenEdges(epoch=1))
        assert (await node.hear("edges_open")).epoch == 1
        await cluster.submit(Submit(SequenceId(1), (1,), 3))
        assert (await cluster.rest(1))[0] == expected_tokens((1,), 3)
        await node.tell(open_edges=control.OpenEdges(epoch=0))
        assert "epoch 0" in (await node.hear("failure")).message


async def test_records_of_another_place_in_the_stream_are_a_fault() -> None:
    async with pipeline(3) as cluster:
        cluster.sent = 5
        await cluster.submit(Submit(SequenceId(1), (1,), 3))
        assert cluster.edge is not None
        assert cluster.reader is not None
        await asyncio.wait_for(cluster.reader, 60)  # the head closed the edge
        cluster.edge = None
        await cluster.open(2)  # and is well
        await cluster.submit(Submit(SequenceId(2), (1,), 3))
        assert (await cluster.rest(2))[0] == expected_tokens((1,), 3)


async def test_hidden_rows_cross_bit_for_bit() -> None:
    odd = np.array([[0x7FC01234, 0x80000000, 0x00000001]], dtype=np.uint32).view(np.float32)
    got: list[bytes] = []
    async with pipeline(3) as cluster:
        head, tail = cluster.engines
        head.output_hidden = odd

        def spy(batch: StageBatch) -> StageOutput:
            assert batch.hidden is not None
            got.append(batch.hidden.tobytes())
            return StageOutput(samples=(Sample(SequenceId(1), 1, 0, 0.0),))

        tail.step = spy  # type: ignore[method-assign]  # a test double
        await cluster.submit(Submit(SequenceId(1), (1,), 1))
        await cluster.rest(1)
    assert got == [odd.tobytes()]


async def test_two_streams_keep_both_stages_apart() -> None:
    async with pipeline(3) as cluster:
        for number in (1, 2):
            await cluster.submit(Submit(SequenceId(number), (number,), 30))
        for number in (1, 2):
            await cluster.rest(number)
        assert [engine.most_sequences_in_a_batch for engine in cluster.engines] == [1, 1]


# The control stream.


async def test_ready_and_status() -> None:
    async with pipeline() as cluster:
        (node,) = cluster.nodes
        await node.tell(ready_query=control.ReadyQuery(nonce=77))
        answer = await node.hear("ready_ack")
        assert (answer.nonce, answer.attempt) == (77, 1)
        await cluster.submit(Submit(SequenceId(1), (1, 2, 3), 4))
        await cluster.rest(1)
        await node.tell(status_query=control.StatusQuery())
        status = await node.hear("status")
        assert (status.steps, status.rows) == (4, 6)
        assert status.peak_resident_bytes >= status.resident_bytes > 1_000_000
        assert 0 < status.busy_seconds < 5
        assert (status.sequences_running, status.sequences_waiting) == (0, 0)


@pytest.mark.parametrize(
    ("hello", "says"),
    [
        (control.Hello(run="other", node="stage-0", attempt=1), "run run, not other"),
        (control.Hello(run=RUN, node="stage-1", attempt=1), "node stage-0, not stage-1"),
        (control.Hello(run=RUN, node="stage-0", attempt=2), "attempt 1, not 2"),
    ],
)
async def test_who_is_meant_is_checked(hello: control.Hello, says: str) -> None:
    async with nodes(1) as cluster:
        (node,) = cluster.nodes
        stream = await cluster.transport.connect(await node.endpoint, CONTROL_PROTOCOL)
        await stream.send(encode(control.Envelope(hello=hello)))
        answer = decode(await asyncio.wait_for(stream.receive(), 60))
        assert answer.failure.reason == "wrong-node"
        assert says in answer.failure.message
        with pytest.raises(StreamClosed):
            await asyncio.wait_for(stream.receive(), 60)
        await node.tell(ready_query=control.ReadyQuery(nonce=1))  # the right one's stream is not disturbed
        await node.hear("ready_ack")


async def test_only_the_orchestrator_commands() -> None:
    async with nodes(1) as cluster:
        identity = PeerIdentity(RUN, NodeId("stage-7"), Attempt(1))
        transport = MemoryTransport(TransportOptions(identity, SECRET))
        stream = await transport.connect(await cluster.nodes[0].endpoint, CONTROL_PROTOCOL)
        await stream.send(encode(control.Envelope(hello=control.Hello(run=RUN, node="stage-0", attempt=1))))
        assert "not the orchestrator" in decode(await asyncio.wait_for(stream.receive(), 60)).failure.message
        await transport.close()


async def test_a_second_control_stream_replaces_the_first() -> None:
    async with nodes(1) as cluster:
        (node,) = cluster.nodes
        first = node.control
        assert first is not None
        await cluster.dial(node)
        with pytest.raises(StreamClosed):
            await asyncio.wait_for(first.receive(), 60)
        await node.tell(ready_query=control.ReadyQuery(nonce=5))
        assert (await node.hear("ready_ack")).nonce == 5


async def test_provision_may_be_sent_again() -> None:
    async with nodes(1) as cluster:
        (node,) = cluster.nodes
        node.load_delay = 0.5
        await node.tell(provision=provision(0, ()))
        assert (await node.hear("progress")).phase == "open"
        await node.tell(provision=provision(0, ()))
        assert (await node.hear("progress")).phase in ("open", "load")
        first = await node.hear("provisioned")
        assert first.seconds >= 0.5
        assert (first.id, first.weight_bytes, first.kv_bytes, first.fetched_bytes, first.threads) == (
            1,
            1000,
            500,
            1000,
            1,
        )
        await node.tell(provision=provision(0, ()))
        assert await node.hear("provisioned") == first
        assert node.loads == 1
        await node.tell(provision=provision(0, (), identifier=2))  # another orchestrator, the same stage
        again = await node.hear("provisioned")
        assert (again.id, again.weight_bytes, node.loads) == (2, 1000, 1)
        for identifier in (2, 3):
            await node.tell(provision=provision(0, (), identifier=identifier, max_context=32))
            assert (await node.hear("failure")).reason == "already-provisioned"
        assert node.loads == 1


async def test_progress_comes_while_the_engine_is_at_work() -> None:
    async with nodes(1) as cluster:
        (node,) = cluster.nodes
        assert node.control is not None
        node.load_delay = 0.9
        await node.tell(provision=provision(0, ()))
        phases = []
        while True:
            envelope = decode(await asyncio.wait_for(node.control.receive(), 60))
            if envelope.WhichOneof("body") != "progress":
                break
            phases.append(envelope.progress.phase)
        assert envelope.WhichOneof("body") == "provisioned"
        assert phases[0] == "open"
        assert phases[-1] == "load"
        assert len(phases) >= 4


async def test_a_failed_load_is_told_and_another_may_follow() -> None:
    async with nodes(1) as cluster:
        (node,) = cluster.nodes
        node.load_error = ModelError("the model is torn", "mend it", reason="torn")
        await node.tell(provision=provision(0, ()))
        told = await node.hear("failure")
        assert (told.reason, told.message, told.hint, told.fatal) == ("torn", "the model is torn", "mend it", False)
        await node.tell(provision=provision(0, ()))
        assert (await node.hear("failure")).reason == "torn"
        assert node.loads == 1
        node.load_error = RuntimeError("surprise")
        await node.tell(provision=provision(0, (), identifier=2))
        told = await node.hear("failure")
        assert (told.reason, told.message) == ("internal", "RuntimeError: surprise")
        node.load_error = None
        await node.tell(provision=provision(0, (), identifier=3))
        assert (await node.hear("provisioned")).id == 3


@pytest.mark.parametrize(
    "change",
    [{"stage_index": 1}, {"end_layer": 0}, {"first_layer": 1}, {"options": control.EngineOptions(max_context=0)}],
)
async def test_a_provision_that_contradicts_itself_is_refused(change: dict[str, Any]) -> None:
    async with nodes(1) as cluster:
        (node,) = cluster.nodes
        message = provision(0, ())
        for name, value in change.items():
            if isinstance(value, int):
                setattr(message, name, value)
            else:
                getattr(message, name).CopyFrom(value)
        await node.tell(provision=message)
        assert (await node.hear("failure")).reason == "wire"
        assert node.loads == 0


async def test_edges_need_a_loaded_stage_and_a_neighbour() -> None:
    async with nodes(2) as cluster:
        node = cluster.nodes[0]
        await node.tell(open_edges=control.OpenEdges(epoch=1))
        assert (await node.hear("failure")).reason == "not-provisioned"
        await node.tell(provision=provision(0, (3,)))
        await node.hear("provisioned")
        await node.tell(
            open_edges=control.OpenEdges(epoch=1, next_node="stage-1", next_candidates=["memory:nobody-listens-here"])
        )
        assert not (await node.hear("failure")).fatal


async def test_what_a_node_has_no_use_for_is_said() -> None:
    async with nodes(1) as cluster:
        (node,) = cluster.nodes
        await node.tell(goodbye=control.Goodbye())
        assert (await node.hear("failure")).reason == "unexpected-message"


async def test_a_node_continues_the_orchestrators_trace() -> None:
    exporter = InMemorySpanExporter()
    tracing = configure_tracing("myelin-worker", [exporter])
    trace = f"{0xABC:032x}"
    async with nodes(1, tracing=tracing) as cluster:
        (node,) = cluster.nodes
        node.load_error = ModelError("the model is torn", reason="torn")
        await node.tell(provision=provision(0, ()), traceparent=f"00-{trace}-{0x11:016x}-01")
        await node.hear("failure")
        node.load_error = None
        await node.tell(provision=provision(0, (), identifier=2), traceparent=f"00-{trace}-{0x22:016x}-01")
        await node.hear("provisioned")
        await node.tell(open_edges=control.OpenEdges(epoch=3), traceparent=f"00-{trace}-{0x33:016x}-01")
        await node.hear("edges_open")
    assert await asyncio.to_thread(tracing.shutdown, 5.0)
    ended = exporter.get_finished_spans()
    parts = [span for span in ended if span.name == "worker.load.load"]
    assert [span.status.is_ok for span in parts] == [False, True]
    spans = [span for span in ended if span not in parts]
    assert {span.parent.span_id for span in parts if span.parent} == {
        span.context.span_id for span in spans if span.name == "worker.load" and span.context
    }
    assert [span.name for span in spans] == [
        "worker.load",
        "worker.provision",
        "worker.load",
        "worker.provision",
        "worker.open_edges",
    ]
    assert {span.context.trace_id for span in spans if span.context} == {0xABC}
    parents = [span.parent.span_id for span in spans if span.parent]
    failed, loaded = spans[1], spans[3]
    assert failed.context is not None
    assert loaded.context is not None
    assert parents == [failed.context.span_id, 0x11, loaded.context.span_id, 0x22, 0x33]
    assert [span.status.is_ok for span in spans] == [False, False, True, True, True]
    assert dict(failed.attributes or {})["error.type"] == "torn"
    assert dict(loaded.attributes or {})["myelin.node.id"] == "stage-0"
    assert dict(spans[4].attributes or {})["myelin.epoch"] == 3


def batch(segments: list[Segment], rows: int, columns: int = WIDTH, **changes: Any) -> Record:
    """A record as the stage before would send it."""
    fields: dict[str, Any] = {
        "kind": RecordKind.BATCH,
        "epoch": Epoch(1),
        "object_id": 0,
        "sequence": 0,
        "meta": pack_batch(segments, []),
        "payload": bytes(4 * rows * columns),
        "dtype": PayloadType.FLOAT32,
        "rows": rows,
        "columns": columns,
    }
    return Record(**{**fields, **changes})


FIRST = [Segment(SequenceId(1), 0, 2, True)]


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (b"garbage", "shorter than its header"),
        (pack(batch(FIRST, 3)), "add up to 2 rows"),
        (pack(batch(FIRST, 2, columns=5)), "came as 5 FLOAT32, not 3"),
        (pack(batch(FIRST, 2, dtype=PayloadType.INT32)), "came as 3 INT32"),
        (pack(batch([Segment(SequenceId(1), 63, 2)], 2)), "beyond the context"),
        (pack(batch(FIRST, 2, sequence=1)), "record 1 came where 0 was due"),
        (pack(batch(FIRST, 2, epoch=Epoch(2))), "epoch 2 came where 1 is open"),
        (pack(batch(FIRST, 2, kind=RecordKind.SAMPLES)), "SAMPLES record came to stage 1"),
    ],
)
async def test_what_is_malformed_on_an_edge_is_a_fault_and_never_reaches_the_engine(message: bytes, says: str) -> None:
    async with pipeline(3) as cluster:
        neighbour = MemoryTransport(TransportOptions(PeerIdentity(RUN, NodeId("stage-0"), Attempt(1)), SECRET))
        tail = cluster.nodes[1]
        edge = await neighbour.connect(await tail.endpoint, EDGE_PROTOCOL)
        await edge.send(message)
        told = await tail.hear("failure")
        assert says in told.message
        assert (told.reason, told.fatal) == ("wire", False)
        assert (await asyncio.wait_for(cluster.faults.get(), 60)).sequence is None
        assert cluster.engines[1].steps == 0
        await neighbour.close()


@pytest.mark.parametrize(
    ("samples", "says"),
    [
        ([], "0 tokens, not 1"),
        ([Sample(SequenceId(9), 1, 0, 0.0)], "sequence 9"),
        ([Sample(SequenceId(1), 1, VOCABULARY, 0.0)], "outside the vocabulary"),
    ],
)
async def test_a_tail_that_answers_wrongly_is_a_fault(samples: list[Sample], says: str) -> None:
    async with pipeline(3) as cluster:
        cluster.engines[1].step = lambda batch: StageOutput(samples=tuple(samples))
        await cluster.submit(Submit(SequenceId(1), (1,), 5))
        assert says in (await asyncio.wait_for(cluster.faults.get(), 60)).message
        assert says in (await cluster.nodes[0].hear("failure")).message


async def test_an_engine_that_gives_other_rows_is_a_fault() -> None:
    async with pipeline(3) as cluster:
        cluster.engines[0].output_hidden = np.zeros((1, WIDTH + 1), dtype=np.float32)
        await cluster.submit(Submit(SequenceId(1), (1,), 5))
        assert (await asyncio.wait_for(cluster.faults.get(), 60)).reason == "engine-output"


async def test_shutdown_says_goodbye_and_ends() -> None:
    async with pipeline(3) as cluster:
        engines = cluster.engines
        for node in cluster.nodes:
            await node.tell(shutdown=control.Shutdown(reason="done"))
        for node in cluster.nodes:
            while True:
                assert node.control is not None
                envelope = decode(await asyncio.wait_for(node.control.receive(), 60))
                if envelope.WhichOneof("body") == "goodbye":
                    break
                assert envelope.WhichOneof("body") == "failure"  # a neighbour that went first
            with pytest.raises(StreamClosed):
                await asyncio.wait_for(node.control.receive(), 60)
            assert await asyncio.wait_for(node.task, 60) == 0
        assert all(engine.closed for engine in engines)


async def test_a_node_that_nobody_dials_stops_itself() -> None:
    node = Node(0, Patience(first_dial_s=0.2, dead_man_s=30))
    assert await asyncio.wait_for(node.task, 60) == 1


async def test_a_node_that_lost_its_orchestrator_stops_itself() -> None:
    async with nodes(1, Patience(first_dial_s=100, dead_man_s=1.5)) as cluster:
        (node,) = cluster.nodes
        assert node.control is not None
        await node.control.close()
        await asyncio.sleep(0.1)
        await cluster.dial(node)  # back in time
        await asyncio.sleep(2.0)
        assert not node.task.done()
        await node.control.close()
        assert await asyncio.wait_for(node.task, 60) == 1


async def test_stopping_while_the_engine_is_at_work_does_not_hang() -> None:
    async with pipeline() as cluster:
        (engine,) = cluster.engines
        engine.hold = threading.Event()
        await cluster.submit(Submit(SequenceId(1), (1,), 3))
        await asyncio.sleep(0.05)
        began = asyncio.get_running_loop().time()
        cluster.nodes[0].agent.stop("now")
        assert await asyncio.wait_for(cluster.nodes[0].task, 60) == 0
        assert asyncio.get_running_loop().time() - began < 15
        engine.hold.set()
