"""Which engine computes the stages."""

from __future__ import annotations

import pytest

from myelin.engine.contract import EngineSupport
from myelin.errors import EngineError
from myelin.model.facts import TensorInfo
from myelin.model.quant import GgmlType
from myelin.orchestrator.engines import choose_engine

ALL = frozenset(GgmlType)
REFERENCE = EngineSupport("reference", ALL, frozenset({"llama", "qwen2"}), 0)
CPU = EngineSupport("cpu", frozenset({GgmlType.F32, GgmlType.Q4_K}), frozenset({"llama"}), 50)
GPU = EngineSupport("gpu", ALL, frozenset({"llama"}), 100, unavailable="there is no GPU")
LATER = EngineSupport("later", frozenset(), frozenset(), 0, unavailable="it comes later")
EVERYONE = (CPU, REFERENCE, GPU, LATER)


def tensors(*types: GgmlType) -> list[TensorInfo]:
    return [TensorInfo(f"blk.{i}.ffn_up.weight", kind, (1, 256), 0, 0, 1) for i, kind in enumerate(types)]


@pytest.mark.parametrize(
    ("name", "architecture", "types", "expected"),
    [
        ("auto", "llama", (GgmlType.F32, GgmlType.Q4_K), "cpu"),
        ("auto", "llama", (GgmlType.F32, GgmlType.IQ2_XS), "reference"),
        ("auto", "qwen2", (GgmlType.F32,), "reference"),
        ("reference", "llama", (GgmlType.F32,), "reference"),
        ("gpu", "llama", (GgmlType.IQ2_XS,), "gpu"),  # its nodes may be other machines than this one
    ],
)
def test_the_best_engine_that_can(name: str, architecture: str, types: tuple[GgmlType, ...], expected: str) -> None:
    assert choose_engine(name, EVERYONE, architecture, tensors(*types)).name == expected


@pytest.mark.parametrize(
    ("name", "architecture", "types", "words"),
    [
        ("cpu", "llama", (GgmlType.F32, GgmlType.Q6_K), "type Q6_K of the tensor blk.1.ffn_up.weight"),
        ("cpu", "qwen2", (GgmlType.F32,), "architecture qwen2"),
        ("later", "llama", (GgmlType.F32,), "it comes later"),
        ("none", "llama", (GgmlType.F32,), "no engine 'none'"),
        ("auto", "mamba", (GgmlType.F32,), "architecture mamba"),
    ],
)
def test_what_stands_in_the_way_is_named(name: str, architecture: str, types: tuple[GgmlType, ...], words: str) -> None:
    with pytest.raises(EngineError, match=words) as raised:
        choose_engine(name, EVERYONE, architecture, tensors(*types))
    assert raised.value.hint


def test_nothing_is_installed() -> None:
    with pytest.raises(EngineError, match="no engine that is installed"):
        choose_engine("auto", (), "llama", tensors(GgmlType.F32))
