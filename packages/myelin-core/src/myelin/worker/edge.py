"""One edge stream in use: records out in order, records in with their numbering checked."""

from __future__ import annotations

from collections.abc import Callable

from myelin.errors import WireError
from myelin.transport.contract import MessageStream
from myelin.wire.record import Record, unpack
from myelin.worker.link import MessageLink


class EdgeLink(MessageLink):
    """A link that carries records; each direction numbers them from 0.

    The outbox needs no bound of its own: what is in flight on an edge is bounded by the scheduler.
    """

    def __init__(self, stream: MessageStream) -> None:
        super().__init__(stream)
        self._numbered = 0
        self._received = 0

    def number(self) -> int:
        """The place of this direction's next record in the stream.

        Every numbered record must be pushed, in order. Called from one thread alone, whichever that is.
        """
        number = self._numbered
        self._numbered += 1
        return number

    async def serve_records(self, on_record: Callable[[Record], None]) -> None:
        """:meth:`serve`, for records.

        Raises:
            WireError: The peer sent something that isn't the next record.
            TransportError: The stream broke.
            Exception: What ``on_record`` raised.
        """

        def on_message(message: bytes) -> None:
            record = unpack(message)
            if record.sequence != self._received:
                raise WireError(f"record {record.sequence} came where {self._received} was due")
            self._received += 1
            on_record(record)

        await self.serve(on_message)
