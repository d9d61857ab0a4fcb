"""How the compute threads of a step wait for each other: atomics, a short spin, then a sleep in the system.

The words of a :func:`sync_block` each have a cache line of their own. A barrier's last arrival opens the next
generation; the others spin for some tens of microseconds, then sleep on a futex (Linux) or give their core away
(elsewhere), so that a busy neighbour costs a context switch and not a collapse.
"""

from __future__ import annotations

import platform
import sys
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from myelin_worker_cpu.jit import intrinsic
from myelin_worker_cpu.memory import aligned
from myelin_worker_cpu.vector_ir import I32, I64, Value

ARRIVED = 0
GENERATION = 64
SLEEPERS = 128
STARTED = 192
START_SLEEPERS = 256
STOP = 320
SYNC_BYTES = 384

BARRIER_SPINS = 4_000
START_SPINS = 20_000

_MACHINE = platform.machine().lower()
_FUTEX = {"x86_64": 202, "amd64": 202, "aarch64": 98, "arm64": 98, "riscv64": 98}.get(_MACHINE, 0)
_HAS_FUTEX = sys.platform.startswith("linux") and _FUTEX > 0
_WAIT_PRIVATE = 128
_WAKE_PRIVATE = 129


def sync_block() -> NDArray[np.int32]:
    """Zeroed words for one group of threads."""
    return aligned(SYNC_BYTES).view(np.int32)


def _word(builder: Any, address: Value) -> Value:
    return builder.inttoptr(address, I32.as_pointer())


def _pause(builder: Any) -> None:
    """Tell the core that this is a spin."""
    if _MACHINE in {"x86_64", "amd64"}:
        name, arguments = "llvm.x86.sse2.pause", []
    elif _MACHINE in {"aarch64", "arm64"}:
        name, arguments = "llvm.aarch64.hint", [ir.Constant(I32, 1)]
    else:
        return
    kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    builder.call(builder.module.globals.get(name) or ir.Function(builder.module, kind, name), arguments)


def _futex(builder: Any, pointer: Value, operation: int, value: Value) -> None:
    kind = ir.FunctionType(I64, [I64], var_arg=True)
    function = builder.module.globals.get("syscall") or ir.Function(builder.module, kind, "syscall")
    number = ir.Constant(I64, _FUTEX)
    address = builder.ptrtoint(pointer, I64)
    nothing = ir.Constant(I64, 0)
    code = ir.Constant(I64, operation)
    builder.call(function, [number, address, code, builder.sext(value, I64), nothing, nothing, nothing])


def _yield_core(builder: Any) -> None:
    name = "SwitchToThread" if sys.platform == "win32" else "sched_yield"
    kind = ir.FunctionType(I32, [])
    builder.call(builder.module.globals.get(name) or ir.Function(builder.module, kind, name), [])


@intrinsic
def wait_while_equal(_context: Any, word: Any, value: Any, sleepers: Any, spins: Any) -> Any:
    """Return once the i32 at ``word`` differs from ``value``; ``sleepers`` counts those who need :func:`wake`."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        pointer, sleepers = _word(builder, arguments[0]), _word(builder, arguments[2])
        value, spins = builder.trunc(arguments[1], I32), arguments[3]
        with builder.goto_entry_block():
            turns = builder.alloca(I64)
        builder.store(ir.Constant(I64, 0), turns)
        head, spin, sleep, nap, done = (
            builder.append_basic_block(f"wait.{name}") for name in ("head", "spin", "sleep", "nap", "done")
        )
        awake = builder.append_basic_block("wait.awake")
        builder.branch(head)

        builder.position_at_end(head)
        same = builder.icmp_signed("==", builder.load_atomic(pointer, "acquire", 4), value)
        builder.cbranch(same, spin, done)

        builder.position_at_end(spin)
        _pause(builder)
        turn = builder.add(builder.load(turns), ir.Constant(I64, 1))
        builder.store(turn, turns)
        builder.cbranch(builder.icmp_signed("<", turn, spins), head, sleep)

        builder.position_at_end(sleep)
        builder.atomic_rmw("add", sleepers, ir.Constant(I32, 1), "seq_cst")
        builder.branch(nap)

        builder.position_at_end(nap)
        if _HAS_FUTEX:
            _futex(builder, pointer, _WAIT_PRIVATE, value)
        else:
            _yield_core(builder)
        still = builder.icmp_signed("==", builder.load_atomic(pointer, "seq_cst", 4), value)
        builder.cbranch(still, nap, awake)

        builder.position_at_end(awake)
        builder.atomic_rmw("sub", sleepers, ir.Constant(I32, 1), "seq_cst")
        builder.branch(done)

        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic
def advance(_context: Any, word: Any, sleepers: Any) -> Any:
    """Add one to the i32 at ``word`` and wake everyone who sleeps on it."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        pointer, sleepers = _word(builder, arguments[0]), _word(builder, arguments[1])
        builder.atomic_rmw("add", pointer, ir.Constant(I32, 1), "seq_cst")
        if _HAS_FUTEX:
            asleep = builder.icmp_signed(">", builder.load_atomic(sleepers, "seq_cst", 4), ir.Constant(I32, 0))
            with builder.if_then(asleep, likely=False):
                _futex(builder, pointer, _WAKE_PRIVATE, ir.Constant(I32, 2**31 - 1))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def read_word(_context: Any, word: Any) -> Any:
    """The i32 at ``word``, with everything that was written before it."""

    def generate(_: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.sext(builder.load_atomic(_word(builder, arguments[0]), "seq_cst", 4), I64)

    return types.int64(types.int64), generate


@intrinsic
def swap_add(_context: Any, word: Any, change: Any) -> Any:
    """Add to the i32 at ``word``; returns what was there."""

    def generate(_: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        change = builder.trunc(arguments[1], I32)
        return builder.sext(builder.atomic_rmw("add", _word(builder, arguments[0]), change, "seq_cst"), I64)

    return types.int64(types.int64, types.int64), generate
