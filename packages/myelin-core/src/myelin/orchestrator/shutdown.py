"""The end of a run: nodes are asked to end, then released; then all that is ours is closed. Shielded, and bounded."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from myelin.errors import MyelinError, NodeError
from myelin.orchestrator.background import in_thread, uninterrupted
from myelin.orchestrator.deadlines import within
from myelin.orchestrator.events import NodeState
from myelin.orchestrator.run import Run
from myelin.telemetry import attributes
from myelin.telemetry.phases import Phase

if TYPE_CHECKING:
    from myelin.cluster.provider import LaunchKey
    from myelin.orchestrator.control import NodeControl

CLOSE_TIMEOUT_S = 2.0


async def bring_down(run: Run, failure: BaseException | None) -> None:
    """shutdown, provider_stop: shielded from cancellation, each within its deadline.

    Raises:
        MyelinError: Nodes could not be released, and nothing had gone wrong before.
    """
    # What the caller did while the pipeline served (its own errors, an interrupt) is no failure of the run.
    problem = failure
    if run.serving is not None and run.pipeline is not None:
        problem = run.pipeline.error
    try:
        await uninterrupted(lambda: end_everything(run), run.hurry)
    except BaseException as error:
        problem = problem or error
        if failure is None or not isinstance(error, Exception):
            raise
        failure.add_note(f"while ending: {error}")
    finally:
        run.story.end(problem)
        await run.telemetry.close()  # it waits for collectors, within its own bound


async def end_everything(run: Run) -> None:
    """Nodes are asked to end, then released; then our own streams, tasks and plugins are closed."""
    if run.mending is not None:
        run.mending.cancel()
        await asyncio.gather(run.mending, return_exceptions=True)
    if run.watch is not None:
        run.watch.end()
    try:
        if run.executor is not None and run.attempts:
            with run.story.phase(Phase.SHUTDOWN):
                await say_goodbye(run)
    finally:
        try:
            if run.executor is not None and run.watch is not None:
                with run.story.phase(Phase.PROVIDER_STOP, {attributes.PROVIDER: run.request.provider}):
                    await run.executor.release_all()
                if run.life is not None:
                    for attempt in run.attempts:
                        run.life.tell(attempt, NodeState.RELEASED)
        finally:
            await close(run)


async def say_goodbye(run: Run) -> None:
    """Ask all nodes at once to end by themselves; go on when they have, or are too slow, or we are in a hurry."""
    reached = [(attempt.lease.key, attempt.control) for attempt in run.attempts if attempt.control is not None]
    for _, control in reached:
        control.expect_the_end()
    farewells = [asyncio.create_task(shut_down(run, key, control)) for key, control in reached]
    everybody = asyncio.gather(*farewells, return_exceptions=True)
    hurry = asyncio.ensure_future(run.hurry.wait())
    waiting: set[asyncio.Future[Any]] = {everybody, hurry}
    try:
        await asyncio.wait(waiting, timeout=run.request.stop_grace_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for future in waiting:
            future.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    await run.telemetry.say_goodbye()
    await close_streams(run)  # a node that ends waits a moment for streams that are open to it


async def shut_down(run: Run, key: LaunchKey, control: NodeControl) -> None:
    """Ask one node to end by itself."""
    with run.story.node(Phase.SHUTDOWN, key.node, key.attempt) as span:
        span.set_attribute(attributes.GOODBYE, await control.shut_down("the run is over"))


async def close_streams(run: Run) -> None:
    """Close our streams, all at once. Bounded: nothing of it matters to anybody else. Twice is fine."""
    closing = [attempt.control.close() for attempt in run.attempts if attempt.control is not None]
    if run.pipeline is not None:
        run.pipeline.close(NodeError("the run is over", reason="run-over"))
    if run.edges is not None:
        closing.append(run.edges.close())
    await within(CLOSE_TIMEOUT_S, asyncio.gather(*closing, return_exceptions=True))


async def close(run: Run) -> None:
    """Close all that is ours."""
    await close_streams(run)
    await run.background.close()
    if run.transport is not None:
        await within(CLOSE_TIMEOUT_S, run.transport.close())
    if run.executor is not None:
        await within(CLOSE_TIMEOUT_S, run.executor.close())
    elif run.provider is not None:
        await within(CLOSE_TIMEOUT_S, run.provider.close())
    if run.executor is None and run.book is not None and not isinstance(run.book, MyelinError):
        book, run.book = run.book, None
        await in_thread(lambda: book.close(ended=not book.inherited))
