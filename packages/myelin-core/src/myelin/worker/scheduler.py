"""The head's continuous batching, pure: sequences and results come in, micro-batches go out.

The rules, in the order in which they bind:

- At most ``max_sequences`` sequences run; the others wait in the order of their submission.
- At most ``stages`` micro-batches are in flight, so that every stage can have one. Each holds at most
  ``ceil(running / stages)`` sequences: two sequences over two stages make two micro-batches that keep both stages busy,
  not one that leaves each of them idle half of the time.
- A prompt is cut into chunks of :attr:`SchedulerLimits.prefill_chunk` rows, whatever else is running and however many
  stages there are. Chunks of one sequence may be in flight one after another; sequences take turns by the chunk.
- In a micro-batch, tokens of running sequences come first, then chunks of prompts, as many as fit in
  ``max_batch_tokens``. A chunk that found no room goes first in the next micro-batch, and tokens that such a chunk kept
  out go first in the one after, so nobody starves.
- A sequence has one step in flight whose result is a token, at most: the next one needs that token.
- A sequence that ends is released once on every stage that saw it: its id travels in the next micro-batch down the
  chain, in order behind everything that was sent of it. Where there is nothing else to send, it travels alone.

An end-of-generation token ends its sequence and is not itself passed on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from myelin.engine.contract import Sample, Segment
from myelin.errors import RequestError, WireError
from myelin.values import FinishReason, SequenceId
from myelin.wire.requests import Finished, NewToken, Submit

Event = NewToken | Finished
"""What the scheduler tells the orchestrator."""

CHUNK_GRANULE = 32
"""Chunks are a multiple of this many rows where they can be: engines compute in blocks."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What the pipeline can do.

    Attributes:
        max_context: Positions of one sequence, its prompt and its new tokens together.
        max_sequences: Sequences that run at once.
        max_batch_tokens: Rows of a micro-batch at most.
        vocab_size: Token ids are below it.
        stages: Length of the pipeline.
        end_tokens: Ids that end a generation.
    """

    max_context: int
    max_sequences: int
    max_batch_tokens: int
    vocab_size: int
    stages: int = 1
    end_tokens: frozenset[int] = frozenset()

    @property
    def prefill_chunk(self) -> int:
        """Rows of a prompt in one micro-batch: a quarter of what a micro-batch may hold.

        A smaller chunk lets the stages work on one prompt at the same time, and keeps tokens of other sequences from
        waiting long behind it: S stages take (n + S - 1) / (n * S) of the time of one for a prompt of n chunks. A
        larger one saves little: with 128 rows an engine has unpacked its weights often enough (the CPU engine reaches
        99 % of its rate with 512).
        """
        chunk = max(1, self.max_batch_tokens // 4)
        return chunk - chunk % CHUNK_GRANULE if chunk > CHUNK_GRANULE else chunk


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What goes through the pipeline in one piece.

    Attributes:
        id: Counts from 0 in each scheduler; the results come back under it.
        segments: May be empty, where there are only releases; no result comes back then.
        tokens: ``int32[rows]``, segment after segment.
        releases: Sequences to forget before the segments are computed.
    """

    id: int
    segments: tuple[Segment, ...]
    tokens: NDArray[np.int32]
    releases: tuple[SequenceId, ...]


class _Sequence:
    """A sequence from its submission to its end.

    ``position`` is the next one to be fed; ``token`` the one to feed there once the prompt is through; ``admitted``
    says that it holds one of the places.
    """

    __slots__ = ("admitted", "ended", "generated", "position", "prompt", "submit", "token")

    def __init__(self, submit: Submit) -> None:
        self.submit = submit
        self.prompt = np.array(submit.prompt, dtype=np.int32)
        self.position = 0
        self.token = -1
        self.generated = 0
        self.admitted = False
        self.ended = False


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A micro-batch whose result is awaited, and the sequences that a token is awaited for, with its position."""

    id: int
    outputs: tuple[tuple[_Sequence, int], ...]


_NO_TOKENS = np.empty(0, dtype=np.int32)


class Scheduler:
    """See the module's text for the rules. Not thread-safe; the event loop owns it."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self._sequences: dict[SequenceId, _Sequence] = {}
        self._waiting: deque[_Sequence] = deque()
        self._prefilling: deque[_Sequence] = deque()
        self._ready: deque[_Sequence] = deque()
        self._in_flight: deque[_InFlight] = deque()
        self._releases: list[SequenceId] = []
        self._running = 0
        self._next_id = 0
        self._prompt_first = False
        self._chunk = limits.prefill_chunk

    @property
    def running(self) -> int:
        """Sequences that hold a place in the engines."""
        return self._running

    @property
    def waiting(self) -> int:
        """Sequences that wait for a place."""
        return len(self._waiting)

    @property
    def in_flight(self) -> int:
        """Micro-batches whose results are awaited."""
        return len(self._in_flight)

    def __contains__(self, sequence: SequenceId) -> bool:
        return sequence in self._sequences

    def submit(self, submit: Submit) -> None:
        """Take a sequence on; it ends in exactly one :class:`Finished`.

        Raises:
            RequestError: The prompt is empty, holds an id outside the vocabulary or leaves no room for a new token, or
                ``max_tokens`` is below 1.
            WireError: The sequence is already alive.
        """
        limits = self.limits
        if submit.sequence in self._sequences:
            raise WireError(f"sequence {submit.sequence} was submitted twice")
        length = len(submit.prompt)
        if length == 0:
            raise RequestError("the prompt is empty", "give it at least one token", reason="prompt-empty")
        if length + 1 > limits.max_context:
            raise RequestError(
                f"the prompt of {length} tokens leaves no room for an answer in a context of {limits.max_context}",
                "shorten the prompt, or start with a larger --max-context",
                reason="prompt-too-long",
            )
        if submit.max_tokens < 1:
            raise RequestError(
                f"max_tokens is {submit.max_tokens}", "ask for at least one new token", reason="max-tokens"
            )
        lowest, highest = min(submit.prompt), max(submit.prompt)
        if lowest < 0 or highest >= limits.vocab_size:
            raise RequestError(
                f"token {lowest if lowest < 0 else highest} is outside the vocabulary of {limits.vocab_size}",
                "encode the prompt with the model's own tokenizer",
                reason="token-out-of-range",
            )
        sequence = _Sequence(submit)
        self._sequences[submit.sequence] = sequence
        self._waiting.append(sequence)

    def cancel(self, sequence: SequenceId) -> Finished | None:
        """End a sequence now; None where it is unknown, or has ended already. Results that come later are dropped."""
        known = self._sequences.get(sequence)
        if known is None:
            return None
        return self._end(known, FinishReason.CANCELLED)

    def next_batch(self) -> MicroBatch | None:
        """The next micro-batch to send, or None where nothing can be sent now. Call it until it says None."""
        if len(self._in_flight) >= self.limits.stages:
            return None
        self._admit()
        segments, pieces, outputs = self._choose()
        if not segments and not self._releases:
            return None
        batch = MicroBatch(self._next_id, tuple(segments), _joined(pieces), tuple(self._releases))
        self._next_id += 1
        self._releases.clear()
        if segments:
            self._in_flight.append(_InFlight(batch.id, tuple(outputs)))
        return batch

    def complete(self, batch_id: int, samples: Sequence[Sample]) -> list[Event]:
        """Take the result of the oldest micro-batch in flight; what it means for the sequences, in order.

        Raises:
            WireError: It isn't the result that is due.
        """
        if not self._in_flight or self._in_flight[0].id != batch_id:
            raise WireError(f"the result of micro-batch {batch_id} came out of order")
        outputs = self._in_flight[0].outputs
        if len(samples) != len(outputs):
            raise WireError(f"micro-batch {batch_id} came back with {len(samples)} tokens, not {len(outputs)}")
        for (sequence, position), sample in zip(outputs, samples, strict=True):
            if sample.sequence != sequence.submit.sequence or sample.position != position:
                raise WireError(
                    f"micro-batch {batch_id} came back with position {sample.position} of sequence {sample.sequence}, "
                    f"not {position} of {sequence.submit.sequence}"
                )
        self._in_flight.popleft()
        events: list[Event] = []
        for (sequence, _), sample in zip(outputs, samples, strict=True):
            if not sequence.ended:
                self._advance(sequence, sample, events)
        return events

    def _advance(self, sequence: _Sequence, sample: Sample, events: list[Event]) -> None:
        """A running sequence got its next token."""
        submit = sequence.submit
        if not submit.ignore_end and sample.token in self.limits.end_tokens:
            events.append(self._end(sequence, FinishReason.STOP))
            return
        sequence.generated += 1
        sequence.token = sample.token
        events.append(NewToken(submit.sequence, sample.position, sample.token, sample.logprob))
        if sequence.generated == submit.max_tokens or sample.position + 1 >= self.limits.max_context:
            events.append(self._end(sequence, FinishReason.LENGTH))
        else:
            self._ready.append(sequence)

    def _admit(self) -> None:
        """Give free places to those who wait, first come, first served."""
        while self._waiting and self._running < self.limits.max_sequences:
            sequence = self._waiting.popleft()
            sequence.admitted = True
            self._prefilling.append(sequence)
            self._running += 1

    def _choose(self) -> tuple[list[Segment], list[NDArray[np.int32] | int], list[tuple[_Sequence, int]]]:
        """Segments of the next micro-batch, their tokens, and the positions that tokens are awaited for."""
        segments: list[Segment] = []
        pieces: list[NDArray[np.int32] | int] = []
        outputs: list[tuple[_Sequence, int]] = []
        places = -(-self._running // self.limits.stages)
        room = self.limits.max_batch_tokens

        turns = len(self._prefilling)
        prompt_first = self._prompt_first and turns > 0
        if prompt_first:
            room -= self._take_chunk(segments, pieces, outputs)
            places -= 1
            turns -= 1
        self._prompt_first = False

        while self._ready and places > 0 and room > 0:
            sequence = self._ready.popleft()
            submit = sequence.submit
            segments.append(Segment(submit.sequence, sequence.position, 1, True, submit.sampling))
            pieces.append(sequence.token)
            sequence.position += 1
            outputs.append((sequence, sequence.position))
            places -= 1
            room -= 1

        # Those that were given a chunk moved to the end of the queue: a sequence appears once in a micro-batch.
        for _ in range(min(turns, places)):
            if self._chunk_rows(self._prefilling[0]) > room:
                # By turns: where a chunk fills a micro-batch, the decodes that it kept out come first in the next one.
                self._prompt_first = not prompt_first
                break
            room -= self._take_chunk(segments, pieces, outputs)
        return segments, pieces, outputs

    def _chunk_rows(self, sequence: _Sequence) -> int:
        """Rows of its next chunk."""
        return min(self._chunk, len(sequence.prompt) - sequence.position)

    def _take_chunk(
        self,
        segments: list[Segment],
        pieces: list[NDArray[np.int32] | int],
        outputs: list[tuple[_Sequence, int]],
    ) -> int:
        """Put the next chunk of the first prompt in line into the micro-batch; its rows."""
        sequence = self._prefilling.popleft()
        rows = self._chunk_rows(sequence)
        start, end = sequence.position, sequence.position + rows
        last = end == len(sequence.prompt)
        segments.append(Segment(sequence.submit.sequence, start, rows, last, sequence.submit.sampling))
        pieces.append(sequence.prompt[start:end])
        sequence.position = end
        if last:
            outputs.append((sequence, end))
        else:
            self._prefilling.append(sequence)
        return rows

    def _end(self, sequence: _Sequence, reason: FinishReason) -> Finished:
        """A sequence ends: it gives its place back, and is released where something of it was sent."""
        submit = sequence.submit
        sequence.ended = True
        del self._sequences[submit.sequence]
        if not sequence.admitted:
            self._waiting.remove(sequence)
        else:
            self._running -= 1
            if sequence.position:
                self._releases.append(submit.sequence)
            for queue in (self._prefilling, self._ready):
                if sequence in queue:
                    queue.remove(sequence)
        return Finished(submit.sequence, reason, sequence.generated)


def _joined(pieces: list[NDArray[np.int32] | int]) -> NDArray[np.int32]:
    """The tokens of all segments in one array."""
    if not pieces:
        return _NO_TOKENS
    if all(isinstance(piece, int) for piece in pieces):
        return np.array(pieces, dtype=np.int32)
    return np.concatenate([np.atleast_1d(np.asarray(piece, dtype=np.int32)) for piece in pieces])
