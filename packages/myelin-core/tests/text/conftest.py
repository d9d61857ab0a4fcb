"""Small vocabularies, written by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest

from myelin.model.facts import ModelFacts
from myelin.model.tokenizers.byte_pair import byte_letters

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def facts_of(metadata: Mapping[str, object]) -> ModelFacts:
    """A model that is nothing but a header."""
    return ModelFacts("llama", metadata, {})


def byte_level(
    merges: Sequence[str] = (),
    specials: Sequence[tuple[str, int]] = (),
    *,
    pre: str | None = "gpt-2",
    letters: Sequence[str] = (),
    **keys: object,
) -> ModelFacts:
    """A ``gpt2`` vocabulary: all letters (or those given), then the merges' products, then special tokens."""
    pieces = list(letters or byte_letters())
    pieces += [merge.replace(" ", "", 1) for merge in merges]
    types = [NORMAL] * len(pieces) + [kind for _, kind in specials]
    pieces += [text for text, _ in specials]
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": np.array(types, dtype=np.int32),
        "tokenizer.ggml.merges": list(merges),
    }
    if pre is not None:
        metadata["tokenizer.ggml.pre"] = pre
    return facts_of(metadata | {key.replace("__", "."): value for key, value in keys.items()})


def scored(
    pieces: Mapping[str, float], extra: Sequence[tuple[str, int]] = (), *, with_bytes: bool = True, **keys: object
) -> ModelFacts:
    """A ``llama`` vocabulary: <unk>, <s>, </s>, the bytes, the scored pieces, then more tokens of any type."""
    tokens: list[tuple[str, float, int]] = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    if with_bytes:
        tokens += [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    tokens += [(piece, score, NORMAL) for piece, score in pieces.items()]
    tokens += [(text, 0.0, kind) for text, kind in extra]
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [text for text, _, _ in tokens],
        "tokenizer.ggml.scores": np.array([score for _, score, _ in tokens], dtype=np.float32),
        "tokenizer.ggml.token_type": np.array([kind for _, _, kind in tokens], dtype=np.int32),
    }
    return facts_of(metadata | {key.replace("__", "."): value for key, value in keys.items()})


@pytest.fixture(name="byte_level")
def byte_level_fixture() -> Callable[..., ModelFacts]:
    """:func:`byte_level`; with pytest's ``importlib`` mode a module here can't be imported."""
    return byte_level


@pytest.fixture(name="scored")
def scored_fixture() -> Callable[..., ModelFacts]:
    """:func:`scored`."""
    return scored
