"""A node's output as lines."""

from __future__ import annotations

MAX_LINE_BYTES = 16_384


class LineSplitter:
    """Cuts a stream of bytes into lines of text.

    A line that grows above ``limit`` bytes is cut there, and goes on as a new one, so that memory is bounded whatever a
    node writes. Bytes that aren't UTF-8 become replacement characters.
    """

    def __init__(self, limit: int = MAX_LINE_BYTES) -> None:
        self._limit = limit
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """The lines that are complete with ``data``, without their ends."""
        *complete, self._rest = (self._rest + data).split(b"\n")
        lines = [piece for line in complete for piece in self._pieces(line)]
        *full, self._rest = self._pieces(self._rest)
        return [self._text(piece) for piece in (*lines, *full)]

    def finish(self) -> list[str]:
        """The last line, where the stream ended without a line's end."""
        rest, self._rest = self._rest, b""
        return [self._text(rest)] if rest else []

    def _pieces(self, line: bytes) -> list[bytes]:
        if len(line) <= self._limit:
            return [line]
        return [line[start : start + self._limit] for start in range(0, len(line), self._limit)]

    @staticmethod
    def _text(line: bytes) -> str:
        return line.removesuffix(b"\r").decode(errors="replace")
