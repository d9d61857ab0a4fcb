"""How the threads of a step divide its work, and wait for each other."""

from __future__ import annotations

from typing import Any

from myelin_worker_cpu import synchronise as s
from myelin_worker_cpu import tables as t
from myelin_worker_cpu.jit import inlined
from myelin_worker_cpu.pointers import call
from myelin_worker_cpu.synchronise import advance, read_word, swap_add, wait_while_equal


@inlined
def barrier(sync: int, threads: int) -> None:
    """Wait until every thread is here."""
    if threads == 1:
        return
    generation = read_word(sync + s.GENERATION)
    if swap_add(sync + s.ARRIVED, 1) == threads - 1:
        swap_add(sync + s.ARRIVED, -threads)
        advance(sync + s.GENERATION, sync + s.SLEEPERS)
    else:
        wait_while_equal(sync + s.GENERATION, generation, sync + s.SLEEPERS, s.BARRIER_SPINS)


@inlined
def share(count: int, thread: int, threads: int) -> tuple[int, int]:
    """Which of ``count`` things are this thread's."""
    return count * thread // threads, count * (thread + 1) // threads


@inlined
def block_width(rows: int) -> int:
    """The compiled twin of :func:`myelin_worker_cpu.records.block_width`."""
    return 1 if rows == 1 else 4 if rows <= 4 else 8 if rows <= 8 else 16


@inlined
def multiply(
    matrix: Any, records: int, numbers: int, rows: int, out: int, out_stride: int, first_tile: int, end_tile: int
) -> None:
    """Tiles ``first_tile…end_tile`` of a matrix times the blocks of its input."""
    width = block_width(rows)
    function = matrix[t.KERNEL_16]
    if width == 1:
        function = matrix[t.KERNEL_1]
    elif width == 4:
        function = matrix[t.KERNEL_4]
    elif width == 8:
        function = matrix[t.KERNEL_8]
    call(
        function,
        (
            matrix[t.WEIGHTS],
            matrix[t.TILE_BYTES],
            first_tile,
            end_tile,
            matrix[t.SLABS],
            numbers if matrix[t.ELEMENT] else records,
            (rows + width - 1) // width,
            out,
            out_stride,
        ),
    )


@inlined
def multiply_share(
    matrix: Any, records: int, numbers: int, rows: int, out: int, out_stride: int, thread: int, threads: int
) -> None:
    """This thread's tiles of a matrix times the blocks of its input."""
    first, end = share(matrix[t.TILES], thread, threads)
    multiply(matrix, records, numbers, rows, out, out_stride, first, end)
