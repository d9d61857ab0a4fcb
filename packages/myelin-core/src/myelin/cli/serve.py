"""``myelin serve``: a pipeline stays up and answers prompts until it is told to stop."""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

from myelin.cli.options import ANSWER_OPTIONS, PAGE_OPTIONS, RUN_OPTIONS, SERVE_OPTIONS, Invocation, with_options

if TYPE_CHECKING:
    import socket

    from myelin.cli.composition import Root
    from myelin.cli.display import Display
    from myelin.cli.page import Page
    from myelin.errors import MyelinError
    from myelin.orchestrator.pipeline import Pipeline
    from myelin.serve.http.address import Listening

NAME = "serve"


@with_options(RUN_OPTIONS, ANSWER_OPTIONS, SERVE_OPTIONS, PAGE_OPTIONS, yes=True)
def command(invocation: Invocation) -> int:
    """Keep a pipeline up and answer prompts on a port of this machine, until SIGINT or SIGTERM.

    A live page, the health and the metrics of the run are on another port (--http-bind).

    With --json, one document about the pipeline is written once it serves.
    """
    from myelin.cli.composition import assemble
    from myelin.cli.page import listener_of
    from myelin.cli.running import Interrupted, run_to_end
    from myelin.serve.prompt_rpc import bind

    root = assemble(invocation)
    server = _Server(root, as_json=invocation.json, yes=invocation.yes)
    # A port in use is known before any node is started.
    with closing(bind(root.settings.prompt.rpc_addr)) as listener, listener_of(root, always=True) as listening:
        try:
            run_to_end(server.run(listener, listening))
        except Interrupted:
            if not server.served:
                raise
    return 0


class _Server:
    """Brings the pipeline up and serves; ``served`` says whether it came that far."""

    def __init__(self, root: Root, *, as_json: bool, yes: bool = False) -> None:
        self._root = root
        self._as_json = as_json
        self._yes = yes
        self.served = False

    async def run(self, listener: socket.socket, listening: Listening | None) -> None:
        """Until cancelled, or until the pipeline is lost.

        Args:
            listener: Where prompts are taken.
            listening: Where HTTP is answered, if anywhere.

        Raises:
            MyelinError: The pipeline could not be brought up, or was lost.
        """
        from myelin.cli import composition
        from myelin.cli.agreement import asking, tell_total
        from myelin.cli.display import Display
        from myelin.cli.page import live_page

        settings = self._root.settings
        request = composition.run_request(self._root, live=listening is not None)
        with Display(settings.observability.log_level) as display, ExitStack() as afterwards:
            request = asking(request, yes=self._yes, quiet=display.quiet)
            async with (
                live_page(self._root, request, listening, display) as page,
                composition.open_pipeline(request, self._root.registry, page.observer) as pipeline,
            ):
                display.quiet()
                afterwards.callback(lambda: tell_total(pipeline.spend()))
                page.serving(pipeline)
                raise await self._serve(str(request.run), listener, pipeline, display, page)

    async def _serve(
        self, run: str, listener: socket.socket, pipeline: Pipeline, display: Display, page: Page
    ) -> MyelinError:
        """Answer prompts until the pipeline is lost; why it is."""
        from myelin.cli import composition
        from myelin.cli.agreement import tell_price
        from myelin.cli.output import tell
        from myelin.cli.stages import stages_table
        from myelin.serve.prompt_rpc import PromptServer, RequestDefaults, show_address

        settings = self._root.settings
        server = PromptServer(
            pipeline,
            composition.prompter(pipeline),
            places=pipeline.options.max_sequences,
            defaults=RequestDefaults(
                settings.prompt.max_tokens, composition.sampling(settings), tuple(settings.prompt.stop)
            ),
            on_request=display.line,
            book=page.book,
        )
        try:
            await server.start(listener)
            self.served = True
            tell(stages_table(pipeline.stages))
            tell_price(pipeline.spend())
            tell(f"Prompt RPC on {show_address(listener)}; Ctrl-C stops")
            if self._as_json:
                self._announce(run, show_address(listener), page.base_url, pipeline)
            return await pipeline.failed()
        finally:
            await server.close()

    def _announce(self, run: str, address: str, http: str, pipeline: Pipeline) -> None:
        from myelin.cli.output import answer_json
        from myelin.cli.stages import stages_json

        answer_json(
            {
                "run_id": run,
                "rpc_addr": address,
                "http_url": http,
                "bootstrap_s": pipeline.bootstrap_seconds,
                "stages": stages_json(pipeline.stages),
            }
        )
