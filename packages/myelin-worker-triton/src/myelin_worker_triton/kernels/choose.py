"""Greedy sampling on the GPU: the best token of each row of logits and its log-probability, in two launches.

``best`` gives each block's maximum (the lowest id among equals), and the block's ``sum e^(logit - maximum)``;
``merge`` joins the blocks of a row: ``log-probability = -log(sum e^(logit - maximum))``.
"""

# Triton's language is not typed Python, writes constants in capitals, and has an `if` of its own for compile time.
# mypy: ignore-errors
# ruff: noqa: N803

import triton
import triton.language as tl


@triton.jit
def best(logits, values, tokens, sums, vocabulary, blocks, BLOCK: tl.constexpr):
    """Program ``(row, block)`` over ``float32[rows, vocabulary]``; results ``[rows, blocks]``."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(logits + row * vocabulary + token, mask=token < vocabulary, other=float("-inf"))
    peak = tl.max(found, axis=0)
    first = tl.min(tl.where((found == peak) & (token < vocabulary), token, vocabulary), axis=0)
    tl.store(values + row * blocks + block, peak)
    tl.store(tokens + row * blocks + block, first)
    tl.store(sums + row * blocks + block, tl.sum(tl.exp(found - peak), axis=0))


@triton.jit
def merge(values, tokens, sums, chosen, logprobs, blocks, BLOCKS: tl.constexpr):
    """Program ``row``; ``chosen`` int32[rows], ``logprobs`` float32[rows]; ``BLOCKS`` a power of two from ``blocks``
    on."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    mask = block < blocks
    found = tl.load(values + row * blocks + block, mask=mask, other=float("-inf"))
    token = tl.load(tokens + row * blocks + block, mask=mask, other=2147483647)
    part = tl.load(sums + row * blocks + block, mask=mask, other=0.0)
    peak = tl.max(found, axis=0)
    tl.store(chosen + row, tl.min(tl.where(found == peak, token, 2147483647), axis=0))
    tl.store(logprobs + row, -tl.log(tl.sum(tl.where(mask, part * tl.exp(found - peak), 0.0), axis=0)))
