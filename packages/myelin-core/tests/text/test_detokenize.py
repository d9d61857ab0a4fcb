"""Text from tokens: whole characters only, and stop strings that nobody sees."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myelin.errors import RequestError
from myelin.model.detokenize import StopStrings, TextStream


class Bytes:
    """A tokenizer whose token *n* is the *n*-th of some byte strings."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token]


def streamed(pieces: list[bytes]) -> list[str]:
    stream = TextStream(Bytes(pieces))
    return [*(stream.feed(token) for token in range(len(pieces))), stream.finish()]


def test_a_character_over_several_tokens_comes_with_the_last() -> None:
    assert streamed([b"a\xf0", b"\x9f\x98", b"\x80b", b""]) == ["a", "", "😀b", "", ""]


def test_a_character_cut_off_at_the_end_is_replaced_once() -> None:
    assert streamed([b"ok \xf0\x9f"]) == ["ok ", "\ufffd"]


def test_only_what_is_invalid_is_replaced() -> None:
    assert "".join(streamed([b"a\xff", b"\xe4\xbd", b"\xa0"])) == "a\ufffd你"


@given(st.lists(st.binary(max_size=5)))
def test_the_stream_is_the_decoding_of_all_bytes(pieces: list[bytes]) -> None:
    assert "".join(streamed(pieces)) == b"".join(pieces).decode("utf-8", "replace")


@given(st.text(min_size=1), st.data())
def test_no_valid_text_is_ever_replaced(text: str, data: st.DataObject) -> None:
    raw = text.encode("utf-8", "replace")
    cuts = sorted(data.draw(st.sets(st.integers(0, len(raw)))))
    pieces = [raw[start:end] for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    assert "".join(streamed(pieces)) == raw.decode()


def fed(stops: list[str], pieces: list[str]) -> tuple[str, bool, list[str]]:
    """Everything that came out, whether it stopped, and what was out after each piece."""
    matcher = StopStrings(stops)
    shown, stopped, after = "", False, []
    for piece in pieces:
        text, stopped = matcher.feed(piece)
        shown += text
        after.append(shown)
    if not stopped:
        shown += matcher.finish()
    return shown, stopped, after


def test_a_prefix_that_comes_to_nothing_is_shown() -> None:
    assert fed(["DEFGHIJ"], ["A", "B", "C"])[:2] == ("ABC", False)
    assert fed(["DEFGHIJ"], ["ABC", "DEF"])[:2] == ("ABCDEF", False)


def test_a_stop_string_over_several_pieces_leaks_nothing() -> None:
    shown, stopped, after = fed(["</end>"], ["text<", "/e", "nd", "> more"])
    assert (shown, stopped) == ("text", True)
    assert after == ["text", "text", "text", "text"]


def test_nothing_comes_after_a_stop() -> None:
    matcher = StopStrings(["x"])
    assert matcher.feed("axb") == ("a", True)
    assert matcher.feed("more") == ("", True)
    assert matcher.finish() == ""
    assert matcher.matched == "x"


def test_the_stop_string_that_is_complete_first_counts_and_the_longest_of_those() -> None:
    assert fed(["abcd", "bc"], ["xabcd"])[0] == "xa"
    assert fed(["bc", "abc"], ["xabc"])[0] == "x"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match="empty"):
        StopStrings(["a", ""])


def expected(stops: list[str], text: str) -> tuple[str, bool]:
    """Character by character: the slow and obvious twin."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            return text[: end - max(map(len, matches))], True
    return text, False


@given(
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    st.lists(st.text("abc", max_size=4), max_size=12),
)
def test_it_does_not_matter_how_the_text_is_cut(stops: list[str], pieces: list[str]) -> None:
    shown, stopped, after = fed(stops, pieces)
    assert (shown, stopped) == expected(stops, "".join(pieces))
    assert all(shown.startswith(part) for part in after)


@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.text("abc", max_size=20))
def test_no_more_is_held_back_than_must_be(stops: list[str], text: str) -> None:
    matcher = StopStrings(stops)
    shown, stopped = matcher.feed(text)
    if not stopped:
        held = text[len(shown) :]
        assert not held or any(stop.startswith(held) for stop in stops)
