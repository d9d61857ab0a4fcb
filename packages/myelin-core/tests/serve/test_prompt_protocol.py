"""The prompt RPC's lines: what is a request, what isn't, and how long one may be."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myelin.serve.prompt_protocol import (
    LineSplitter,
    MalformedLineError,
    TooLong,
    done,
    fault,
    parse_request,
    text_delta,
)
from myelin.values import FinishReason


def line(**fields: object) -> bytes:
    return json.dumps({"SubmitPrompt": fields}).encode()


def test_the_smallest_request() -> None:
    request = parse_request(b'{"SubmitPrompt":{"request_id":"a","prompt_text":"hi"}}')
    assert (request.request_id, request.prompt_text, request.max_tokens) == ("a", "hi", None)


def test_every_field_is_read() -> None:
    fields: dict[str, object] = {
        "request_id": 7,
        "prompt_text": "hi",
        "raw": True,
        "max_tokens": 5,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "seed": 2**64 - 1,
        "stop": ["x"],
    }
    assert parse_request(line(**fields)).model_dump(exclude_none=True) == fields


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b"hello",
        b"[]",
        b"null",
        b"{}",
        b'{"SubmitPrompt":3}',
        b'{"SubmitPrompt":{"request_id":"a"}}',
        b'{"SubmitPrompt":{"request_id":"a","prompt_text":"x"},"Other":1}',
        b'{"submitprompt":{"request_id":"a","prompt_text":"x"}}',
        b'{"SubmitPrompt":{"request_id":"a","prompt_text":"\\ud800"}}',
        b'{"SubmitPrompt":{"request_id":"a","prompt_text":"\xff"}}',
        b"[" * 100_000,
        b'{"SubmitPrompt":' * 10_000,
        line(prompt_text="x"),
        line(request_id=None, prompt_text="x"),
        line(request_id=True, prompt_text="x"),
        line(request_id="a" * 257, prompt_text="x"),
        line(request_id="a", prompt_text=3),
        line(request_id="a", prompt_text="x", max_tokens=0),
        line(request_id="a", prompt_text="x", max_tokens=-1),
        line(request_id="a", prompt_text="x", max_tokens="5"),
        line(request_id="a", prompt_text="x", max_tokens=2.5),
        line(request_id="a", prompt_text="x", max_tokens=10**30),
        line(request_id="a", prompt_text="x", temperature=-1),
        line(request_id="a", prompt_text="x", temperature=float("nan")),
        line(request_id="a", prompt_text="x", temperature=float("inf")),
        line(request_id="a", prompt_text="x", top_p=0),
        line(request_id="a", prompt_text="x", top_k=-1),
        line(request_id="a", prompt_text="x", seed=2**64),
        line(request_id="a", prompt_text="x", stop="x"),
        line(request_id="a", prompt_text="x", stop=[""]),
        line(request_id="a", prompt_text="x", stop=["x"] * 17),
        line(request_id="a", prompt_text="x", max_token=5),
        line(request_id="a", prompt_text="x", messages=[{"role": "user", "content": "x"}]),
        line(request_id="a", messages=[]),
        line(request_id="a", messages=[{"role": "robot", "content": "x"}]),
        line(request_id="a", messages=[{"role": "user"}]),
        line(request_id="a", messages=[{"role": "user", "content": "x"}], raw=True),
    ],
)
def test_anything_else_is_malformed(wrong: bytes) -> None:
    with pytest.raises(MalformedLineError) as caught:
        parse_request(wrong)
    assert caught.value.message
    assert caught.value.reason == "malformed"


def test_a_malformed_request_keeps_its_name_and_not_its_content() -> None:
    with pytest.raises(MalformedLineError) as caught:
        parse_request(line(request_id="mine", prompt_text="hush-hush", max_tokens="hush-hush"))
    assert caught.value.request_id == "mine"
    assert "hush-hush" not in caught.value.message
    assert "max_tokens" in caught.value.message


@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_or_malformed(data: bytes) -> None:
    try:
        request = parse_request(data)
    except MalformedLineError:
        return
    assert request.request_id is not None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(
        st.sampled_from(["request_id", "prompt_text", "messages", "raw", "max_tokens", "stop", "seed", "other"]),
        JSON,
    )
)
def test_any_fields_are_a_request_or_malformed(fields: dict[str, object]) -> None:
    try:
        request = parse_request(line(**fields))
    except MalformedLineError:
        return
    assert isinstance(fields["request_id"], (str, int))
    assert request.prompt_text == fields.get("prompt_text")


def test_answers_are_one_line_of_json_each() -> None:
    assert json.loads(text_delta("a", "li\nne €")) == {"TextDelta": {"request_id": "a", "text": "li\nne €"}}
    assert json.loads(done(7, "text", 3, 12, FinishReason.LENGTH)) == {
        "Done": {
            "request_id": 7,
            "final_text": "text",
            "tokens_generated": 3,
            "elapsed_ms": 12,
            "finish_reason": "length",
        }
    }
    assert json.loads(fault(None, "what", "how", "why")) == {
        "Fault": {"request_id": None, "error": "what", "hint": "how", "reason": "why"}
    }
    for bytes_ in (text_delta("a", "x\ny\r\n"), fault("a", "x\ny", "", "")):
        assert bytes_.endswith(b"\n")
        assert bytes_.count(b"\n") == 1


@given(st.binary(max_size=200), st.lists(st.integers(1, 40), max_size=20))
def test_lines_are_the_same_however_the_stream_is_cut(data: bytes, cuts: list[int]) -> None:
    limit = 16
    splitter = LineSplitter(limit)
    found: list[bytes | TooLong] = []
    position = 0
    for cut in [*cuts, len(data)]:
        found += splitter.feed(data[position : position + cut])
        position += cut
    expected: list[bytes | TooLong] = []
    *lines, rest = data.split(b"\n")
    for one in lines:
        if len(one) > limit:
            expected.append(TooLong())
        elif one.removesuffix(b"\r").strip():
            expected.append(one.removesuffix(b"\r"))
    if len(rest) > limit:
        expected.append(TooLong())
    assert found == expected


def test_a_long_line_takes_no_memory() -> None:
    splitter = LineSplitter(1000)
    found = [item for _ in range(10_000) for item in splitter.feed(b"x" * 1000)]
    assert found == [TooLong()]
    assert len(splitter._buffer) == 0
    assert list(splitter.feed(b"y\nnext\n")) == [b"next"]
