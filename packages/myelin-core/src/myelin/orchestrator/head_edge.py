"""The orchestrator's edge to the head: many sequences over one stream, each with a mailbox of its own."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from myelin.errors import EngineError, MyelinError, NodeError, RequestError, StreamClosed, TransportError, WireError
from myelin.orchestrator.control import fresh
from myelin.transport.contract import MessageStream
from myelin.values import Epoch, SamplingParams, SequenceId
from myelin.wire.record import Record, RecordFlags, RecordKind, pack, unpack
from myelin.wire.requests import (
    Fault,
    Finished,
    NewToken,
    Submit,
    cancel_record,
    read_fault,
    read_finished,
    read_tokens,
    submit_record,
)

Event = NewToken | Finished


class Mailbox:
    """What comes for one sequence, in order."""

    def __init__(self, sequence: SequenceId) -> None:
        self.sequence = sequence
        self.finished = False
        self._events: asyncio.Queue[Event | MyelinError] = asyncio.Queue()

    def put(self, event: Event | MyelinError) -> None:
        """Deliver; after an end or an error nothing more comes."""
        if not self.finished:
            self.finished = not isinstance(event, NewToken)
            self._events.put_nowait(event)

    async def get(self) -> Event:
        """The next event.

        Raises:
            MyelinError: The sequence can't go on.
        """
        event = await self._events.get()
        if isinstance(event, MyelinError):
            raise fresh(event)
        return event


class HeadEdge:
    """Submits sequences to the head and sorts what comes back. :meth:`serve` must run for as long as it is used."""

    def __init__(self, stream: MessageStream, epoch: Epoch) -> None:
        self._stream = stream
        self._epoch = epoch
        self._ids = itertools.count(1)
        self._sent = 0
        self._received = 0
        self._mailboxes: dict[SequenceId, Mailbox] = {}
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()
        self.lost: MyelinError | None = None
        self.submitted = 0

    def submit(
        self,
        prompt: tuple[int, ...],
        *,
        max_tokens: int,
        sampling: SamplingParams,
        ignore_end: bool,
        flags: RecordFlags = RecordFlags.NONE,
    ) -> Mailbox:
        """Start a sequence.

        Raises:
            MyelinError: The pipeline is lost.
            WireError: A number is out of range.
        """
        if self.lost is not None:
            raise fresh(self.lost)
        mailbox = Mailbox(SequenceId(next(self._ids)))
        submit = Submit(mailbox.sequence, prompt, max_tokens, sampling, ignore_end)
        self._push(submit_record(submit, epoch=self._epoch, sequence=self._sent, flags=flags))
        self._mailboxes[mailbox.sequence] = mailbox
        self.submitted += 1
        return mailbox

    def forget(self, mailbox: Mailbox) -> None:
        """Nobody wants more of it: cancel it at the head if it has not ended there."""
        self._mailboxes.pop(mailbox.sequence, None)
        if not mailbox.finished and self.lost is None:
            mailbox.finished = True
            self._push(cancel_record(mailbox.sequence, epoch=self._epoch, sequence=self._sent))

    def _push(self, record: Record) -> None:
        self._outbox.put_nowait(pack(record))
        self._sent += 1

    def fail(self, error: MyelinError) -> None:
        """The pipeline is lost: everybody who waits is told at once."""
        if self.lost is None:
            self.lost = error
        for mailbox in self._mailboxes.values():
            mailbox.put(error)

    async def serve(self, on_lost: Callable[[MyelinError], None]) -> None:
        """Send and receive until the stream ends; then ``on_lost`` is told why."""
        sender = asyncio.create_task(self._send())
        try:
            while True:
                self._take(unpack(await self._stream.receive()))
        except StreamClosed:
            on_lost(NodeError("the head closed its edge", "--log-level debug shows what it wrote", reason="edge-lost"))
        except WireError as error:
            on_lost(NodeError(f"the head sent something malformed: {error.message}", error.hint, reason="edge-broken"))
        except TransportError as error:
            on_lost(NodeError(f"the edge to the head was lost: {error.message}", error.hint, reason="edge-lost"))
        except MyelinError as error:
            on_lost(error)
        finally:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)

    async def _send(self) -> None:
        """Send what is pushed. A broken stream is the receiver's to report."""
        try:
            while True:
                await self._stream.send(await self._outbox.get())
        except TransportError:
            return

    def _take(self, record: Record) -> None:
        if record.epoch < self._epoch:
            return
        if record.epoch > self._epoch or record.sequence != self._received:
            raise WireError(
                f"a record of epoch {record.epoch}, number {record.sequence} came where epoch {self._epoch}, "
                f"number {self._received} was due"
            )
        self._received += 1
        if record.kind is RecordKind.TOKENS:
            for token in read_tokens(record):
                self._deliver(token.sequence, token)
        elif record.kind is RecordKind.FINISHED:
            finished = read_finished(record)
            self._deliver(finished.sequence, finished)
        elif record.kind is RecordKind.FAULT:
            self._take_fault(read_fault(record))
        else:
            raise WireError(f"a {record.kind.name} record came from the head")

    def _deliver(self, sequence: SequenceId, event: Event | MyelinError) -> None:
        """What comes for a sequence that nobody wants any more is dropped."""
        mailbox = self._mailboxes.get(sequence)
        if mailbox is not None:
            mailbox.put(event)

    def _take_fault(self, fault: Fault) -> None:
        if fault.sequence is None:
            raise NodeError(fault.message, fault.hint, reason=fault.reason or "pipeline-fault")
        kind = RequestError if fault.reason in _REQUEST_REASONS else EngineError
        self._deliver(fault.sequence, kind(fault.message, fault.hint, reason=fault.reason))

    async def close(self) -> None:
        """Close the stream; one that is broken already is fine."""
        try:
            await self._stream.close()
        except TransportError:
            pass


_REQUEST_REASONS = frozenset({"prompt-empty", "prompt-too-long", "max-tokens", "token-out-of-range", "request"})
"""Reasons by which the head refuses a request; anything else about one sequence is the engine's."""
