"""Keeping a token's way warm.

A step of an engine streams its stage's weights through the processor's caches, and leaves nothing else in them. What a
node does between two steps takes some 30 µs in all with warm caches, and ten to twenty times that with cold ones: a
good part of a small model's step. There is time to warm them up, since a node whose engine has nothing to do waits for
the other stages. So when a result has been sent and nothing more is due, the engine's thread reads, checks, schedules
and packs a record of the kind that will come next, made up once and for all, and drops what comes of it.

It costs what the node would otherwise spend a little later; where the caches were warm anyway (a tiny model), next to
nothing. A busy node, with more than one micro-batch on its way, doesn't do it.
"""

from __future__ import annotations

import numpy as np

from myelin.engine.contract import Sample, Segment
from myelin.transport.frames import FrameKind, FrameReader, header
from myelin.values import GREEDY, Epoch, SequenceId
from myelin.wire.record import PayloadType, Record, RecordKind, beginning, pack, unpack
from myelin.wire.requests import NewToken, Submit, tokens_record
from myelin.worker.scheduler import MicroBatch, Scheduler, SchedulerLimits
from myelin.worker.segments import BatchLimits, pack_batch, pack_samples, unpack_batch, unpack_samples

MOST_COLUMNS = 8192
"""Rows that are wider are rehearsed with this many columns: it is the code that must be warm, not the row."""

_FOREVER = 1 << 40
_LIMITS = BatchLimits(max_context=_FOREVER, max_sequences=1, max_batch_tokens=1)
_SEQUENCE = SequenceId(1)
_EPOCH = Epoch(1)
_SEGMENTS = (Segment(_SEQUENCE, 1, 1, True, GREEDY),)
_META = pack_batch(_SEGMENTS, ())


class _Incoming:
    """One record that comes in again and again."""

    def __init__(self, message: bytes) -> None:
        self._frame = header(FrameKind.MESSAGE, len(message)) + message
        self._reader = FrameReader(len(message), hold=len(message))

    def read(self) -> Record:
        """It has come."""
        self._reader.room()[: len(self._frame)] = self._frame  # it fits: the frame before it was read to its end
        self._reader.wrote(len(self._frame))
        frame = self._reader.next()
        assert frame is not None
        return unpack(frame[1])


class StageRehearsal:
    """Of a stage that hidden rows come to.

    Args:
        width: Their columns.
    """

    def __init__(self, width: int) -> None:
        width = min(width, MOST_COLUMNS)
        rows = np.zeros((1, width), dtype=np.float32)
        self._width = width
        self._incoming = _Incoming(
            pack(
                Record(
                    kind=RecordKind.BATCH,
                    epoch=_EPOCH,
                    object_id=1,
                    sequence=1,
                    meta=_META,
                    payload=rows.data.cast("B"),
                    dtype=PayloadType.FLOAT32,
                    rows=1,
                    columns=width,
                )
            )
        )

    def __call__(self) -> None:
        """Take a row in, and pack what would go out."""
        record = self._incoming.read()
        segments, _ = unpack_batch(record.meta, record.rows, _LIMITS)
        np.frombuffer(record.payload, dtype="<f4").reshape(1, self._width).copy()
        sample = Sample(segments[0].sequence, 2, 0, 0.0)
        beginning(RecordKind.SAMPLES, _EPOCH, 1, 1, meta=pack_samples((sample,)))


class HeadRehearsal:
    """Of a stage that schedules and is told of the tokens."""

    def __init__(self, stages: int) -> None:
        meta = pack_samples((Sample(_SEQUENCE, 1, 0, 0.0),))
        self._incoming = _Incoming(
            pack(Record(kind=RecordKind.SAMPLES, epoch=_EPOCH, object_id=1, sequence=1, meta=meta))
        )
        self._scheduler = Scheduler(
            SchedulerLimits(max_context=_FOREVER, max_sequences=1, max_batch_tokens=1, vocab_size=1, stages=stages)
        )
        self._scheduler.submit(Submit(_SEQUENCE, (0,), _FOREVER, GREEDY, True))
        self._batch = self._next()

    def __call__(self) -> None:
        """Take a token in, schedule the next step, and pack what would go out of it."""
        record = self._incoming.read()
        unpack_samples(record.meta, vocab_size=1, limits=_LIMITS)
        segment = self._batch.segments[0]
        events = self._scheduler.complete(self._batch.id, (Sample(_SEQUENCE, segment.start + segment.count, 0, 0.0),))
        self._batch = self._next()
        beginning(RecordKind.BATCH, _EPOCH, 1, 1, meta=_META, dtype=PayloadType.FLOAT32, rows=1, columns=1)
        pack(tokens_record([event for event in events if isinstance(event, NewToken)], epoch=_EPOCH, sequence=1))

    def _next(self) -> MicroBatch:
        batch = self._scheduler.next_batch()
        assert batch is not None
        return batch
