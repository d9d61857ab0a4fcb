"""Nodes that misbehave in every phase, and interrupts in every phase: a clear error, soon, and nothing left."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest

from myelin.cluster.provider import BootSpec
from myelin.errors import MyelinError, NodeError, ProviderError
from myelin.orchestrator.bootstrap import running
from myelin.telemetry.phases import PHASES
from myelin.transport.contract import CONTROL_PROTOCOL, Endpoint, MessageStream, PeerIdentity, TransportOptions
from myelin.transport.memory import MemoryTransport
from myelin.values import NodeId
from myelin.wire import control_pb2 as pb
from myelin.wire.requests import NewToken
from myelin_testkit.memory_provider import Fail

if TYPE_CHECKING:
    from conftest import Announce, Life, Say, ScriptedNode, Toy


def only(node: str, life: Life, others: Life) -> Life:
    """``life`` for one node, ``others`` for the rest."""

    async def either(boot: BootSpec, announce: Announce, say: Say) -> None:
        await (life if boot.node == node else others)(boot, announce, say)

    return either


async def brought_up(toy: Toy, **changes: object) -> MyelinError:
    """The error with which a run fails to come up; nothing is left of it, and it took no deadline's time."""
    began = time.monotonic()
    with pytest.raises(MyelinError) as raised:
        async with running(toy.ask(**changes), toy.registry, toy.recorder):
            pytest.fail("it must not come up")
    assert time.monotonic() - began < 30.0
    assert toy.provider.running == {}
    assert toy.provider.closed
    assert toy.recorder.ended("failed")
    return raised.value


async def test_a_node_that_dies_at_import_is_reported_at_once_with_its_last_words(toy: Toy) -> None:
    async def dies(boot: BootSpec, announce: Announce, say: Say) -> None:
        await asyncio.sleep(0.05)
        say("Traceback (most recent call last):")
        say("ModuleNotFoundError: No module named 'numba'")
        raise RuntimeError("died")

    toy.provider.life = only("stage-1", dies, toy.provider.life)
    error = await brought_up(toy)
    assert error.reason == "node-exited"
    assert "stage-1 ended while it started (exit code 1: died)" in error.message
    assert "No module named 'numba'" in error.message
    assert "Traceback" in "".join(error.__notes__)
    assert toy.recorder.ended("failed") == ["provider_start"]
    assert error.message == next(event.detail for event in toy.recorder.phases if event.state == "failed")


async def test_a_node_that_never_announces_runs_into_the_deadline(toy: Toy) -> None:
    async def silent(boot: BootSpec, announce: Announce, say: Say) -> None:
        await asyncio.Event().wait()

    toy.provider.life = silent
    error = await brought_up(toy, startup_timeout_s=0.3)
    assert error.reason == "startup-timeout"
    assert "has not announced" in error.message


async def test_an_address_where_nobody_listens_runs_into_the_deadline(toy: Toy) -> None:
    async def elsewhere(boot: BootSpec, announce: Announce, say: Say) -> None:
        announce(Endpoint(("127.0.0.1:1",)))
        await asyncio.Event().wait()

    toy.provider.life = elsewhere
    error = await brought_up(toy, startup_timeout_s=1.5, max_attempts=1)
    assert error.reason == "startup-timeout"
    assert "could not be reached" in error.message


async def test_another_node_at_the_address_is_refused(toy: Toy) -> None:
    async def impostor(boot: BootSpec, announce: Announce, say: Say) -> None:
        identity = PeerIdentity(boot.run, NodeId("stage-9"), boot.attempt)
        transport = MemoryTransport(TransportOptions(identity, boot.secret))

        async def control(stream: MessageStream) -> None:
            await stream.receive()

        listener = await transport.listen(boot.bind, {CONTROL_PROTOCOL: control})
        announce(Endpoint((listener.address,)))
        try:
            await asyncio.Event().wait()
        finally:
            await listener.close()

    toy.provider.life = impostor
    error = await brought_up(toy)
    assert error.reason == "wrong-node"
    assert "stage-9" in error.message


@pytest.mark.parametrize("field", ["run", "node", "attempt"])
async def test_a_node_that_claims_to_be_another_is_refused(toy: Toy, scripted: type[ScriptedNode], field: str) -> None:
    def welcome(boot: BootSpec) -> pb.Welcome:
        claim = pb.Welcome(run=boot.run, node=boot.node, attempt=boot.attempt)
        setattr(claim, field, 7 if field == "attempt" else "other")
        return claim

    toy.provider.life = scripted(welcome=welcome)
    error = await brought_up(toy)
    assert error.reason == "wrong-node"


async def test_a_node_that_never_acknowledges_is_asked_each_quarter_of_a_second(
    toy: Toy, scripted: type[ScriptedNode]
) -> None:
    node = scripted({"ready_query": lambda envelope: None})
    toy.provider.life = node
    error = await brought_up(toy, stages=1, startup_timeout_s=3.0, max_attempts=1)
    assert error.reason == "startup-timeout"
    assert "acknowledged" in error.message
    assert 2 <= node.received.count("ready_query") <= 13  # twelve, where the machine is not busy
    nonces = [each.ready_query.nonce for each in node.envelopes if each.WhichOneof("body") == "ready_query"]
    assert nonces == sorted(set(nonces))


async def test_an_acknowledgement_of_another_attempt_is_refused(toy: Toy, scripted: type[ScriptedNode]) -> None:
    toy.provider.life = scripted(
        {"ready_query": lambda e: pb.Envelope(ready_ack=pb.ReadyAck(nonce=e.ready_query.nonce, attempt=2))}
    )
    assert (await brought_up(toy)).reason == "wrong-attempt"


async def test_a_late_acknowledgement_counts(toy: Toy, scripted: type[ScriptedNode]) -> None:
    asked: list[int] = []

    def second_time(envelope: pb.Envelope) -> pb.Envelope | None:
        asked.append(envelope.ready_query.nonce)
        return None if len(asked) == 1 else pb.Envelope(ready_ack=pb.ReadyAck(nonce=asked[0], attempt=1))

    def no_model(envelope: pb.Envelope) -> pb.Envelope:
        return pb.Envelope(failure=pb.Failure(reason="stop-here", message="that will do"))

    toy.provider.life = scripted({"ready_query": second_time, "provision": no_model})
    assert (await brought_up(toy, stages=1)).reason == "stop-here"
    assert len(asked) == 2


async def test_a_stage_that_stalls_is_told_again_and_given_up(
    toy: Toy, scripted: type[ScriptedNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("myelin.orchestrator.provision.NO_PROGRESS_S", 0.5)
    node = scripted({"provision": lambda envelope: None})
    toy.provider.life = node
    error = await brought_up(toy, stages=1, load_stall_s=2.7, max_attempts=1)
    assert error.reason == "load-stalled"
    assert "stage-0" in error.message
    assert 2 <= node.received.count("provision") <= 6
    assert len({each.provision.id for each in node.envelopes if each.WhichOneof("body") == "provision"}) == 1


async def test_a_stage_with_progress_is_never_told_again(
    toy: Toy, scripted: type[ScriptedNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("myelin.orchestrator.provision.NO_PROGRESS_S", 1.0)

    def some_progress(envelope: pb.Envelope) -> pb.Envelope:
        progress = pb.Progress(id=envelope.provision.id, phase="load", done=5, total=10)
        return pb.Envelope(progress=progress)

    node = scripted({"provision": some_progress})
    toy.provider.life = node
    error = await brought_up(toy, stages=1, load_stall_s=2.5, max_attempts=1)
    assert error.reason == "load-stalled"
    assert node.received.count("provision") == 1
    assert [(each.node, each.phase, each.done, each.total) for each in toy.recorder.progresses] == [
        ("stage-0", "load", 5, 10)
    ]


async def test_a_load_that_fails_says_why(toy: Toy, scripted: type[ScriptedNode]) -> None:
    failure = pb.Failure(reason="different-model", message="this node opened another model", hint="use the same files")
    toy.provider.life = scripted({"provision": lambda envelope: pb.Envelope(failure=failure)})
    error = await brought_up(toy)
    assert error.reason == "different-model"
    assert "this node opened another model" in error.message
    assert error.hint == "use the same files"
    assert toy.recorder.ended("failed") == ["stage_provision"]


async def test_a_real_node_that_sees_another_model_says_so(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    from myelin.orchestrator import bootstrap

    honest = bootstrap.provision_message

    def wrong_digest(plan: object, index: int, **more: bool) -> pb.Provision:
        message = honest(plan, index, **more)
        message.header_digest = b"\0" * 32
        return message

    monkeypatch.setattr(bootstrap, "provision_message", wrong_digest)
    assert (await brought_up(toy)).reason == "different-model"


async def test_a_stream_full_of_rubbish_ends_the_run(toy: Toy) -> None:
    async def babbles(boot: BootSpec, announce: Announce, say: Say) -> None:
        transport = MemoryTransport(TransportOptions(PeerIdentity(boot.run, boot.node, boot.attempt), boot.secret))

        async def control(stream: MessageStream) -> None:
            await stream.receive()
            await stream.send(b"\xff\xfe rubbish")
            await asyncio.Event().wait()

        listener = await transport.listen(boot.bind, {CONTROL_PROTOCOL: control})
        announce(Endpoint((listener.address,)))
        try:
            await asyncio.Event().wait()
        finally:
            await transport.close()

    toy.provider.life = babbles
    assert "damaged" in (await brought_up(toy)).message


async def test_a_probe_that_never_comes_back_is_given_up(
    toy: Toy, scripted: type[ScriptedNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("myelin.orchestrator.edges.PROBE_TIMEOUT_S", 0.3)
    toy.provider.life = scripted()
    error = await brought_up(toy, stages=1)
    assert error.reason == "probe-timeout"


async def test_an_address_that_the_mask_excludes(toy: Toy) -> None:
    error = await brought_up(toy, endpoint_mask="10.")
    assert error.reason == "no-address"
    assert "10." in error.message


async def test_a_launch_that_fails_is_tried_again_as_another_attempt(toy: Toy) -> None:
    toy.provider.cloud.faults.next("launch", Fail())
    async with running(toy.ask(stages=1), toy.registry, toy.recorder) as pipeline:
        assert (await pipeline.status())[0].resident_bytes > 0
    assert [key.attempt for key in toy.provider.started] == [1, 2]


async def test_a_provider_that_cannot_launch_is_given_up(toy: Toy) -> None:
    toy.provider.cloud.faults.next("launch", *[Fail()] * 99)
    error = await brought_up(toy, stages=1)
    assert isinstance(error, ProviderError)
    assert len(toy.provider.started) == 3


@pytest.mark.parametrize("victim", ["stage-0", "stage-1"])
async def test_a_node_that_dies_while_it_serves_fails_everybody_at_once(toy: Toy, victim: str) -> None:
    """With ``recover`` off: what is mended otherwise is told to all."""
    async with running(toy.ask(recover=False), toy.registry, toy.recorder) as pipeline:

        async def endless() -> MyelinError:
            while True:
                try:
                    async for _ in pipeline.generate([1, 2, 3], max_tokens=60, ignore_end=True):
                        pass
                except MyelinError as error:
                    return error

        waiting = [asyncio.create_task(endless()) for _ in range(3)]
        failed = asyncio.create_task(pipeline.failed())
        await asyncio.sleep(0.1)
        toy.provider.kill(victim)
        async with asyncio.timeout(60):
            errors = await asyncio.gather(*waiting)
            loss = await failed
        assert loss.reason == "node-exited"
        assert f"{victim} ended while it served (killed)" in loss.message
        assert {error.message for error in errors} == {loss.message}
        assert len({id(error) for error in errors}) == 3  # an exception object is raised by one task only
        assert pipeline.error is not None
        with pytest.raises(NodeError):
            await anext(pipeline.generate([1], max_tokens=1))
    assert toy.provider.running == {}
    assert [event.detail for event in toy.recorder.phases if event.state == "failed"] == [loss.message]


@pytest.mark.parametrize("phase", PHASES)
async def test_an_interrupt_in_any_phase_leaves_nothing_running(toy: Toy, phase: str) -> None:
    async def run() -> None:
        async with running(toy.request, toy.registry, toy.recorder):
            await asyncio.sleep(0.1 if phase in ("shutdown", "provider_stop") else 100)

    task = asyncio.create_task(run())
    loop = asyncio.get_running_loop()
    toy.recorder.on_started[phase] = lambda: loop.call_soon(task.cancel)
    async with asyncio.timeout(60):
        with pytest.raises(asyncio.CancelledError):
            await task
    assert toy.provider.running == {}
    if toy.provider.started:
        assert toy.provider.closed
        assert "provider_stop" in toy.recorder.ended()
    await asyncio.sleep(0)
    left = {each for each in asyncio.all_tasks() if each is not asyncio.current_task()}
    assert not {each for each in left if not each.get_name().startswith("Task-")}


async def test_a_second_interrupt_does_not_wait_for_goodbyes(toy: Toy, scripted: type[ScriptedNode]) -> None:
    """A node that never says goodbye is waited for; a second interrupt ends that wait, and it is released all the
    same."""
    node = scripted({"shutdown": lambda envelope: None, "provision": lambda envelope: None})
    toy.provider.life = node

    async def run() -> None:
        async with running(toy.ask(stages=1, stop_grace_s=30.0), toy.registry, toy.recorder):
            pytest.fail("it must not come up")

    task = asyncio.create_task(run())
    await received(node, "provision")
    task.cancel()
    await received(node, "shutdown")
    await asyncio.sleep(0.1)
    assert not task.done()
    began = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - began < 10.0, "not after the grace of 30 s"
    assert toy.provider.running == {}


async def test_a_torn_down_loop_still_releases_the_nodes(toy: Toy, scripted: type[ScriptedNode]) -> None:
    """What ``asyncio.run`` does after a second Ctrl-C: every task is cancelled, ours that release nodes included."""
    node = scripted({"shutdown": lambda envelope: None, "provision": lambda envelope: None})
    toy.provider.life = node

    async def run() -> None:
        async with running(toy.ask(stages=1, stop_grace_s=30.0), toy.registry, toy.recorder):
            pytest.fail("it must not come up")

    task = asyncio.create_task(run())
    await received(node, "provision")
    task.cancel()
    await received(node, "shutdown")
    for each in asyncio.all_tasks():
        if each is not asyncio.current_task():
            each.cancel()
    async with asyncio.timeout(60):
        with pytest.raises(asyncio.CancelledError):
            await task
    assert toy.provider.running == {}


async def test_nodes_that_cannot_be_released_are_named(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    from myelin.cluster.executor import LaunchTimes

    async def stuck(lease: object) -> None:
        raise ProviderError("the machine does not answer")

    monkeypatch.setattr("myelin.orchestrator.accounts.LaunchTimes", lambda **_: LaunchTimes(release=0.5))
    release = toy.provider.release
    with pytest.raises(ProviderError, match=r"stage-0 \(task-1\).*the machine does not answer") as raised:
        async with running(toy.ask(stages=1), toy.registry, toy.recorder):
            monkeypatch.setattr(toy.provider, "release", stuck)
    assert "end them there" in raised.value.hint
    for lease in list(toy.provider.running):
        await release(lease)


async def test_a_task_of_ours_that_fails_by_mistake_ends_the_run(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("oops")

    monkeypatch.setattr("myelin.orchestrator.head_edge.read_tokens", broken)
    error = await brought_up(toy)
    assert error.reason == "internal"
    assert "KeyError" in error.message


async def test_a_tokenizer_that_cannot_be_built_ends_the_run_at_once(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    from myelin.errors import ModelError

    def unknown(*_: object) -> None:
        raise ModelError("a tokenizer of an unknown kind", reason="tokenizer")

    monkeypatch.setattr("myelin.orchestrator.run_planning.make_tokenizer", unknown)
    assert (await brought_up(toy)).reason == "tokenizer"


async def drain(events: AsyncIterator[object]) -> None:
    async for _ in events:
        pass


async def received(node: ScriptedNode, kind: str) -> None:
    """Wait until a node has got a message of this kind."""
    async with asyncio.timeout(60):
        await node.got[kind].wait()


async def test_a_generation_that_nobody_reads_does_not_hold_the_end(toy: Toy) -> None:
    async with running(toy.request, toy.registry, toy.recorder) as pipeline:
        events = pipeline.generate([1, 2], max_tokens=50, ignore_end=True)
        assert isinstance(await anext(events), NewToken)
    await asyncio.sleep(0)
    with pytest.raises(MyelinError, match="the run is over"):
        await drain(events)
    assert toy.provider.running == {}
