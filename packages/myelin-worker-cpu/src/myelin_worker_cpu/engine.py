"""The CPU engine: quantized weights in tiles, one compiled call for a whole stage. ``README.md`` has the outline."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from myelin.engine_api import (
    EngineError,
    EngineOptions,
    Hyperparameters,
    LoadReport,
    Progress,
    Sample,
    Segment,
    SequenceId,
    ShardReader,
    StageBatch,
    StageOutput,
    choose,
)
from myelin_worker_cpu import tables as t
from myelin_worker_cpu.chunks import Chunk, cut
from myelin_worker_cpu.governor import Governor
from myelin_worker_cpu.isa_here import ISA
from myelin_worker_cpu.kernels import Kernels, prepare
from myelin_worker_cpu.kvcache import CacheLayout, Slots
from myelin_worker_cpu.program import OUTPUTS_AT_ONCE, Program
from myelin_worker_cpu.records import WIDTHS, block_width
from myelin_worker_cpu.support import ARCHITECTURES
from myelin_worker_cpu.synchronise import sync_block
from myelin_worker_cpu.threads import Helpers, usable_cores
from myelin_worker_cpu.weights import Weights, load, matrix_types, planned_bytes

_KV_BYTES = {"f16": 2, "f32": 4, "q8_0": 1}
"""Of an element; q8_0 has its scales beside them."""


class CpuEngine:
    """See :class:`myelin.engine_api.Engine`."""

    def __init__(self, options: EngineOptions) -> None:
        if options.kv_dtype not in _KV_BYTES:
            raise EngineError(
                f"keys and values cannot be kept as '{options.kv_dtype}'", "Use f16, f32 or q8_0.", reason="kv-dtype"
            )
        self._options = options
        self._threads = options.threads or usable_cores()
        self._parameters: Hyperparameters | None = None
        self._program: Program | None = None
        self._kernels: Kernels | None = None
        self._weights: Weights | None = None
        self._slots: Slots | None = None
        self._helpers: Helpers | None = None
        # steps of many rows meet seldom for their length, and are never worth doing alone
        self._governors = {width: Governor(self._threads) for width in WIDTHS}
        self._sync = sync_block()
        self._hidden = np.zeros((0, 0), dtype=np.float32)

    @property
    def isa(self) -> str:
        """The instruction set that the kernels are made of."""
        return ISA.value

    def load(self, shard: ShardReader, progress: Progress) -> LoadReport:
        """See :meth:`myelin.engine_api.Engine.load`."""
        began = time.perf_counter()
        parameters, stage = shard.parameters, shard.stage
        if parameters.architecture not in ARCHITECTURES:
            raise EngineError(
                f"the CPU engine does not compute models of architecture '{parameters.architecture}'",
                f"It computes {', '.join(sorted(ARCHITECTURES))}.",
                reason="architecture",
            )
        kinds = matrix_types(shard)
        layout = CacheLayout.of(
            parameters,
            stage.end_layer - stage.first_layer,
            self._options.max_context,
            _KV_BYTES[self._options.kv_dtype],
        )
        slots = Slots(layout, self._options.max_sequences, self._options.max_context)
        self._check_memory(planned_bytes(shard), slots.reserved_bytes)
        kernels = prepare(kinds, layout.element_bytes, progress)
        try:
            weights = load(shard, lambda done, total: progress("load", done, total))
            program = Program(
                parameters,
                stage,
                weights,
                kernels,
                layout,
                self._threads,
                self._sync.ctypes.data,
                self._options.max_batch_tokens,
            )
        except MemoryError as error:
            raise EngineError(
                "the stage's weights do not fit into this machine's memory",
                "Use more stages, or a smaller model.",
                reason="memory",
            ) from error
        if not stage.is_tail:
            self._hidden = np.zeros((self._options.max_batch_tokens, parameters.width), dtype=np.float32)
        self._parameters, self._program, self._kernels = parameters, program, kernels
        self._weights, self._slots = weights, slots
        if self._threads > 1:
            self._helpers = Helpers(self._threads, self._help, self._stop)
        return LoadReport(weights.nbytes, slots.reserved_bytes, time.perf_counter() - began)

    def step(self, batch: StageBatch) -> StageOutput:
        """See :meth:`myelin.engine_api.Engine.step`."""
        program, slots, parameters = self._program, self._slots, self._parameters
        if program is None or slots is None or parameters is None:
            raise EngineError("the engine has loaded no stage", reason="not-loaded")
        rows = sum(segment.count for segment in batch.segments)
        self._check(batch, rows, program, parameters)
        slots.check(batch.segments)
        addresses = [slots.place(segment) for segment in batch.segments]
        is_tail = bool(program.shape[t.IS_TAIL])
        every_logit = batch.want_all_logits and is_tail
        limit = min(program.rows_at_once, OUTPUTS_AT_ONCE) if every_logit else program.rows_at_once
        samples: list[Sample] = []
        logits: list[NDArray[np.float32]] = []
        for chunk in cut(batch.segments, limit, OUTPUTS_AT_ONCE, every_row=every_logit):
            self._run(chunk, batch, addresses, program, parameters)
            if not is_tail:
                continue
            count = len(chunk.outputs)
            if (batch.want_logits or every_logit) and count:
                logits.append(program.logits[:count, : parameters.vocab_size].copy())
            for index, segment in chunk.samples:
                samples.append(self._sample(program, parameters, index, segment))
        found = np.concatenate(logits) if logits else None
        return StageOutput(None if is_tail else self._hidden[:rows], tuple(samples), found)

    def release(self, sequence: SequenceId) -> None:
        """See :meth:`myelin.engine_api.Engine.release`."""
        if self._slots is not None:
            self._slots.release(sequence)

    def close(self) -> None:
        """See :meth:`myelin.engine_api.Engine.close`."""
        if self._helpers is not None:
            self._helpers.close()
        if self._slots is not None:
            self._slots.clear()
        self._helpers = self._slots = self._program = self._weights = None

    # --- inside ------------------------------------------------------------------------------------------------------

    def _check_memory(self, weights: int, cache: int) -> None:
        bound = self._options.memory_bytes
        if bound and weights + cache > bound:
            raise EngineError(
                f"the stage needs {weights + cache:,} bytes ({weights:,} of weights, {cache:,} of keys and values), "
                f"but may use {bound:,}",
                "Use more stages, a shorter context, or fewer sequences.",
                reason="memory",
            )

    def _check(self, batch: StageBatch, rows: int, program: Program, parameters: Hyperparameters) -> None:
        if not batch.segments or rows > self._options.max_batch_tokens:
            raise EngineError(
                f"a batch of {rows} rows, where 1 to {self._options.max_batch_tokens} are possible", reason="batch"
            )
        if program.shape[t.IS_HEAD]:
            tokens = batch.tokens
            if tokens is None or tokens.shape != (rows,):
                raise EngineError(f"the head needs {rows} token ids", reason="batch")
            if int(tokens.min()) < 0 or int(tokens.max()) >= parameters.vocab_size:
                raise EngineError(f"a token id is outside the vocabulary of {parameters.vocab_size:,}", reason="token")
        elif batch.hidden is None or batch.hidden.shape != (rows, parameters.width):
            raise EngineError(f"the stage needs hidden states of shape ({rows}, {parameters.width})", reason="batch")

    def _run(
        self,
        chunk: Chunk,
        batch: StageBatch,
        addresses: list[int],
        program: Program,
        parameters: Hyperparameters,
    ) -> None:
        """Fill the step's tables and make the compiled call."""
        step = program.step
        step[t.ROWS] = chunk.rows
        step[t.SEGMENTS] = len(chunk.pieces)
        is_tail = bool(program.shape[t.IS_TAIL])
        step[t.OUTPUTS] = len(chunk.outputs) if is_tail else 0
        row = 0
        lasts: dict[int, tuple[int, int]] = {}
        for index, piece in enumerate(chunk.pieces):
            program.segments[index] = (row, piece.count, piece.start, addresses[piece.segment])
            if piece.count == 1:
                program.positions[row] = piece.start
            else:
                program.positions[row : row + piece.count] = np.arange(piece.start, piece.start + piece.count)
            row += piece.count
            lasts[row - 1] = piece.start + piece.count - 1, addresses[piece.segment]
        if is_tail and chunk.outputs:
            program.outputs[: len(chunk.outputs)] = chunk.outputs
            if len(chunk.outputs) < chunk.rows:  # they are then the last rows of pieces, and the last layer narrows
                for index, wanted in enumerate(chunk.outputs):
                    position, slot = lasts[wanted]
                    program.output_segments[index] = (index, 1, position, slot)
        if batch.tokens is not None:
            program.tokens[: chunk.rows] = batch.tokens[chunk.first_row : chunk.first_row + chunk.rows]
        offset = chunk.first_row * parameters.width * 4
        if batch.hidden is not None:
            hidden = np.ascontiguousarray(batch.hidden, dtype=np.float32)
            program.buffers[t.HIDDEN_IN] = hidden.ctypes.data + offset
        if not is_tail:
            program.buffers[t.HIDDEN_OUT] = self._hidden.ctypes.data + offset
        assert self._kernels is not None
        governor = self._governors.get(block_width(chunk.rows)) if chunk.rows <= WIDTHS[-1] else None
        threads = governor.threads() if governor else self._threads
        program.use_threads(threads)
        began = time.perf_counter()
        self._kernels.stage(0, program.context)
        if governor:
            governor.took(time.perf_counter() - began)

    def _sample(self, program: Program, parameters: Hyperparameters, index: int, segment: Segment) -> Sample:
        position = segment.start + segment.count
        if segment.sampling.temperature <= 0.0:
            token, logprob = int(program.chosen[index]), float(program.logprobs[index])
        else:
            token, logprob = choose(program.logits[index, : parameters.vocab_size], segment.sampling, position)
        return Sample(segment.sequence, position, token, logprob)

    def _help(self, thread: int) -> None:
        assert self._kernels is not None
        assert self._program is not None
        self._kernels.stage(thread, self._program.context)

    def _stop(self) -> None:
        assert self._kernels is not None
        self._kernels.stop(self._sync.ctypes.data)
