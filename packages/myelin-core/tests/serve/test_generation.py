"""Text from tokens as they come: whole characters, stop strings, reasons, and times."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_pipeline import ScriptedPipeline

from myelin.errors import NodeError, RequestError
from myelin.serve.generation import Completion, TextPiece, TextRequest, complete, generate_text, timings
from myelin.values import FinishReason, SamplingParams


def request(text: str = "q", **more: object) -> TextRequest:
    return TextRequest(tuple(text.encode()), **{"max_tokens": 100, **more})


async def gather(pipeline: ScriptedPipeline, asked: TextRequest) -> tuple[list[str], Completion]:
    pieces: list[str] = []
    completion = None
    async for event in generate_text(pipeline, asked):
        assert completion is None, "nothing comes after the completion"
        if isinstance(event, TextPiece):
            pieces.append(event.text)
        else:
            completion = event
    assert completion is not None
    return pieces, completion


async def test_pieces_are_whole_characters_and_add_up_to_the_text() -> None:
    answer = "héllo 👩‍🚀 你好"
    pieces, completion = await gather(ScriptedPipeline(lambda text: answer), request())
    assert "".join(pieces) == completion.text == answer
    assert all(piece and "�" not in piece for piece in pieces)
    assert completion.tokens == tuple(answer.encode())
    assert completion.finish_reason is FinishReason.STOP


async def test_what_is_cut_off_inside_a_character_is_replaced_at_the_end() -> None:
    pieces, completion = await gather(ScriptedPipeline(lambda text: "a👩"), request(max_tokens=3))
    assert completion.text == "a�"
    assert completion.finish_reason is FinishReason.LENGTH
    assert pieces[0] == "a"


async def test_a_stop_string_ends_the_generation_and_is_not_part_of_it() -> None:
    pipeline = ScriptedPipeline(lambda text: "one two END three")
    pieces, completion = await gather(pipeline, request(stop=("END",)))
    assert "".join(pieces) == completion.text == "one two "
    assert completion.finish_reason is FinishReason.STOP
    assert pipeline.calls[0].cancelled
    assert pipeline.calls[0].given == len("one two END")


async def test_the_beginning_of_a_stop_string_that_does_not_come_is_shown() -> None:
    _, completion = await gather(ScriptedPipeline(lambda text: "ABCEN"), request(stop=("END", "CED")))
    assert completion.text == "ABCEN"


@given(st.text(alphabet="ab€", max_size=12), st.lists(st.text(alphabet="ab€", min_size=1, max_size=3), max_size=3))
async def test_any_text_ends_before_its_first_stop_string(answer: str, stops: list[str]) -> None:
    pieces, completion = await gather(ScriptedPipeline(lambda text: answer), request(stop=tuple(stops)))
    ends = [(answer.index(stop) + len(stop), answer.index(stop)) for stop in stops if stop in answer]
    assert completion.text == (answer[: min(ends)[1]] if ends else answer)
    assert "".join(pieces) == completion.text


async def test_what_was_asked_reaches_the_pipeline() -> None:
    pipeline = ScriptedPipeline()
    sampling = SamplingParams(temperature=0.5, seed=7)
    await complete(pipeline, request("hi", max_tokens=5, sampling=sampling, ignore_end=True))
    (call,) = pipeline.calls
    assert (call.text, call.max_tokens, call.sampling, call.ignore_end) == ("hi", 5, sampling, True)


async def test_closing_early_cancels() -> None:
    pipeline = ScriptedPipeline(lambda text: "abc" * 100)
    stream = generate_text(pipeline, request())
    await anext(stream)
    await stream.aclose()
    assert pipeline.calls[0].cancelled
    assert pipeline.running == 0


async def test_errors_come_through() -> None:
    with pytest.raises(RequestError):
        await complete(ScriptedPipeline(max_context=1), request("too long"))
    with pytest.raises(NodeError):
        await complete(ScriptedPipeline(error=NodeError("lost")), request())


async def test_times_are_taken_from_the_request_to_its_tokens() -> None:
    def clock() -> Iterator[float]:
        yield 10.0  # the request
        yield 12.0  # first token
        yield 12.5
        yield 13.0
        yield 14.0  # the end

    ticks = clock()
    stream = generate_text(ScriptedPipeline(lambda text: "abc"), request("four"), clock=lambda: next(ticks))
    completion = [event async for event in stream][-1]
    assert isinstance(completion, Completion)
    assert completion.timings.ttft_s == 2.0
    assert completion.timings.elapsed_s == 4.0
    assert completion.timings.prefill_tokens_per_s == 2.0
    assert completion.timings.decode_tokens_per_s == 2.0


@pytest.mark.parametrize(
    ("new_tokens", "ttft_s", "decode_s", "prefill", "decode"),
    [(0, 1.0, 0.0, 0.0, 0.0), (1, 2.0, 0.0, 5.0, 0.0), (5, 2.0, 2.0, 5.0, 2.0), (2, 0.0, 0.0, 0.0, 0.0)],
)
def test_rates(new_tokens: int, ttft_s: float, decode_s: float, prefill: float, decode: float) -> None:
    found = timings(prompt_tokens=10, new_tokens=new_tokens, ttft_s=ttft_s, decode_s=decode_s, elapsed_s=9.0)
    assert (found.prefill_tokens_per_s, found.decode_tokens_per_s) == (prefill, decode)
