"""Which sequence has which slot and pages, and how many positions it holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from myelin.engine_api import EngineError, EngineOptions, Segment, SequenceId


class Slots:
    """Slots for ``max_sequences`` sequences, and pages for all their positions, given out as sequences grow.

    A step is :meth:`check`, which changes nothing, then :meth:`begin`.
    """

    def __init__(self, options: EngineOptions, page: int, pages_a_slot: int) -> None:
        self._options = options
        self._page = page
        self._free_slots = list(range(options.max_sequences))[::-1]
        self._free_pages = list(range(options.max_sequences * pages_a_slot))[::-1]
        self._slots: dict[SequenceId, int] = {}
        self._pages: dict[SequenceId, list[int]] = {}
        self._lengths: dict[SequenceId, int] = {}

    @property
    def free_pages(self) -> int:
        """Pages that no sequence has."""
        return len(self._free_pages)

    def slot(self, sequence: SequenceId) -> int:
        """The sequence's slot."""
        return self._slots[sequence]

    def check(self, segments: Sequence[Segment]) -> None:
        """Whether the batch fits.

        Raises:
            EngineError: A sequence appears twice, a segment is empty, leaves a gap or goes beyond the context, or there
                are too many sequences.
        """
        names = [segment.sequence for segment in segments]
        if len(set(names)) != len(names):
            raise EngineError("a sequence appears twice in one batch", reason="duplicate-sequence")
        if len(self._slots.keys() | set(names)) > self._options.max_sequences:
            raise EngineError(
                f"more than {self._options.max_sequences} sequences at once",
                "Release one, or raise max_sequences.",
                reason="too-many-sequences",
            )
        for segment in segments:
            held = self._lengths.get(segment.sequence, 0)
            if segment.count < 1 or segment.start < 0:
                raise EngineError(f"sequence {segment.sequence} has an empty or negative segment", reason="segment")
            if segment.start > held:
                raise EngineError(
                    f"sequence {segment.sequence} jumps to position {segment.start} while {held} are held",
                    reason="position-gap",
                )
            if segment.start + segment.count > self._options.max_context:
                raise EngineError(
                    f"sequence {segment.sequence} would reach position {segment.start + segment.count} of a context of "
                    f"{self._options.max_context}",
                    "Shorten the prompt, or raise max_context.",
                    reason="context-overflow",
                )

    def begin(self, segments: Sequence[Segment]) -> Iterator[tuple[int, NDArray[np.int32]]]:
        """Give sequences what they need, and count the segments' positions as held.

        Yields:
            A slot and all its pages, where pages came to it.
        """
        for segment in segments:
            sequence, end = segment.sequence, segment.start + segment.count
            if sequence not in self._slots:
                self._slots[sequence] = self._free_slots.pop()
                self._pages[sequence] = []
            pages = self._pages[sequence]
            needed = -(-end // self._page)
            grown = needed > len(pages)
            while len(pages) < needed:
                pages.append(self._free_pages.pop())
            self._lengths[sequence] = end
            if grown:
                yield self._slots[sequence], np.array(pages, np.int32)

    def release(self, sequence: SequenceId) -> None:
        """Take back a sequence's slot and pages; one that isn't known is fine."""
        if sequence in self._slots:
            self._free_slots.append(self._slots.pop(sequence))
            self._free_pages.extend(reversed(self._pages.pop(sequence)))
            del self._lengths[sequence]
