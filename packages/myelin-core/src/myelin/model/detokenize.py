"""Text from tokens as they come: characters only when they are whole, and stop strings before anybody sees them."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from myelin.errors import RequestError


class TokenBytes(Protocol):
    """What a text stream needs of a tokenizer."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token."""


class TextStream:
    """Turns tokens into text, holding back bytes that are not a whole character yet.

    What all calls return together is the UTF-8 decoding of the tokens' bytes, with U+FFFD for what isn't valid.
    """

    def __init__(self, tokenizer: TokenBytes) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        """The text that ``token`` completes; often the token's own, empty inside a character."""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        """What is left at the end: U+FFFD where a character was cut off, otherwise nothing."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Ends a text before the first stop string in it, wherever the pieces of the text are cut.

    The stop string that is complete first counts; of several that end at the same place, the longest. Text that could
    be the beginning of one is held back until it is clear that it isn't.

    Args:
        stops: The strings; none means that nothing stops.

    Raises:
        RequestError: One of them is empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise RequestError("a stop string is empty", "Leave it out.", reason="stop")
        self._stops = tuple(dict.fromkeys(stops))
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> tuple[str, bool]:
        """Take the next piece of text.

        Returns:
            The text that may be shown, and whether a stop string has ended it (then nothing more ever comes).
        """
        if self.matched is not None:
            return "", True
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return text[:start], True
        keep = self._beginning_at_end(text)
        self._held = text[keep:]
        return text[:keep], False

    def finish(self) -> str:
        """What was held back: no stop string came of it."""
        held, self._held = self._held, ""
        return held

    def _beginning_at_end(self, text: str) -> int:
        """Where the longest end of ``text`` begins that a stop string may still grow from, or its length."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stops):
                return start
        return len(text)
