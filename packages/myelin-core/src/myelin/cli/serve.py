"""``myelin serve``: a pipeline stays up and answers prompts until it is told to stop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from myelin.cli.options import ANSWER_OPTIONS, RUN_OPTIONS, SERVE_OPTIONS, Invocation, with_options

if TYPE_CHECKING:
    import socket

    from myelin.cli.composition import Root
    from myelin.orchestrator.pipeline import Pipeline

NAME = "serve"


@with_options(RUN_OPTIONS, ANSWER_OPTIONS, SERVE_OPTIONS)
def command(invocation: Invocation) -> int:
    """Keep a pipeline up and answer prompts on a port of this machine, until SIGINT or SIGTERM.

    With --json, one document about the pipeline is written once it serves.
    """
    from myelin.cli.composition import assemble
    from myelin.cli.running import Interrupted, run_to_end
    from myelin.serve.prompt_rpc import bind

    root = assemble(invocation)
    server = _Server(root, as_json=invocation.json)
    # A port in use is known before any node is started.
    listener = bind(root.settings.prompt.rpc_addr)
    try:
        run_to_end(server.run(listener))
    except Interrupted:
        if not server.served:
            raise
    finally:
        listener.close()
    return 0


class _Server:
    """Brings the pipeline up and serves; ``served`` says whether it came that far."""

    def __init__(self, root: Root, *, as_json: bool) -> None:
        self._root = root
        self._as_json = as_json
        self.served = False

    async def run(self, listener: socket.socket) -> None:
        """Until cancelled, or until the pipeline is lost.

        Raises:
            MyelinError: The pipeline could not be brought up, or was lost.
        """
        from myelin.cli import composition
        from myelin.cli.display import Display
        from myelin.cli.output import tell
        from myelin.cli.stages import stages_table
        from myelin.serve.prompt_rpc import PromptServer, RequestDefaults, show_address

        settings = self._root.settings
        request = composition.run_request(self._root)
        with Display(settings.observability.log_level) as display:
            async with composition.open_pipeline(request, self._root.registry, display) as pipeline:
                display.quiet()
                server = PromptServer(
                    pipeline,
                    composition.prompter(pipeline),
                    places=pipeline.options.max_sequences,
                    defaults=RequestDefaults(
                        settings.prompt.max_tokens, composition.sampling(settings), tuple(settings.prompt.stop)
                    ),
                    on_request=display.line,
                )
                try:
                    await server.start(listener)
                    self.served = True
                    tell(stages_table(pipeline.stages))
                    tell(f"Prompt RPC on {show_address(listener)}; Ctrl-C stops")
                    if self._as_json:
                        self._announce(str(request.run), show_address(listener), pipeline)
                    raise await pipeline.failed()
                finally:
                    await server.close()

    def _announce(self, run: str, address: str, pipeline: Pipeline) -> None:
        from myelin.cli.output import answer_json
        from myelin.cli.stages import stages_json

        answer_json(
            {
                "run_id": run,
                "rpc_addr": address,
                "bootstrap_s": pipeline.bootstrap_seconds,
                "stages": stages_json(pipeline.stages),
            }
        )
