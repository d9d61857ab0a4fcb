"""The facade for authors of engines. See :mod:`myelin.engine.contract` for what an engine must do."""

from __future__ import annotations

from myelin.engine.contract import (
    Engine,
    EngineOptions,
    EngineSupport,
    LoadReport,
    Progress,
    Sample,
    Segment,
    StageBatch,
    StageOutput,
)
from myelin.engine.sampling import choose
from myelin.errors import EngineError
from myelin.model.architecture import (
    Activation,
    Hyperparameters,
    LayerRole,
    ModelRole,
    RopeStyle,
    layer_roles,
    layer_tensor,
    output_tensor,
)
from myelin.model.facts import ModelFacts, TensorInfo
from myelin.model.quant import BLOCKS, FORMATS, READABLE, FormatKind, GgmlType, GroupFormat, dequantize, row_bytes
from myelin.model.shard import ShardReader, StageSlice
from myelin.plugins.markers import hookimpl
from myelin.plugins.specs import ConfigSection
from myelin.values import GREEDY, SamplingParams, SequenceId

__all__ = [
    "BLOCKS",
    "FORMATS",
    "GREEDY",
    "READABLE",
    "Activation",
    "ConfigSection",
    "Engine",
    "EngineError",
    "EngineOptions",
    "EngineSupport",
    "FormatKind",
    "GgmlType",
    "GroupFormat",
    "Hyperparameters",
    "LayerRole",
    "LoadReport",
    "ModelFacts",
    "ModelRole",
    "Progress",
    "RopeStyle",
    "Sample",
    "SamplingParams",
    "Segment",
    "SequenceId",
    "ShardReader",
    "StageBatch",
    "StageOutput",
    "StageSlice",
    "TensorInfo",
    "choose",
    "dequantize",
    "hookimpl",
    "layer_roles",
    "layer_tensor",
    "output_tensor",
    "row_bytes",
]
