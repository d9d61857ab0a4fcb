"""Pipelines that lose nodes and edges while they come up and while they serve, over memory streams."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import SecretStr

from myelin.cluster.provider import BootSpec, Offer
from myelin.engine.contract import StageBatch, StageOutput
from myelin.engine.reference import ReferenceEngine
from myelin.errors import EngineError, MyelinError, RequestError
from myelin.orchestrator.bootstrap import running
from myelin.orchestrator.events import NodeState
from myelin.orchestrator.pipeline import Pipeline
from myelin.orchestrator.run import Run
from myelin.telemetry.phases import PHASES
from myelin.transport.contract import Endpoint
from myelin.values import FinishReason, SamplingParams
from myelin.wire.requests import Finished, NewToken
from myelin_testkit.memory_provider import Fail

if TYPE_CHECKING:
    from conftest import Announce, Say, Toy

PROMPT = (5, 17, 200, 42)
LENGTH = 40
SAMPLED = SamplingParams(temperature=1.0, top_k=50, top_p=0.95, seed=7)


async def generate(
    pipeline: Pipeline,
    prompt: tuple[int, ...] = PROMPT,
    count: int = LENGTH,
    sampling: SamplingParams = SAMPLED,
    on_token: Callable[[int], None] = lambda count: None,
) -> list[tuple[int, int, float]]:
    """Position, token and log-probability of each new token; the end is checked, too."""
    found: list[tuple[int, int, float]] = []
    async for event in pipeline.generate(prompt, max_tokens=count, sampling=sampling, ignore_end=True):
        if isinstance(event, Finished):
            assert (event.reason, event.generated) == (FinishReason.LENGTH, count)
            return found
        assert isinstance(event, NewToken)
        found.append((event.position, event.token, event.logprob))
        on_token(len(found))
    raise AssertionError("a generation ended without its end")


_found: list[list[tuple[int, int, float]]] = []


@pytest.fixture
async def undisturbed(toy: Toy) -> list[tuple[int, int, float]]:
    """What a run without losses gives."""
    if not _found:
        async with running(toy.ask(stages=3), toy.registry) as pipeline:
            _found.append(await generate(pipeline))
        toy.provider.started.clear()
        toy.registry.exporter = toy.exporter = InMemorySpanExporter()  # the run has shut the other one down
    return _found[0]


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  # nobody tells of it: it is looked at
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("victims", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
async def test_lost_nodes_are_replaced_and_no_token_is_lost(
    toy: Toy, undisturbed: list[tuple[int, int, float]], victims: tuple[int, ...]
) -> None:
    def at(count: int) -> None:
        if count == 11:
            for victim in victims:
                toy.provider.kill(f"stage-{victim}")

    async with running(toy.ask(stages=3), toy.registry, toy.recorder) as pipeline:
        async with asyncio.timeout(60):
            assert await generate(pipeline, on_token=at) == undisturbed
        assert pipeline.recoveries >= 1
        assert not pipeline.recovering
        assert pipeline.epoch >= 2
        assert [stage.attempt for stage in pipeline.stages] == [2 if n in victims else 1 for n in range(3)]
        assert all(stage.resident_bytes for stage in await pipeline.status())
        assert len(toy.provider.running) == 3
        told = [(event.node, event.attempt, event.state) for event in toy.recorder.nodes]
        for victim in victims:
            lost, back = (
                told.index((f"stage-{victim}", 1, NodeState.LOST)),
                told.index((f"stage-{victim}", 2, NodeState.REPLACED)),
            )
            assert lost < told.index((f"stage-{victim}", 2, NodeState.STARTING)) < back
        assert {event.node for event in toy.recorder.nodes if event.state is NodeState.LOST} == {
            f"stage-{victim}" for victim in victims
        }
    assert toy.provider.running == {}
    assert toy.recorder.ended("failed") == []
    recovery = next(span for span in toy.exporter.get_finished_spans() if span.name == "myelin.recovery")
    children = [span for span in toy.exporter.get_finished_spans() if span.parent == recovery.context]
    assert "myelin.bootstrap.stage_provision.node" in {span.name for span in children}


async def test_a_lone_stage_is_replaced_too(toy: Toy, undisturbed: list[tuple[int, int, float]]) -> None:
    async with running(toy.ask(stages=1), toy.registry) as pipeline, asyncio.timeout(60):
        found = await generate(pipeline, on_token=lambda count: toy.provider.kill("stage-0") if count == 9 else None)
    assert found == undisturbed


async def test_several_streams_are_paused_and_go_on(toy: Toy) -> None:
    prompts = [(n, n + 1, n + 2) for n in range(5)]
    async with running(toy.ask(stages=2), toy.registry) as pipeline:
        alone = [await generate(pipeline, prompt, 20) for prompt in prompts]

    def at(count: int) -> None:
        if count == 6:
            toy.provider.kill("stage-1")

    async with running(toy.ask(stages=2), toy.registry) as pipeline, asyncio.timeout(60):
        together = await asyncio.gather(
            *(
                generate(pipeline, prompt, 20, on_token=at if n == 0 else lambda _: None)
                for n, prompt in enumerate(prompts)
            )
        )
        assert pipeline.recoveries == 1
    assert list(together) == alone


async def test_requests_that_come_or_go_meanwhile(toy: Toy) -> None:
    async with running(toy.ask(stages=2), toy.registry) as pipeline, asyncio.timeout(60):
        expected = await generate(pipeline, (9, 9), 10)
        leaver = pipeline.generate(PROMPT, max_tokens=50, sampling=SAMPLED, ignore_end=True)
        assert isinstance(await anext(leaver), NewToken)
        toy.provider.kill("stage-0")
        await until(lambda: pipeline.recovering)
        comer = asyncio.create_task(generate(pipeline, (9, 9), 10))
        await leaver.aclose()
        with pytest.raises(RequestError):
            pipeline.generate((), max_tokens=1)
        await asyncio.sleep(0)
        assert not comer.done()
        assert await comer == expected
        # Both places are free again: as many as there are can run.
        both = await asyncio.gather(generate(pipeline, (9, 9), 10), generate(pipeline, (9, 9), 10))
        assert both == [expected, expected]


async def test_a_node_that_dies_while_another_is_replaced(toy: Toy, undisturbed: list[tuple[int, int, float]]) -> None:
    killed: list[str] = []

    def on_recovery() -> None:
        if len(killed) < 2:
            killed.append("stage-2")
            asyncio.get_running_loop().call_later(0.05, toy.provider.kill, "stage-2")

    toy.recorder.on_started["recovery"] = on_recovery
    async with running(toy.ask(stages=3), toy.registry, toy.recorder) as pipeline, asyncio.timeout(60):
        found = await generate(
            pipeline, on_token=lambda count: toy.provider.kill("stage-0") if count in (8, 20) else None
        )
    assert found == undisturbed
    assert [key.node for key in toy.provider.started].count("stage-2") >= 2


async def test_a_replacement_that_dies_is_replaced(toy: Toy, undisturbed: list[tuple[int, int, float]]) -> None:
    good = toy.provider.life

    async def dies_at_second(boot: BootSpec, announce: Announce, say: Say) -> None:
        if (boot.node, boot.attempt) == ("stage-1", 2):
            raise RuntimeError("not this one")
        await good(boot, announce, say)

    toy.provider.life = dies_at_second
    async with running(toy.ask(stages=3), toy.registry, toy.recorder) as pipeline, asyncio.timeout(60):
        found = await generate(pipeline, on_token=lambda count: toy.provider.kill("stage-1") if count == 8 else None)
        assert pipeline.stages[1].attempt == 3
    assert found == undisturbed


@pytest.mark.parametrize("which", ["head", "between", "control"])
async def test_a_broken_stream_costs_no_node(toy: Toy, undisturbed: list[tuple[int, int, float]], which: str) -> None:
    """Both ends live: the edges are opened anew, or the control stream is dialled again; nobody is started."""
    protocol, ends = {
        "head": ("edge", {"orchestrator", "stage-0"}),
        "between": ("edge", {"stage-0", "stage-1"}),
        "control": ("control", {"orchestrator", "stage-1"}),
    }[which]

    async with running(toy.ask(stages=3), toy.registry, toy.recorder) as pipeline, asyncio.timeout(60):
        streams = open_streams(protocol, ends)
        assert streams

        def cut(count: int) -> None:
            if count == 10:
                for stream in streams:
                    asyncio.get_running_loop().create_task(stream.abort("a cable was pulled"), name="Task-cut")

        assert await generate(pipeline, on_token=cut) == undisturbed
        await until(lambda: pipeline.recoveries > 0 and not pipeline.recovering)
        assert await generate(pipeline) == undisturbed
        assert [stage.attempt for stage in pipeline.stages] == [1, 1, 1]
    assert len(toy.provider.started) == 3
    assert not [event for event in toy.recorder.nodes if event.state is NodeState.LOST]


def open_streams(protocol: str, ends: set[str]) -> list[object]:
    """Live memory streams of a protocol between two parties."""
    import gc

    from myelin.transport.memory import MemoryStream

    found = []
    for each in gc.get_objects():
        if type(each) is MemoryStream and each._end is None and each._peer is not None:
            names = {str(each._peer.node), str(each._options.identity.node)}
            if names == ends and (protocol == "control") == is_control(each):
                found.append(each)
    return found


def is_control(stream: object) -> bool:
    """Whether a node's or an orchestrator's control stream uses it."""
    import gc

    from myelin.orchestrator.control import NodeControl
    from myelin.worker.control import ControlLink

    return any(
        (type(each) is NodeControl and each._stream is stream) or (type(each) is ControlLink and each.stream is stream)
        for each in gc.get_objects()
    )


async def test_an_engine_that_dies_of_a_request_ends_only_that_request(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = ReferenceEngine.step

    def dies_of_99(self: ReferenceEngine, batch: StageBatch) -> StageOutput:
        if batch.tokens is not None and 99 in batch.tokens:
            raise EngineError("a kernel trapped", "report it", reason="kernel-trap")
        return honest(self, batch)

    monkeypatch.setattr(ReferenceEngine, "step", dies_of_99)
    async with running(toy.ask(stages=2), toy.registry, toy.recorder) as pipeline, asyncio.timeout(60):
        with pytest.raises(EngineError, match="a kernel trapped") as raised:
            await generate(pipeline, (1, 99), 5)
        assert raised.value.reason == "kernel-trap"
        assert len(await generate(pipeline, (1, 2), 5)) == 5
        assert pipeline.stages[0].attempt == 3
    assert toy.provider.running == {}


async def test_a_pipeline_that_cannot_be_mended_says_what_was_lost_and_why(toy: Toy) -> None:
    async with running(toy.ask(stages=2), toy.registry, toy.recorder) as pipeline, asyncio.timeout(60):
        toy.provider.cloud.faults.next("launch", *[Fail()] * 99)
        toy.provider.kill("stage-1")
        with pytest.raises(MyelinError) as raised:
            await generate(pipeline)
        assert "stage-1 ended while it served (killed); it could not be mended: no luck" in raised.value.message
        assert raised.value.reason == "node-exited"
        assert (await pipeline.failed()).message == raised.value.message
        assert not pipeline.recovering
    assert toy.provider.running == {}
    assert toy.recorder.ended("failed") == ["recovery", "serving"]


async def test_a_node_whose_replacements_all_die_is_given_up_with_its_last_words(toy: Toy) -> None:
    good = toy.provider.life

    async def only_the_first_lives(boot: BootSpec, announce: Announce, say: Say) -> None:
        if boot.attempt > 1:
            say("no space left on device")
            await asyncio.sleep(0.02)
            raise RuntimeError("disk full")
        await good(boot, announce, say)

    toy.provider.life = only_the_first_lives
    async with running(toy.ask(stages=2), toy.registry, toy.recorder) as pipeline, asyncio.timeout(60):
        toy.provider.kill("stage-0")
        loss = await pipeline.failed()
    assert "stage-0 ended while it served (killed)" in loss.message
    assert "no space left on device" in loss.message
    assert [key.attempt for key in toy.provider.started if key.node == "stage-0"] == [1, 2, 3, 4]
    assert toy.provider.running == {}


async def test_mending_is_bounded(toy: Toy) -> None:
    request = toy.ask(stages=2, recover_attempts=2, recover_window_s=60.0)
    async with running(request, toy.registry, toy.recorder) as pipeline, asyncio.timeout(60):
        for attempt in (1, 2, 3):
            await until(lambda n=attempt: pipeline.stages[1].attempt == n and not pipeline.recovering)
            toy.provider.kill("stage-1")
        loss = await pipeline.failed()
        assert "tried 2 times within 60 s" in loss.message
        assert "stage-1 ended while it served (killed)" in loss.message
    assert toy.provider.running == {}


async def test_two_deaths_while_it_comes_up_are_made_good(toy: Toy) -> None:
    good = toy.provider.life

    async def dies_twice(boot: BootSpec, announce: Announce, say: Say) -> None:
        if boot.node == "stage-1" and boot.attempt < 3:
            await asyncio.sleep(0.02)
            raise RuntimeError("bad luck")
        await good(boot, announce, say)

    toy.provider.life = dies_twice
    async with running(toy.request, toy.registry, toy.recorder) as pipeline:
        assert [stage.attempt for stage in pipeline.stages] == [1, 3]
        assert len(await generate(pipeline, count=5)) == 5
    assert toy.recorder.ended() == list(PHASES)
    assert toy.provider.running == {}


@pytest.mark.parametrize("phase", PHASES[PHASES.index("node_runtime_ready") : PHASES.index("serving") + 1])
@pytest.mark.parametrize("delay", [0.0, 0.02])
async def test_a_node_that_dies_in_any_phase_begins_again(toy: Toy, phase: str, delay: float) -> None:
    def kill() -> None:
        del toy.recorder.on_started[phase]
        asyncio.get_running_loop().call_later(delay, toy.provider.kill, "stage-0")

    toy.recorder.on_started[phase] = kill
    async with running(toy.request, toy.registry, toy.recorder) as pipeline, asyncio.timeout(60):
        assert len(await generate(pipeline, count=30)) == 30
        await until(lambda: pipeline.stages[0].attempt == 2 and not pipeline.recovering)
    assert toy.recorder.ended("failed") == []
    assert toy.provider.running == {}


async def test_a_machine_that_cannot_be_reached_is_replaced_on_another_offer(toy: Toy) -> None:
    good, offers = toy.provider.life, ("near", "far")
    toy.provider.cloud.offers = [Offer(name, "memory", name) for name in offers]

    async def first_is_unreachable(boot: BootSpec, announce: Announce, say: Say) -> None:
        if boot.attempt == 1:
            announce(Endpoint(("127.0.0.1:1",)))
            await asyncio.Event().wait()
        await good(boot, announce, say)

    toy.provider.life = first_is_unreachable
    async with running(toy.ask(stages=1, startup_timeout_s=4.0), toy.registry, toy.recorder):
        (machine,) = toy.provider.running.values()
        assert machine.offer.id == "far"
    lost = next(event for event in toy.recorder.nodes if event.state is NodeState.LOST)
    assert lost.detail == "could not be reached within 4 s"


@pytest.mark.parametrize("state", [state for state in NodeState if state not in (NodeState.RELEASED,)])
async def test_an_interrupt_in_mid_recovery_leaves_nothing_running(toy: Toy, state: NodeState) -> None:
    async def run() -> None:
        async with running(toy.ask(stages=2), toy.registry, toy.recorder) as pipeline:
            toy.provider.kill("stage-1")
            await generate(pipeline, count=50)
            await asyncio.sleep(100)

    task = asyncio.create_task(run())
    told = toy.recorder.node

    def node(event: object) -> None:
        told(event)
        if event.state is state and (event.attempt == 2 or state is NodeState.LOST):
            asyncio.get_running_loop().call_soon(task.cancel)

    toy.recorder.node = node
    async with asyncio.timeout(60):
        with pytest.raises(asyncio.CancelledError):
            await task
    assert toy.provider.running == {}
    assert toy.provider.closed
    await asyncio.sleep(0)
    left = {each for each in asyncio.all_tasks() if each is not asyncio.current_task()}
    assert not {each for each in left if not each.get_name().startswith("Task-")}


@pytest.mark.parametrize("seed", range(4))
async def test_random_kills(toy: Toy, seed: int) -> None:
    """Kills at random moments, recoveries included, while streams come and go: every one gives its own tokens."""
    await kill_at_random(toy, random.Random(seed), kills=4)


@pytest.mark.soak
@pytest.mark.timeout(280)
@pytest.mark.parametrize("seed", range(100, 104))
async def test_many_random_kills(toy: Toy, seed: int) -> None:
    await kill_at_random(toy, random.Random(seed), kills=30)


async def kill_at_random(toy: Toy, generator: random.Random, kills: int) -> None:
    prompts = [tuple(generator.randrange(301) for _ in range(generator.randrange(1, 20))) for _ in range(6)]
    request = toy.ask(stages=3, recover_attempts=10 * kills, max_attempts=20)
    async with running(request, toy.registry) as pipeline:
        expected = [await generate(pipeline, prompt, 25) for prompt in prompts]

    done = asyncio.Event()

    async def client(number: int) -> int:
        rounds = 0
        while not done.is_set() or rounds == 0:
            index = (number + rounds) % len(prompts)
            assert await generate(pipeline, prompts[index], 25) == expected[index]
            rounds += 1
        return rounds

    async with running(request, toy.registry, toy.recorder) as pipeline:
        clients = [asyncio.create_task(client(number)) for number in range(3)]
        for _ in range(kills):
            await asyncio.sleep(generator.random() * 0.4)
            toy.provider.kill(f"stage-{generator.randrange(3)}")
        done.set()
        async with asyncio.timeout(60):
            assert sum(await asyncio.gather(*clients)) >= 3
        await until(lambda: not pipeline.recovering)
        assert pipeline.error is None
        await until(lambda: len(toy.provider.running) == 3)
    assert toy.provider.running == {}


async def killed_without_a_word(toy: Toy, monkeypatch: pytest.MonkeyPatch, **changes: object) -> object:
    """An orchestrator that serves, and then is gone: it says no goodbye and releases nothing. What it generated."""

    async def gone(run: Run) -> None:
        await run.background.close()
        assert run.transport is not None
        await run.transport.close()

    with monkeypatch.context() as patch:
        patch.setattr("myelin.orchestrator.shutdown.end_everything", gone)
        async with running(toy.ask(stages=2, **changes), toy.registry, toy.recorder) as pipeline:
            found = await generate(pipeline)
    assert len(toy.provider.running) == 2
    toy.registry.exporter = toy.exporter = InMemorySpanExporter()
    return found


async def test_a_restarted_orchestrator_adopts_what_still_runs(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one, with the first one's run and secret, finds the nodes with what they have loaded."""
    secret = SecretStr("kept in a ledger")
    expected = await killed_without_a_word(toy, monkeypatch, secret=secret)
    loaded = [event.phase for event in toy.recorder.progresses]
    async with running(toy.ask(stages=2, secret=secret), toy.registry, toy.recorder) as pipeline:
        assert len(toy.provider.started) == 2
        assert [stage.attempt for stage in pipeline.stages] == [1, 1]
        assert pipeline.epoch == 2
        assert await generate(pipeline) == expected
        assert [event.phase for event in toy.recorder.progresses] == loaded  # nothing was loaded again
        toy.provider.kill("stage-1")
        assert await generate(pipeline) == expected
        assert pipeline.stages[1].attempt == 2
    assert toy.provider.running == {}


async def test_what_cannot_be_adopted_is_replaced(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the nodes died meanwhile, and the other one holds other layers than the ones that are due now."""
    secret = SecretStr("kept in a ledger")
    expected = await killed_without_a_word(toy, monkeypatch, secret=secret)
    toy.provider.kill("stage-0")
    await asyncio.sleep(0.01)
    async with running(toy.ask(stages=2, split=(1, 3), secret=secret), toy.registry, toy.recorder) as pipeline:
        assert [stage.attempt for stage in pipeline.stages] == [2, 2]
        assert await generate(pipeline) == expected
    assert toy.provider.running == {}


async def test_nodes_that_nobody_adopts_end_by_themselves(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    await killed_without_a_word(toy, monkeypatch, dead_man_s=0.3)
    await until(lambda: all(machine.task.done() for machine in toy.provider.running.values()))
    for lease in list(toy.provider.running):
        await toy.provider.release(lease)
