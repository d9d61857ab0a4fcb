"""``myelin prompt TEXT``: a pipeline comes up, answers once, and goes down."""

from __future__ import annotations

import sys
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated

import typer

from myelin.cli.options import ANSWER_OPTIONS, PAGE_OPTIONS, RUN_OPTIONS, Invocation, with_options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from myelin.cli.composition import Root
    from myelin.orchestrator.pipeline import Pipeline, StageStatus
    from myelin.serve.generation import Completion, TextRequest
    from myelin.serve.http.address import Listening
    from myelin.serve.request_book import RequestTale

NAME = "prompt"


@with_options(RUN_OPTIONS, ANSWER_OPTIONS, PAGE_OPTIONS, yes=True)
def command(
    invocation: Invocation,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What to ask; - reads it from standard input.")],
    raw: Annotated[bool, typer.Option("--raw", help="Without the model's chat template.")] = False,
    system: Annotated[str, typer.Option("--system", metavar="TEXT", help="What the model is told beforehand.")] = "",
) -> int:
    """Ask a model once."""
    from myelin.cli.composition import assemble
    from myelin.cli.page import listener_of
    from myelin.cli.running import run_to_end
    from myelin.errors import UsageError

    if raw and system:
        raise UsageError("--system needs the chat template, which --raw leaves out", "leave out one of them")
    words = sys.stdin.read() if text == "-" else text
    root = assemble(invocation)
    with listener_of(root, always=False) as listening:
        run_to_end(_ask(root, words, listening, raw=raw, system=system, as_json=invocation.json, yes=invocation.yes))
    return 0


async def _ask(
    root: Root, words: str, listening: Listening | None, *, raw: bool, system: str, as_json: bool, yes: bool
) -> None:
    from myelin.cli import composition
    from myelin.cli.agreement import asking, spend_document, tell_price, tell_total
    from myelin.cli.display import Display
    from myelin.cli.output import answer, answer_json, tell
    from myelin.cli.page import live_page
    from myelin.cli.stages import stages_table
    from myelin.serve.generation import TextRequest
    from myelin.telemetry.requests import CHAT, UNLABELLED

    request = composition.run_request(root, live=listening is not None)
    settings = root.settings.prompt
    with Display(root.settings.observability.log_level) as display:
        request = asking(request, yes=yes, quiet=display.quiet)
        async with (
            live_page(root, request, listening, display) as page,
            composition.open_pipeline(request, root.registry, page.observer) as pipeline,
        ):
            display.quiet()
            page.serving(pipeline)
            tell(stages_table(pipeline.stages))
            tell_price(pipeline.spend())
            prompt = composition.prompter(pipeline).one(words, raw=raw, system=system)
            text_request = TextRequest(
                prompt,
                settings.max_tokens,
                composition.sampling(root.settings),
                tuple(settings.stop),
                label=UNLABELLED if raw else CHAT,
            )
            tale = page.book.arrived("prompt")
            completion = await _generate(pipeline, text_request, tale, show=not as_json)
            bootstrap_s, stages = pipeline.bootstrap_seconds, pipeline.stages
    spent = pipeline.spend()
    if as_json:
        answer_json(prompt_document(completion, bootstrap_s, stages) | spend_document(spent))
    else:
        answer("")
        tell(summary(completion, bootstrap_s))
    tell_total(spent)


async def _generate(pipeline: Pipeline, request: TextRequest, tale: RequestTale, *, show: bool) -> Completion:
    from myelin.cli.output import answer
    from myelin.serve.generation import Completion, generate_text

    async with aclosing(generate_text(pipeline, request, tale=tale)) as pieces:
        async for piece in pieces:
            if isinstance(piece, Completion):
                return piece
            if show:
                answer(piece.text, end="")
    raise AssertionError("a generation ends with its completion")


def prompt_document(completion: Completion, bootstrap_s: float, stages: Sequence[StageStatus]) -> dict[str, object]:
    """What ``myelin prompt --json`` answers."""
    from myelin.cli.stages import stages_json

    timings = completion.timings
    return {
        "text": completion.text,
        "tokens": list(completion.tokens),
        "prompt_tokens": completion.prompt_tokens,
        "finish_reason": completion.finish_reason.value,
        "timings": {
            "bootstrap_s": bootstrap_s,
            "ttft_s": timings.ttft_s,
            "prefill_tokens_per_s": timings.prefill_tokens_per_s,
            "decode_tokens_per_s": timings.decode_tokens_per_s,
        },
        "stages": stages_json(stages),
    }


def summary(completion: Completion, bootstrap_s: float) -> str:
    """A line for people about a finished answer."""
    timings = completion.timings
    return (
        f"[{completion.prompt_tokens} prompt tokens, {len(completion.tokens)} new ({completion.finish_reason.value}); "
        f"up in {bootstrap_s:.2f} s, first token after {timings.ttft_s:.2f} s, "
        f"{timings.decode_tokens_per_s:.1f} tokens/s]"
    )
