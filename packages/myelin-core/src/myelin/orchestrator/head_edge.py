"""The orchestrator's edge to the head in one epoch: many sequences over one stream, each told of what comes for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from myelin.errors import EngineError, MyelinError, NodeError, RequestError, StreamClosed, TransportError, WireError
from myelin.transport.contract import MessageStream
from myelin.values import Epoch, SequenceId
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

Receiver = Callable[[Event | MyelinError], None]
"""Told of what comes for one sequence; raises WireError where that isn't what is due."""


class HeadEdge:
    """Submits sequences to the head and sorts what comes back. :meth:`serve` must run for as long as it is used."""

    def __init__(self, stream: MessageStream, epoch: Epoch) -> None:
        self.epoch = epoch
        self._stream = stream
        self._sent = 0
        self._received = 0
        self._retired = False
        self._receivers: dict[SequenceId, Receiver] = {}
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()

    def admit(self, submit: Submit, receiver: Receiver, flags: RecordFlags = RecordFlags.NONE) -> None:
        """Start a sequence.

        Raises:
            WireError: A number is out of range.
        """
        self._push(submit_record(submit, epoch=self.epoch, sequence=self._sent, flags=flags))
        self._receivers[submit.sequence] = receiver

    def cancel(self, sequence: SequenceId) -> None:
        """End a sequence; nobody is told of anything more of it."""
        if self._receivers.pop(sequence, None) is not None and not self._retired:
            self._push(cancel_record(sequence, epoch=self.epoch, sequence=self._sent))

    def retire(self) -> None:
        """The epoch is over: from now on nobody is told of anything."""
        self._retired = True
        self._receivers.clear()

    def _push(self, record: Record) -> None:
        self._outbox.put_nowait(pack(record))
        self._sent += 1

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
        if record.epoch < self.epoch:
            return
        if record.epoch > self.epoch or record.sequence != self._received:
            raise WireError(
                f"a record of epoch {record.epoch}, number {record.sequence} came where epoch {self.epoch}, "
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
        receiver = self._receivers.get(sequence)
        if receiver is not None:
            if not isinstance(event, NewToken):
                del self._receivers[sequence]
            receiver(event)

    def _take_fault(self, fault: Fault) -> None:
        """A fault of one sequence is its own; one of all, or a head that can't take any, is the epoch's."""
        if fault.sequence is None or fault.reason == _NOT_WORKING:
            raise NodeError(fault.message, fault.hint, reason=fault.reason or "pipeline-fault")
        kind = RequestError if fault.reason in _REQUEST_REASONS else EngineError
        self._deliver(fault.sequence, kind(fault.message, fault.hint, reason=fault.reason))

    async def close(self) -> None:
        """Close the stream; one that is broken already is fine."""
        try:
            await self._stream.close()
        except TransportError:
            pass


_NOT_WORKING = "pipeline-lost"
"""The head's word for a request that came when its epoch had failed already."""

_REQUEST_REASONS = frozenset({"prompt-empty", "prompt-too-long", "max-tokens", "token-out-of-range", "request"})
"""Reasons by which the head refuses a request; anything else about one sequence is the engine's."""
