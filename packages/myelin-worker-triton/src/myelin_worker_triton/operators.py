"""The kernels as functions of tensors: each picks the specialisation, the grid and the launch options."""

from __future__ import annotations

from typing import Any

import torch

from myelin_worker_triton.kernels.attention import attend, store_rows
from myelin_worker_triton.kernels.choose import best, merge
from myelin_worker_triton.kernels.embed import embed
from myelin_worker_triton.kernels.gate_up import gate_up
from myelin_worker_triton.kernels.normalise import add_normalised_rows
from myelin_worker_triton.kernels.prefill import attend_runs, half_rows, rotate_queries, tiled
from myelin_worker_triton.kernels.project import project
from myelin_worker_triton.kernels.quantise import quantise_rows
from myelin_worker_triton.layouts import BOOKS, Book, Plain
from myelin_worker_triton.operands import (
    Activations,
    Angles,
    Halves,
    HeadNorms,
    HeadShape,
    LayerCache,
    Places,
    Prologue,
    Runs,
    Splits,
    padded,
    power_of_two,
)
from myelin_worker_triton.partials import MOST_COLUMNS, Partials, splits_for
from myelin_worker_triton.planes import Matrix
from myelin_worker_triton.tuning import Tuning

Tensor = torch.Tensor

KV_KINDS = {"f16": 0, "f32": 1, "q8_0": 2}
"""How keys and values may be kept, and the kernels' number for it."""

_MORE_WARPS = {"f16": 1, "f32": 4, "q8_0": 2}
"""Attention of wider or packed keys and values takes more threads, or they would spill registers."""


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def book_words(book: Book) -> tuple[int, int, int, int]:
    """A codebook's 16 bytes as four ``int32``."""
    if book is Book.NONE:
        return (0, 0, 0, 0)
    data = bytes(value & 255 for value in BOOKS[book])
    words = [_signed(int.from_bytes(data[at : at + 4], "little")) for at in range(0, 16, 4)]
    return words[0], words[1], words[2], words[3]


def strides(matrix: Matrix) -> tuple[int, int, int]:
    """Elements of a row of its planes; 0 where there is none."""
    planes = (matrix.low, matrix.high, matrix.scales)
    low, high, scales = (int(plane.shape[1]) if plane.dim() == 2 else 0 for plane in planes)
    return low, high, scales


def specialisation(matrix: Matrix, letter: str) -> dict[str, int]:
    """The constants of a matrix for ``project`` and ``gate_up``."""
    low, high, scales = strides(matrix)
    words = book_words(matrix.layout.book)
    names = {f"FORMAT_{letter}": matrix.layout.code, f"LOW_{letter}": low, f"HIGH_{letter}": high}
    return names | {f"SCALE_{letter}": scales} | {f"{letter}{i}": words[i] for i in range(4)}


def _wants(matrices: tuple[Matrix, ...]) -> tuple[bool, bool]:
    """Whether they read int8 activations, and whether they read float32 ones."""
    plain = [matrix.layout.plain is not Plain.NO for matrix in matrices]
    return not all(plain), any(plain)


def launch_project(
    tuning: Tuning,
    activations: Activations,
    matrices: tuple[Matrix, ...],
    out: Tensor,
    *,
    columns: int,
    prologue: Prologue | None = None,
    bias: Tensor | None = None,
    add: bool = False,
    softcap: float = 0.0,
    partials: Partials | None = None,
) -> None:
    """``out[:, :] (+)= activations @ matrices.T``: see ``kernels/project.py``. ``columns`` is 1, 2, 4 or 8.

    With ``partials``, which is used by no launch that may run at the same time, few rows are split along ``K``.
    """
    parts = [*matrices, *[matrices[0]] * (3 - len(matrices))]
    rows = [matrix.rows for matrix in parts]
    dear = columns == 1 and any(matrix.layout.book is Book.IQ4 for matrix in matrices)
    repeat = tuning.book_repeat if dear else tuning.repeat_for(columns)
    tile = repeat * tuning.rows
    tiles = sum(-(-matrix.rows // tile) for matrix in matrices)
    splits = 1
    if partials is not None:
        splits = splits_for(tuning, matrices, out.stride(0), prologue=prologue is not None)
    grid = (min(tiles, tuning.multiprocessors * tuning.programs), splits)
    want_int8, want_float = _wants(matrices)
    x = prologue.x if prologue else out
    post = prologue is not None and prologue.y is not None
    arguments: list[Any] = [
        x,
        prologue.y if prologue and prologue.y is not None else x,
        prologue.post_weight if prologue and prologue.post_weight is not None else x,
        prologue.x_out if prologue and prologue.x_out is not None else x,
        prologue.weight if prologue else x,
        activations.codes,
        activations.scales,
        activations.sums,
        activations.plain,
        out,
        bias if bias is not None else out,
        partials.values if partials is not None else out,
        partials.counters if partials is not None else activations.sums,
        prologue.epsilon if prologue else 0.0,
        softcap,
    ]
    for index, matrix in enumerate(parts):
        arguments += [matrix.low, matrix.high, matrix.scales, matrix.gain, rows[index]]
    constants: dict[str, Any] = {}
    for letter, matrix in zip("ABC", parts, strict=True):
        constants |= specialisation(matrix, letter) | {f"EXACT_{letter}": matrix.rows % tile == 0}
    project[grid](
        *arguments,
        K=activations.columns,
        X_STRIDE=activations.stride,
        OUT_STRIDE=out.stride(0),
        PARTS=len(matrices),
        SPLITS=splits,
        **constants,
        PREPARE=prologue is not None,
        POST=post,
        WANT_INT8=want_int8,
        WANT_FLOAT=want_float,
        EPILOGUE=int(add),
        HAS_BIAS=bias is not None,
        SOFTCAP=softcap > 0,
        REPEAT=repeat,
        COLUMNS=columns,
        ROWS=tuning.rows,
        GROUPS=tuning.groups,
        BLOCK=tuning.block,
        USE_ASM=tuning.use_asm,
        num_warps=tuning.warps,
    )


def launch_gate_up(
    tuning: Tuning,
    activations: Activations,
    gate: Matrix,
    up: Matrix,
    result: Activations,
    prologue: Prologue,
    *,
    columns: int,
    gelu: bool,
    quantise: bool,
) -> None:
    """``result = act(gate @ h) * (up @ h)``: see ``kernels/gate_up.py``."""
    dear = columns == 1 and all(matrix.layout.book is Book.IQ4 for matrix in (gate, up))
    repeat = tuning.wide_book_repeat if dear else tuning.wide_repeat
    registers = tuning.book_registers if dear else tuning.most_registers
    tile = repeat * tuning.wide_rows
    grid = (min(-(-gate.rows // tile), tuning.multiprocessors * tuning.programs),)
    want_int8, want_float = _wants((gate, up))
    post = prologue.y is not None
    gate_up[grid](
        prologue.x,
        prologue.y if prologue.y is not None else prologue.x,
        prologue.post_weight if prologue.post_weight is not None else prologue.weight,
        prologue.x_out if prologue.x_out is not None else prologue.x,
        prologue.weight,
        activations.codes,
        activations.scales,
        activations.sums,
        activations.plain,
        result.codes,
        result.scales,
        result.sums,
        result.plain,
        prologue.epsilon,
        gate.low,
        gate.high,
        gate.scales,
        gate.gain,
        up.low,
        up.high,
        up.scales,
        up.gain,
        gate.rows,
        K=activations.columns,
        X_STRIDE=activations.stride,
        H_STRIDE=result.stride,
        **specialisation(gate, "A"),
        **specialisation(up, "B"),
        POST=post,
        WANT_INT8=want_int8,
        WANT_FLOAT=want_float,
        EXACT=gate.rows % tile == 0,
        QUANTISE=quantise,
        GELU=gelu,
        REPEAT=repeat,
        COLUMNS=columns,
        ROWS=tuning.wide_rows,
        GROUPS=tuning.groups,
        BLOCK=tuning.block,
        USE_ASM=tuning.use_asm,
        num_warps=tuning.wide_warps,
        **({"maxnreg": registers} if registers else {}),
    )


def _head_constants(tuning: Tuning, heads: HeadShape, cache: LayerCache, places: Places, norm: bool) -> dict[str, Any]:
    return {
        "N_HEADS": heads.n_heads,
        "KV_HEADS": heads.kv_heads,
        "HEAD": heads.head,
        "HEAD_PADDED": power_of_two(heads.head, 32),
        "VALUE": heads.value,
        "VALUE_PADDED": power_of_two(heads.value, 32),
        "DIMS": heads.rope_dims,
        "HALVES": heads.halves,
        "NORM": norm,
        "KV_KIND": KV_KINDS[cache.kind],
        "PAGE": tuning.page,
        "TABLE_STRIDE": places.pages.stride(0),
    }


def launch_store_rows(
    tuning: Tuning,
    heads: HeadShape,
    qkv: Tensor,
    places: Places,
    cache: LayerCache,
    angles: Angles,
    norms: HeadNorms | None,
) -> None:
    """Put the rows' keys and values into the cache: see ``kernels/attention.py``."""
    store_rows[(qkv.shape[0], heads.kv_heads)](
        qkv,
        places.positions,
        places.slots,
        places.pages,
        cache.keys,
        cache.values,
        cache.key_scales,
        cache.value_scales,
        norms.key if norms else qkv,
        angles.cosines,
        angles.sines,
        heads.epsilon,
        QKV_STRIDE=qkv.stride(0),
        **_head_constants(tuning, heads, cache, places, norms is not None),
        num_warps=1,
    )


def launch_attend(
    tuning: Tuning,
    heads: HeadShape,
    qkv: Tensor,
    places: Places,
    cache: LayerCache,
    angles: Angles,
    norms: HeadNorms | None,
    scratch: Splits,
    result: Activations,
    *,
    window: int,
    splits: int,
    store: bool,
) -> None:
    """Attention of every row: see ``kernels/attention.py``. ``splits``: no row has more; at most ``scratch.splits``."""
    attend[(qkv.shape[0], heads.kv_heads, splits)](
        qkv,
        places.positions,
        places.slots,
        places.pages,
        cache.keys,
        cache.values,
        cache.key_scales,
        cache.value_scales,
        norms.query if norms else qkv,
        norms.key if norms else qkv,
        angles.cosines,
        angles.sines,
        scratch.values,
        scratch.sums,
        scratch.counters,
        result.plain,
        result.codes,
        result.scales,
        result.sums,
        heads.epsilon,
        heads.scale,
        heads.cap,
        window,
        scratch.splits,
        QKV_STRIDE=qkv.stride(0),
        X_STRIDE=result.stride,
        FLAT_PADDED=power_of_two(heads.shared * heads.value, 32),
        STORE=store,
        CAP=heads.cap > 0,
        QUANTISE=heads.whole_groups,
        PAGES_A_SPLIT=tuning.pages_a_split,
        SHARED_PADDED=power_of_two(heads.shared, tuning.least_shared),
        **_head_constants(tuning, heads, cache, places, norms is not None),
        num_warps=tuning.attention_warps * _MORE_WARPS[cache.kind],
    )
    if not heads.whole_groups:
        launch_quantise(tuning, result, qkv.shape[0])


def launch_quantise(tuning: Tuning, rows: Activations, count: int) -> None:
    """Quantise ``rows.plain`` into its codes, scales and sums."""
    groups = tuning.block // 32
    quantise_rows[(count, -(-rows.stride // tuning.block))](
        rows.plain,
        rows.codes,
        rows.scales,
        rows.sums,
        X_ROW=rows.stride,
        X_STRIDE=rows.stride,
        K=rows.columns,
        GROUPS=groups,
        num_warps=4,
    )


def launch_add_normalised(tuning: Tuning, x: Tensor, y: Tensor, weight: Tensor, out: Tensor, epsilon: float) -> None:
    """``out = x + rms_norm(y) * weight``, row by row."""
    add_normalised_rows[(x.shape[0],)](
        x, y, weight, out, epsilon, K=x.shape[1], BLOCK=tuning.block, num_warps=tuning.warps
    )


def launch_half_rows(
    tuning: Tuning,
    x: Tensor,
    result: Halves,
    count: int,
    *,
    norm: Tensor | None = None,
    epsilon: float = 0.0,
    up: Tensor | None = None,
    gelu: bool = False,
) -> None:
    """Rows of ``x`` as float16, normalised or gated: see ``kernels/prefill.py``."""
    half_rows[(count,)](
        x,
        up if up is not None else x,
        norm if norm is not None else x,
        result.values,
        result.factors,
        epsilon,
        X_ROW=x.stride(0),
        OUT_ROW=result.values.stride(0),
        K=result.columns,
        NORM=norm is not None,
        GATED=up is not None,
        GELU=gelu,
        BLOCK=tuning.block,
        num_warps=4,
    )


def launch_tiled(
    tuning: Tuning,
    x: Halves,
    matrix: Matrix,
    out: Tensor,
    count: int,
    *,
    bias: Tensor | None = None,
    add: bool = False,
) -> None:
    """``out[:count] (+)= x @ matrix.T`` in tiles: see ``kernels/prefill.py``. ``out`` may be a view of some columns."""
    rows, outputs, k, warps = tuning.prefill_tile
    low, high, scales = strides(matrix)
    words = book_words(matrix.layout.book)
    tiled[(-(-matrix.rows // outputs), -(-count // rows))](
        x.values,
        x.factors,
        matrix.low,
        matrix.high,
        matrix.scales,
        matrix.gain,
        bias if bias is not None else out,
        out,
        count,
        matrix.rows,
        X_ROW=x.values.stride(0),
        OUT_ROW=out.stride(0),
        K=matrix.columns,
        LOW_STRIDE=low,
        HIGH_STRIDE=high,
        SCALE_STRIDE=scales,
        FORMAT=matrix.layout.code,
        T0=words[0],
        T1=words[1],
        T2=words[2],
        T3=words[3],
        HAS_BIAS=bias is not None,
        ADD=add,
        TILE_ROWS=rows,
        TILE_OUTPUTS=outputs,
        TILE_K=k,
        USE_ASM=tuning.use_asm,
        num_warps=warps,
    )


def launch_attend_runs(
    tuning: Tuning,
    heads: HeadShape,
    qkv: Tensor,
    places: Places,
    runs: Runs,
    cache: LayerCache,
    angles: Angles,
    norms: HeadNorms | None,
    out: Tensor,
    *,
    window: int,
) -> None:
    """Store every row, then attention run by run: see ``kernels/prefill.py``. Queries in ``qkv`` are rotated in
    place."""
    launch_store_rows(tuning, heads, qkv, places, cache, angles, norms)
    constants = _head_constants(tuning, heads, cache, places, norms is not None)
    rotation = {name: constants[name] for name in ("HEAD", "HEAD_PADDED", "DIMS", "HALVES", "NORM")}
    rotate_queries[(qkv.shape[0], heads.n_heads)](
        qkv,
        places.positions,
        norms.query if norms else qkv,
        angles.cosines,
        angles.sines,
        heads.epsilon,
        QKV_STRIDE=qkv.stride(0),
        **rotation,
        num_warps=1,
    )
    names = ("N_HEADS", "KV_HEADS", "HEAD", "HEAD_PADDED", "VALUE", "VALUE_PADDED", "KV_KIND", "PAGE", "TABLE_STRIDE")
    attend_runs[(runs.rows.shape[0], heads.n_heads)](
        qkv,
        runs.rows,
        runs.counts,
        places.positions,
        places.slots,
        places.pages,
        cache.keys,
        cache.values,
        cache.key_scales,
        cache.value_scales,
        out,
        heads.scale,
        heads.cap,
        window,
        QKV_STRIDE=qkv.stride(0),
        OUT_ROW=out.stride(0),
        CAP=heads.cap > 0,
        RUN=runs.size,
        **{name: constants[name] for name in names},
        num_warps=tuning.attention_warps * _MORE_WARPS[cache.kind],
    )


def launch_embed(tuning: Tuning, tokens: Tensor, matrix: Matrix, factor: float, out: Tensor) -> None:
    """``out[i] = factor * matrix[tokens[i]]``."""
    low, high, scales = strides(matrix)
    words = book_words(matrix.layout.book)
    embed[(tokens.shape[0], -(-matrix.columns // tuning.block))](
        tokens,
        out,
        matrix.low,
        matrix.high,
        matrix.scales,
        matrix.gain,
        factor,
        K=matrix.columns,
        LOW_STRIDE=low,
        HIGH_STRIDE=high,
        SCALE_STRIDE=scales,
        FORMAT=matrix.layout.code,
        T0=words[0],
        T1=words[1],
        T2=words[2],
        T3=words[3],
        BLOCK=tuning.block,
        num_warps=4,
    )


def launch_choose(tuning: Tuning, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The best token of each row and its log-probability: see ``kernels/choose.py``."""
    rows, vocabulary = logits.shape
    blocks = -(-vocabulary // tuning.vocabulary_block)
    device = logits.device
    values = torch.empty((rows, blocks), dtype=torch.float32, device=device)
    tokens = torch.empty((rows, blocks), dtype=torch.int32, device=device)
    sums = torch.empty((rows, blocks), dtype=torch.float32, device=device)
    chosen = torch.empty(rows, dtype=torch.int32, device=device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=device)
    best[(rows, blocks)](
        logits, values, tokens, sums, vocabulary, blocks, BLOCK=power_of_two(tuning.vocabulary_block), num_warps=4
    )
    merge[(rows,)](values, tokens, sums, chosen, logprobs, blocks, BLOCKS=power_of_two(blocks), num_warps=1)
    return chosen, logprobs


__all__ = [
    "Activations",
    "Angles",
    "Halves",
    "HeadNorms",
    "HeadShape",
    "KV_KINDS",
    "LayerCache",
    "MOST_COLUMNS",
    "Partials",
    "Places",
    "Prologue",
    "Runs",
    "Splits",
    "launch_add_normalised",
    "launch_attend",
    "launch_attend_runs",
    "launch_choose",
    "launch_embed",
    "launch_gate_up",
    "launch_half_rows",
    "launch_project",
    "launch_quantise",
    "launch_store_rows",
    "launch_tiled",
    "padded",
    "power_of_two",
]
