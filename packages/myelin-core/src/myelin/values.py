"""Plain values that every room shares: identifiers, sampling parameters, finish reasons."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

RunId = NewType("RunId", str)
"""One bootstrap of one model: letters, digits and ``-``; at most 63 characters."""

NodeId = NewType("NodeId", str)
"""A logical node (``stage-0``, ``stage-1``, …); it outlives the attempts that embody it."""

LeaseId = NewType("LeaseId", str)
"""A provider's own name for one started node."""

Attempt = NewType("Attempt", int)
"""Which start of a logical node this is: 1, 2, …"""

Epoch = NewType("Epoch", int)
"""The pipeline's generation number, an unsigned 32-bit integer; records of an older epoch are dropped."""

SequenceId = NewType("SequenceId", int)
"""One request's token sequence inside a pipeline, an unsigned 64-bit integer, never reused within a run."""


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    """An end-of-generation token or a stop string."""
    LENGTH = "length"
    """``max_tokens`` or the context was reached."""
    CANCELLED = "cancelled"
    """The client went away or asked for it."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen from the logits.

    Attributes:
        temperature: 0 is greedy (ties go to the lowest id); otherwise logits are divided by it.
        top_k: Keep only the k most likely tokens; 0 keeps all.
        top_p: Keep the smallest set of tokens whose probabilities add up to at least this, in (0, 1].
        seed: With the token's position it keys the random draw, so a replay gives the same tokens.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


GREEDY = SamplingParams()
