"""From a source to everything that its header says, in one call."""

from __future__ import annotations

from myelin.model.architecture import Hyperparameters, describe
from myelin.model.facts import ModelFacts
from myelin.model.gguf import read_facts
from myelin.model.shard import ByteSource
from myelin.model.source import FetchProgress, ModelSource


def open_model(
    source: ModelSource, progress: FetchProgress | None = None
) -> tuple[ModelFacts, Hyperparameters, tuple[ByteSource, ...]]:
    """Open a model's files (which may fetch them), read their headers, and describe the model. Blocking.

    Returns:
        The facts, the hyperparameters, and the open files in order of their parts; the caller closes them
        (:func:`close_all`). Where it raises, nothing stays open.

    Raises:
        ModelError: As :meth:`ModelSource.open`, :func:`read_facts` and :func:`describe`.
    """
    files = source.open(progress)
    try:
        facts = read_facts(files)
        return facts, describe(facts), files
    except BaseException:
        close_all(files)
        raise


def close_all(files: tuple[ByteSource, ...]) -> None:
    """Close the files of a model; twice is fine."""
    for file in files:
        file.close()
