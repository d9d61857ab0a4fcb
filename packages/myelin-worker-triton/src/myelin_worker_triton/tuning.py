"""What differs between devices, in one table: tile shapes, the integer-dot instruction, how many programs to start.

Nothing else in this package asks what kind of GPU it runs on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Tuning:
    """How kernels are specialised on a device.

    Attributes:
        use_asm: The device has ``dp4a`` and ``prmt`` (NVIDIA's instructions); otherwise plain Triton.
        groups: Groups of 32 elements in a tile: the lanes of a warp, so that each thread has one.
        rows, warps: Rows of a tile of the projections, and warps: one row each.
        repeat: Tiles of rows that one pass over the activations serves, by columns.
        book_repeat: The same for one column where IQ4's codebook is among the types: it costs most instructions.
        wide_rows, wide_warps, wide_repeat, wide_book_repeat: The same for gate and up, whose tiles are whole groups of
            32 rows. Their warps are the same for all columns: the sums of the norm before them go by warps.
        block: Elements that a program normalises at once.
        page: Positions of a page of keys and values.
        pages_a_split: Pages of a split of the context.
        least_shared: Least number of query heads in a tile (what ``tl.dot`` takes).
        attention_warps: Warps of an attention program over float16 keys and values.
        most_registers: What a thread of gate and up may have where the compiler would rather spill; 0 leaves it to it.
        book_registers: The same for one column where both are IQ4: given all, the compiler needs more instructions.
        multiprocessors: Of the device.
        programs: Programs that are started for each multiprocessor at most.
        vocabulary_block: Logits that a sampling program looks at.
        prefill_rows: Rows of a batch from which tiled matrix products are used, unless results must not depend on it.
        prefill_tile: Rows, outputs and elements of a tile of those, and their warps.
        prefill_run: Positions of a sequence in a program of attention.
    """

    use_asm: bool
    groups: int = 32
    rows: int = 4
    warps: int = 4
    repeat: tuple[tuple[int, int], ...] = ((1, 4), (2, 4), (4, 2), (8, 2))
    book_repeat: int = 8
    wide_rows: int = 8
    wide_warps: int = 8
    wide_repeat: int = 4
    wide_book_repeat: int = 8
    block: int = 1024
    page: int = 64
    pages_a_split: int = 4
    least_shared: int = 16
    attention_warps: int = 4
    most_registers: int = 0
    book_registers: int = 0
    multiprocessors: int = 132
    programs: int = 4
    vocabulary_block: int = 4096
    prefill_rows: int = 32
    prefill_tile: tuple[int, int, int, int] = (64, 64, 64, 4)
    prefill_run: int = 64

    def repeat_for(self, columns: int) -> int:
        """Of a projection of so many columns."""
        return dict(self.repeat)[columns]


NVIDIA = Tuning(use_asm=True, most_registers=255, book_registers=128)
"""Compute capability 8.0 and later."""

AMD = Tuning(use_asm=False, groups=64, book_repeat=4, wide_book_repeat=4)
"""CDNA, whose warps have 64 lanes; the integer dots are Triton's own there."""

INTERPRETER = Tuning(
    use_asm=False,
    groups=8,
    rows=512,
    repeat=((1, 1), (2, 1), (4, 1), (8, 1)),
    book_repeat=1,
    wide_rows=512,
    wide_repeat=1,
    wide_book_repeat=1,
    block=512,
    page=64,
    pages_a_split=1,
    multiprocessors=1,
    programs=1,
    vocabulary_block=1024,
    prefill_rows=24,
    prefill_tile=(64, 512, 256, 4),
)
"""The interpreter runs programs one after another, and each step of one as a NumPy call: few and large ones are
fast."""


def interpreted() -> bool:
    """Whether Triton runs its interpreter (``TRITON_INTERPRET=1`` when it was imported)."""
    import triton  # type: ignore[import-untyped]  # Triton has no types

    return bool(triton.knobs.runtime.interpret)


def tuning_here() -> Tuning:
    """Of this process's device."""
    import torch

    if interpreted():
        return INTERPRETER
    base = AMD if torch.version.hip else NVIDIA
    return replace(base, multiprocessors=torch.cuda.get_device_properties(0).multi_processor_count)
