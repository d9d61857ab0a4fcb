"""How fast this machine's cores stream memory: the bound of decoding, which reads every weight once for each token.

    python benchmarks/bandwidth.py [--megabytes 1024] [-r 5]

Each thread reads a part of its own of one large block, strictly forwards, with the widest loads that the machine has.
GB/s are 10^9 bytes a second.
"""

from __future__ import annotations

import argparse
import ctypes
import threading
import time
from typing import Any

import numpy as np
from numba import types

from myelin_worker_cpu.isa_here import ISA
from myelin_worker_cpu.jit import intrinsic, kernel
from myelin_worker_cpu.memory import aligned
from myelin_worker_cpu.threads import usable_cores
from myelin_worker_cpu.vector_ir import V16I32, Emitter, constant

STEP = 512
"""Bytes read in one turn of the loop: eight sums that don't wait for each other."""


@intrinsic
def _read(_context: Any, address: Any, steps: Any, out: Any) -> Any:
    """Read ``steps`` times :data:`STEP` bytes; the sum of the words goes to ``out``, so that nothing is left out."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        emitter = Emitter(builder, ISA)
        address, steps, out = arguments
        totals = [emitter.variable(constant(V16I32, 0)) for _ in range(STEP // 64)]
        with emitter.loop(steps) as step:
            start = emitter.at(address, emitter.scaled(step, STEP))
            for index, total in enumerate(totals):
                word = emitter.load(V16I32, emitter.at(start, 64 * index), align=64)
                emitter.set(total, builder.xor(emitter.get(total), word))
        result = emitter.get(totals[0])
        for total in totals[1:]:
            result = builder.xor(result, emitter.get(total))
        emitter.store(result, out, align=64)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


def _compile() -> Any:
    def read(address: int, steps: int, out: int) -> None:
        _read(address, steps, out)

    return kernel(read, 3, cached=False)


class Stream:
    """A block of memory, and threads that read it.

    Args:
        threads: How many read at once.
        megabytes: Of the block; several times the caches.
    """

    def __init__(self, threads: int, megabytes: int) -> None:
        compiled = _compile()
        self._kept = compiled
        self._read = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(compiled.address)
        self._threads = threads
        self._block = aligned(megabytes << 20)
        self._block.view(np.int64)[:] = 1
        self._sinks = [aligned(64) for _ in range(threads)]

    def rate(self) -> float:
        """GB/s of one pass over the block, from the first thread's start to the last one's end."""
        part = len(self._block) // self._threads // STEP
        barrier = threading.Barrier(self._threads)
        began, ended = [0.0] * self._threads, [0.0] * self._threads

        def run(number: int) -> None:
            address = int(self._block.ctypes.data) + number * part * STEP
            barrier.wait()
            began[number] = time.perf_counter()
            self._read(address, part, int(self._sinks[number].ctypes.data))
            ended[number] = time.perf_counter()

        threads = [threading.Thread(target=run, args=(number,)) for number in range(self._threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return part * STEP * self._threads / (max(ended) - min(began)) / 1e9


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("-r", "--rounds", type=int, default=5)
    options = parser.parse_args()
    for threads in range(1, usable_cores() + 1):
        stream = Stream(threads, options.megabytes)
        rates = sorted(stream.rate() for _ in range(options.rounds))
        print(f"{threads} thread{'s' if threads > 1 else ''}: {rates[-1]:.1f} GB/s (lowest {rates[0]:.1f})")


if __name__ == "__main__":
    main()
