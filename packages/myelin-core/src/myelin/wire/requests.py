"""What the orchestrator and the head say to each other on the token-in edge: submit, cancel, tokens, finished.

Each has a ``to_meta``/``from_meta`` pair; the prompt travels as the record's ``int32[1, n]`` payload. Every number from a
peer is range-checked; :class:`~myelin.errors.WireError` otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

from myelin.values import GREEDY, FinishReason, SamplingParams, SequenceId


@dataclass(frozen=True, slots=True)
class Submit:
    """Start a sequence: its prompt and how to go on.

    Attributes:
        sequence: A number never used before in this run.
        prompt: Token ids; at least one.
        max_tokens: New tokens at most, at least 1.
        sampling: How each is chosen.
        ignore_end: Go on past end-of-generation tokens (benchmarks).
    """

    sequence: SequenceId
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = GREEDY
    ignore_end: bool = False


@dataclass(frozen=True, slots=True)
class NewToken:
    """A chosen token, for position ``position`` of its sequence, with its log-probability."""

    sequence: SequenceId
    position: int
    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Finished:
    """A sequence has ended at the head; ``generated`` tokens were sent before."""

    sequence: SequenceId
    reason: FinishReason
    generated: int
