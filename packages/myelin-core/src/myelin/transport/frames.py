"""Frames of the transport ``tcp``: how messages are told apart in a stream of bytes. Pure: no sockets, no event loop.

A frame is a header of :data:`HEADER_BYTES` bytes, little-endian, and its body::

    length    u32  bytes of the body
    kind      u8   FrameKind
    reserved  3s   zero

Header and body of small messages keep an alignment of eight bytes in the reader's buffer.
"""

from __future__ import annotations

import struct
from enum import IntEnum

from myelin.errors import WireError

_HEADER = struct.Struct("<IB3s")
HEADER_BYTES = _HEADER.size
BUFFER_BYTES = 64 * 1024
"""What a reader takes at once; a frame that is larger gets a buffer of its own."""
_RESERVED = b"\x00\x00\x00"


class FrameKind(IntEnum):
    """What a frame is."""

    OPEN = 1
    """The dialler's first: :data:`PREAMBLE`, then the protocol's name."""
    MESSAGE = 2
    """One message of the application, or of the handshake."""
    ALIVE = 3
    """Nothing to say, but well: sent where nothing else was for a while."""
    CLOSE = 4
    """The good end: nothing follows. Each side answers the other's with its own."""
    UNSERVED = 5
    """The acceptor doesn't serve the protocol."""


PREAMBLE = b"MYTC\x01"
"""Begins the body of OPEN: magic and version."""
MAX_PROTOCOL_BYTES = 255

_KINDS = {int(kind): kind for kind in FrameKind}
_EMPTY = frozenset({FrameKind.ALIVE, FrameKind.CLOSE, FrameKind.UNSERVED})


def header(kind: FrameKind, length: int) -> bytes:
    """The header of a frame whose body has ``length`` bytes."""
    return _HEADER.pack(length, kind, _RESERVED)


ALIVE_FRAME = header(FrameKind.ALIVE, 0)
CLOSE_FRAME = header(FrameKind.CLOSE, 0)
UNSERVED_FRAME = header(FrameKind.UNSERVED, 0)


def open_frame(protocol: str) -> bytes:
    """The dialler's first frame.

    Raises:
        WireError: The protocol's name is too long.
    """
    name = protocol.encode()
    if len(name) > MAX_PROTOCOL_BYTES:
        raise WireError(f"a protocol's name of {len(name)} bytes is too long")
    return header(FrameKind.OPEN, len(PREAMBLE) + len(name)) + PREAMBLE + name


def read_open(body: bytes) -> str:
    """The protocol that an OPEN frame asks for.

    Raises:
        WireError: It is malformed, or of another version.
    """
    if not body.startswith(PREAMBLE) or len(body) > len(PREAMBLE) + MAX_PROTOCOL_BYTES:
        raise WireError("a stream began with something else than Myelin's greeting", reason="stream-lost")
    try:
        return body[len(PREAMBLE) :].decode()
    except UnicodeDecodeError:
        raise WireError("a protocol's name is not text", reason="stream-lost") from None


class FrameReader:
    """Takes bytes as they come and gives whole frames.

    The bytes are written by the caller: :meth:`room`, then :meth:`wrote`, then :meth:`next` until it says None.

    Args:
        limit: Bytes of a body at most; a longer one is refused by its header, before anything is made for it.

    Attributes:
        limit: As given.
        hold: Bodies longer than this stay unread, and :meth:`held` says so. Raise it to go on: before a peer has proved
            who it is, nothing large is taken from it.
    """

    def __init__(self, limit: int, hold: int) -> None:
        self.hold = hold
        self.limit = limit
        self._buffer = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0
        self._large: bytearray | None = None
        self._large_kind = FrameKind.MESSAGE
        self._large_have = 0
        self._held = False

    @property
    def held(self) -> bool:
        """Whether the next frame is one that :attr:`hold` keeps back."""
        return self._held

    def room(self) -> memoryview:
        """Where the next bytes go; never empty, unless a frame is held and the buffer is full."""
        if self._large is not None:
            return memoryview(self._large)[self._large_have :]
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == BUFFER_BYTES:
            self._to_the_front()
        return self._view[self._end :]

    def wrote(self, count: int) -> None:
        """``count`` bytes were written to what :meth:`room` gave."""
        if self._large is not None:
            self._large_have += count
        else:
            self._end += count

    def next(self) -> tuple[FrameKind, bytes] | None:
        """The next frame, if it is whole: its kind and body.

        Raises:
            WireError: What came is no frame, or one above the limit. The stream is of no use any more.
        """
        if self._large is not None:
            if self._large_have < len(self._large):
                return None
            body, self._large = bytes(self._large), None
            return self._large_kind, body
        start, have = self._start, self._end - self._start
        if have < HEADER_BYTES:
            return None
        length, kind, reserved = _HEADER.unpack_from(self._buffer, start)
        known = _KINDS.get(kind)
        if known is None or reserved != _RESERVED or (length and known in _EMPTY):
            raise WireError("the peer speaks something else", "check the endpoint", reason="stream-lost")
        if length > self.limit:
            raise WireError(f"a message of {length} bytes came, above the limit", reason="stream-lost")
        self._held = length > self.hold
        if self._held:
            return None
        body_start = start + HEADER_BYTES
        if have >= HEADER_BYTES + length:
            self._start = body_start + length
            return known, bytes(self._view[body_start : body_start + length])
        if length > BUFFER_BYTES - HEADER_BYTES:
            self._large, self._large_kind, self._large_have = bytearray(length), known, have - HEADER_BYTES
            self._large[: self._large_have] = self._view[body_start : self._end]
            self._start = self._end = 0
        elif start + HEADER_BYTES + length > BUFFER_BYTES:
            self._to_the_front()
        return None

    def _to_the_front(self) -> None:
        """Move what is there to the front of the buffer."""
        have = self._end - self._start
        self._view[:have] = bytes(self._view[self._start : self._end])
        self._start, self._end = 0, have
