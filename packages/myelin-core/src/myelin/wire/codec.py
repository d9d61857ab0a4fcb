"""Control messages as bytes: encoding and bounded decoding of :class:`~myelin.wire.control_pb2.Envelope`.

Protobuf bounds nothing by itself, so everything is checked here, both ways: the size of the whole, the length of each
text and of each list, the characters of identifiers, and that numbers are numbers. A message without a known body (from
a newer version, say) is refused; unknown fields inside a known body are ignored, so that a newer peer may add some.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, EncodeError, Message

from myelin.errors import WireError
from myelin.wire.control_pb2 import Envelope

MAX_ENVELOPE_BYTES = 1 << 20
MAX_TEXT_CHARACTERS = 4096
"""For a text that has no limit of its own in :data:`TEXT_LIMITS`."""
MAX_LIST_ENTRIES = 4096

TEXT_LIMITS = {
    "run": 63,
    "node": 63,
    "next_node": 63,
    "traceparent": 128,
    "version": 64,
    "engine": 63,
    "kv_dtype": 16,
    "phase": 63,
    "next_candidates": 255,
    "message": 16_384,
    "hint": 16_384,
}
"""Characters of a text, by the field's name."""

_IDENTIFIERS = frozenset({"run", "node", "next_node"})
_IDENTIFIER = re.compile(r"[A-Za-z0-9-]*")
_TEXTS_CUT = frozenset({"message", "hint"})
_MAX_DIGEST_BYTES = 64
BYTES_LIMITS = {"facts": 512 << 10}
"""Bytes of a field of bytes that is no digest, by its name."""


def encode(envelope: Envelope) -> bytes:
    """The bytes of ``envelope``. A failure's ``message`` and ``hint`` are cut, in place, where they are too long.

    Raises:
        WireError: It has no body, or something in it is out of bounds.
    """
    if envelope.WhichOneof("body") == "failure":
        failure = envelope.failure
        for name in _TEXTS_CUT:
            text = getattr(failure, name)
            if len(text) > TEXT_LIMITS[name]:
                setattr(failure, name, text[: TEXT_LIMITS[name] - 1] + "…")
    _check(envelope)
    try:
        message = envelope.SerializeToString()
    except (EncodeError, ValueError) as error:
        raise WireError(f"a control message can't be encoded: {error}") from None
    if len(message) > MAX_ENVELOPE_BYTES:
        raise WireError(f"a control message of {len(message)} bytes is above the limit of {MAX_ENVELOPE_BYTES}")
    return message


def decode(message: bytes) -> Envelope:
    """The envelope in ``message``.

    Raises:
        WireError: It isn't one, it has no body that we know, or something in it is out of bounds.
    """
    if len(message) > MAX_ENVELOPE_BYTES:
        raise WireError(f"a control message of {len(message)} bytes is above the limit of {MAX_ENVELOPE_BYTES}")
    envelope = Envelope()
    try:
        envelope.ParseFromString(message)
    except (DecodeError, ValueError, RecursionError):
        raise WireError("a control message is damaged") from None
    _check(envelope)
    return envelope


def _check(envelope: Envelope) -> None:
    if envelope.WhichOneof("body") is None:
        raise WireError("a control message has no body that this version knows", "run the same version on all nodes")
    for field, value in _values(envelope):
        if isinstance(value, str):
            limit = TEXT_LIMITS.get(field.name, MAX_TEXT_CHARACTERS)
            if len(value) > limit:
                raise WireError(f"a control message's {field.name} has {len(value)} characters, more than {limit}")
            if field.name in _IDENTIFIERS and not _IDENTIFIER.fullmatch(value):
                raise WireError(f"a control message's {field.name} is not an identifier")
        elif isinstance(value, bytes):
            limit = BYTES_LIMITS.get(field.name, _MAX_DIGEST_BYTES)
            if len(value) > limit:
                raise WireError(f"a control message's {field.name} has {len(value)} bytes, more than {limit}")
        elif isinstance(value, float) and not (math.isfinite(value) and value >= 0.0):
            raise WireError(f"a control message's {field.name} is {value}")


def _values(message: Message) -> Iterator[tuple[FieldDescriptor, object]]:
    """Every value that is set in ``message``, entries of lists and fields of messages inside included."""
    for field, value in message.ListFields():
        if field.is_repeated:
            if len(value) > MAX_LIST_ENTRIES:
                raise WireError(
                    f"a control message's {field.name} has {len(value)} entries, more than {MAX_LIST_ENTRIES}"
                )
            entries = value
        else:
            entries = (value,)
        for entry in entries:
            if isinstance(entry, Message):
                yield from _values(entry)
            else:
                yield field, entry
