"""``myelin chat``: a conversation with a model, through its chat template."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from contextlib import ExitStack, aclosing, suppress
from typing import TYPE_CHECKING, Annotated

import typer

from myelin.cli.options import ANSWER_OPTIONS, PAGE_OPTIONS, RUN_OPTIONS, Invocation, with_options

if TYPE_CHECKING:
    from myelin.cli.composition import Root
    from myelin.config.settings import Settings
    from myelin.serve.chat import ChatModel, Conversation
    from myelin.serve.http.address import Listening
    from myelin.serve.prompts import Message

NAME = "chat"


@with_options(RUN_OPTIONS, ANSWER_OPTIONS, PAGE_OPTIONS, json=False, yes=True)
def command(
    invocation: Invocation,
    system: Annotated[str, typer.Option("--system", metavar="TEXT", help="What the model is told beforehand.")] = "",
    connect: Annotated[
        str,
        typer.Option("--connect", metavar="HOST:PORT", help="Talk with what `myelin serve` serves there."),
    ] = "",
) -> int:
    """Talk with a model. Ctrl-C stops an answer, and ends the conversation where there is none."""
    from myelin.cli.composition import assemble
    from myelin.cli.page import listener_of
    from myelin.cli.running import run_to_end

    if connect:
        _check_options(invocation)
    root = assemble(invocation)
    repl = Repl(root, system, yes=invocation.yes)
    if connect:
        run_to_end(repl.with_server(connect), intercept=repl.intercept)
        return 0
    with listener_of(root, always=False) as listening:
        run_to_end(repl.with_pipeline(listening), intercept=repl.intercept)
    return 0


def _check_options(invocation: Invocation) -> None:
    """Options about a pipeline mean nothing to one that is up already."""
    from myelin.errors import UsageError

    for key, (option, _) in invocation.options.items():
        if key.partition(".")[0] in ("model", "runtime", "provider", "serve"):
            raise UsageError(f"{option} has no effect with --connect", "leave it out, or start the server with it")


class Repl:
    """Reads questions, shows answers."""

    def __init__(self, root: Root, system: str, *, yes: bool = False) -> None:
        self._root = root
        self._yes = yes
        self._system = system
        self._answering: asyncio.Task[str] | None = None

    def intercept(self, number: int) -> bool:
        """A SIGINT while an answer is coming stops only the answer."""
        if number != signal.SIGINT or self._answering is None:
            return False
        self._answering.cancel()
        return True

    async def with_server(self, address: str) -> None:
        """Talk with a server's model until the person leaves."""
        from myelin.serve.prompt_client import ServerModel

        model = ServerModel(address, request_fields(self._root.settings))
        await model.check()
        await self._talk(model)

    async def with_pipeline(self, listening: Listening | None) -> None:
        """Bring a pipeline up and talk with its model, until the person leaves or the pipeline is lost."""
        from myelin.cli import composition
        from myelin.cli.agreement import asking, tell_price, tell_total
        from myelin.cli.display import Display
        from myelin.cli.output import tell
        from myelin.cli.page import live_page
        from myelin.cli.stages import stages_table
        from myelin.serve.chat import PipelineModel

        request = composition.run_request(self._root, live=listening is not None)
        settings = self._root.settings
        with Display(settings.observability.log_level) as display, ExitStack() as afterwards:
            request = asking(request, yes=self._yes, quiet=display.quiet)
            async with (
                live_page(self._root, request, listening, display) as page,
                composition.open_pipeline(request, self._root.registry, page.observer) as pipeline,
            ):
                display.quiet()
                afterwards.callback(lambda: tell_total(pipeline.spend()))
                page.serving(pipeline)
                tell(stages_table(pipeline.stages))
                tell_price(pipeline.spend())
                prompter = composition.prompter(pipeline)
                prompter.require_template()
                model = PipelineModel(
                    pipeline,
                    prompter,
                    max_tokens=settings.prompt.max_tokens,
                    sampling=composition.sampling(settings),
                    stop=settings.prompt.stop,
                    book=page.book,
                )
                lost = asyncio.ensure_future(pipeline.failed())
                talking = asyncio.ensure_future(self._talk(model))
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

    async def _talk(self, model: ChatModel) -> None:
        from myelin.cli.output import answer, tell
        from myelin.errors import RequestError
        from myelin.serve.chat import HELP, Command, Conversation, read_line

        conversation = Conversation(self._system)
        lines = _Lines()
        tell(HELP)
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
                    await self._ask(model, conversation, said)
            except RequestError as error:
                tell(f"{error.message}; {conversation.hint(error)}")
        answer("")

    async def _ask(self, model: ChatModel, conversation: Conversation, question: str) -> None:
        from myelin.cli.output import answer

        self._answering = asyncio.ensure_future(_show(model, conversation.ask(question)))
        try:
            text = await self._answering
        except asyncio.CancelledError:
            if not self._answering.cancelled() or _being_cancelled():
                raise
            answer(" […]")
            return
        finally:
            self._answering = None
        answer("")
        conversation.answered(question, text)


async def _show(model: ChatModel, messages: list[Message]) -> str:
    """Show an answer as it comes; all of it."""
    from myelin.cli.output import answer

    pieces: list[str] = []
    async with aclosing(model.answer(messages)) as coming:
        async for piece in coming:
            pieces.append(piece)
            answer(piece, end="")
    return "".join(pieces)


def request_fields(settings: Settings) -> dict[str, object]:
    """What the person has set for answers, and nothing else: a server has settings of its own."""
    from myelin.config.settings import Layer

    fields = {}
    for field in ("max_tokens", "temperature", "top_k", "top_p", "seed", "stop"):
        if settings.origin(f"prompt.{field}").layer is not Layer.DEFAULT:
            value = getattr(settings.prompt, field)
            fields[field] = list(value) if isinstance(value, tuple) else value
    return fields


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
