"""``myelin chat``: a conversation with a model, through its chat template."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Annotated

import typer

from myelin.cli.options import ANSWER_OPTIONS, RUN_OPTIONS, Invocation, with_options

if TYPE_CHECKING:
    from myelin.cli.composition import Root
    from myelin.orchestrator.pipeline import Pipeline
    from myelin.serve.chat import Conversation
    from myelin.serve.generation import Completion

NAME = "chat"


@with_options(RUN_OPTIONS, ANSWER_OPTIONS, json=False)
def command(
    invocation: Invocation,
    system: Annotated[str, typer.Option("--system", metavar="TEXT", help="What the model is told beforehand.")] = "",
) -> int:
    """Talk with a model. Ctrl-C stops an answer, and ends the conversation where there is none."""
    from myelin.cli.composition import assemble
    from myelin.cli.running import run_to_end

    repl = Repl(assemble(invocation), system)
    run_to_end(repl.run(), intercept=repl.intercept)
    return 0


class Repl:
    """Reads questions, shows answers."""

    def __init__(self, root: Root, system: str) -> None:
        self._root = root
        self._system = system
        self._answering: asyncio.Task[Completion] | None = None

    def intercept(self, number: int) -> bool:
        """A SIGINT while an answer is coming stops only the answer."""
        if number != signal.SIGINT or self._answering is None:
            return False
        self._answering.cancel()
        return True

    async def run(self) -> None:
        """Until the person leaves, or the pipeline is lost."""
        from myelin.cli import composition
        from myelin.cli.display import Display
        from myelin.cli.output import tell
        from myelin.cli.stages import stages_table
        from myelin.errors import RequestError
        from myelin.serve.chat import HELP, Conversation

        request = composition.run_request(self._root)
        with Display(self._root.settings.observability.log_level) as display:
            async with composition.open_pipeline(request, self._root.registry, display) as pipeline:
                display.quiet()
                tell(stages_table(pipeline.stages))
                prompter = composition.prompter(pipeline)
                if not prompter.has_template:
                    raise RequestError(
                        "The model has no chat template", "ask it with `myelin prompt`", reason="no-template"
                    )
                tell(HELP)
                lost = asyncio.ensure_future(pipeline.failed())
                talking = asyncio.ensure_future(self._talk(pipeline, Conversation(prompter, self._system)))
                try:
                    await asyncio.wait({lost, talking}, return_when=asyncio.FIRST_COMPLETED)
                    if talking.done():
                        talking.result()
                    else:
                        raise lost.result()
                finally:
                    for task in (lost, talking):
                        task.cancel()
                    await asyncio.gather(lost, talking, return_exceptions=True)

    async def _talk(self, pipeline: Pipeline, conversation: Conversation) -> None:
        from myelin.cli.output import answer, tell
        from myelin.errors import RequestError
        from myelin.serve.chat import HELP, Command, read_line

        lines = _Lines()
        while (line := await lines.next("> ")) is not None:
            try:
                said = read_line(line)
                if said is Command.EXIT:
                    return
                if said is Command.RESET:
                    conversation.reset()
                    tell("A new conversation")
                elif said is Command.HELP:
                    tell(HELP)
                elif said:
                    assert isinstance(said, str)
                    await self._answer(pipeline, conversation, said)
            except RequestError as error:
                tell(f"{error.message}; {error.hint}")
        answer("")

    async def _answer(self, pipeline: Pipeline, conversation: Conversation, question: str) -> None:
        from myelin.cli.output import answer

        prompt = conversation.ask(question)
        self._answering = asyncio.ensure_future(self._show(pipeline, prompt))
        try:
            completion = await self._answering
        except asyncio.CancelledError:
            if not self._answering.cancelled() or _being_cancelled():
                raise
            answer(" […]")
            return
        finally:
            self._answering = None
        answer("")
        conversation.answered(question, completion.text)

    async def _show(self, pipeline: Pipeline, prompt: tuple[int, ...]) -> Completion:
        from myelin.cli import composition
        from myelin.cli.output import answer
        from myelin.serve.generation import Completion, TextRequest, generate_text

        settings = self._root.settings.prompt
        request = TextRequest(
            prompt, settings.max_tokens, composition.sampling(self._root.settings), tuple(settings.stop)
        )
        async with aclosing(generate_text(pipeline, request)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Completion):
                    return piece
                answer(piece.text, end="")
        raise AssertionError("a generation ends with its completion")


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class _Lines:
    """Lines from standard input, read by a daemon thread: a blocked read must not keep the process from ending."""

    def __init__(self) -> None:
        if sys.stdin.isatty():
            with suppress(ImportError):
                import readline  # noqa: F401  # gives input() its editing keys

    async def next(self, prompt: str) -> str | None:
        """The next line, or None at the end of input."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[str | None] = loop.create_future()

        def deliver(line: str | None) -> None:
            if not result.done():
                result.set_result(line)

        def read() -> None:
            try:
                line: str | None = input(prompt) if sys.stdin.isatty() else (sys.stdin.readline() or None)
            except (EOFError, KeyboardInterrupt, ValueError):
                line = None
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(deliver, line)

        threading.Thread(target=read, name="myelin-chat-input", daemon=True).start()
        return await result
