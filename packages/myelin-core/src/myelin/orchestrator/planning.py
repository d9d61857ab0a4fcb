"""From a request to a plan: the model's header, the engine, which node holds what. Starts nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from myelin.cluster.provider import Offer
from myelin.engine.contract import EngineOptions, EngineSupport
from myelin.errors import ModelError
from myelin.model.architecture import Hyperparameters, stage_tensors
from myelin.model.digest import header_digest
from myelin.model.facts import ModelFacts
from myelin.model.local import local_paths
from myelin.model.shard import fingerprints
from myelin.model.source import FetchProgress, ModelSource
from myelin.orchestrator.engines import AUTO, choose_engine
from myelin.orchestrator.machines import Planner, node_names, plan_on
from myelin.orchestrator.request import RunRequest
from myelin.planner.run_plan import NodeCapacity, PlanRequest, RunPlan
from myelin.values import NodeId

if TYPE_CHECKING:
    from myelin.model.tokenizer import Tokenizer
    from myelin.plugins.registry import Registry

DEFAULT_CONTEXT = 4096
"""The context where none is asked for, unless the model was trained for less."""

KV_BYTES = {"f16": 2, "f32": 4, "q8_0": 34 / 32}
"""Bytes of one kept key or value, by the name of its type."""


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model whose header has been read; its files are closed again.

    Attributes:
        uri: What nodes are given to open the same model.
        facts, parameters: What the header says.
        part_sizes: Bytes of its files.
        digest: SHA-256 over the headers.
        fingerprints: Which version of each file it was, where the source tells versions apart; empty otherwise.
        files: Its files on this machine, absolute; empty where nodes fetch it.
    """

    uri: str
    facts: ModelFacts
    parameters: Hyperparameters
    part_sizes: tuple[int, ...]
    digest: bytes
    fingerprints: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Planning:
    """What a request comes to, but for the tokenizer, which may still be on its way.

    Attributes:
        request: What was asked.
        model: The model as it was opened.
        options: The engine's options in effect (the context resolved).
        engine: The engine that will compute every stage.
        plan: Which node holds which layers.
        placement: The offer that each node was planned for, in the order of
            :func:`~myelin.orchestrator.machines.node_names`; empty where none was.
    """

    request: RunRequest
    model: OpenedModel
    options: EngineOptions
    engine: EngineSupport
    plan: RunPlan
    placement: tuple[Offer, ...] = field(default=(), kw_only=True)

    def offer_of(self, node: NodeId) -> str:
        """The id of the offer that a node was planned for; empty where there is none."""
        named = zip(node_names(len(self.placement)), self.placement, strict=True)
        return next((offer.id for name, offer in named if name == node), "")

    @property
    def facts(self) -> ModelFacts:
        """What the header says."""
        return self.model.facts

    @property
    def parameters(self) -> Hyperparameters:
        """The model's hyperparameters."""
        return self.model.parameters


@dataclass(frozen=True, slots=True)
class PlannedRun(Planning):
    """What a request comes to, before anything is started.

    Attributes:
        tokenizer: The model's.
    """

    tokenizer: Tokenizer


def open_model(source: ModelSource, progress: FetchProgress | None = None) -> OpenedModel:
    """Open the model's files, read the header, close them. Blocking; belongs in a thread.

    Raises:
        ModelError: It isn't there, it is damaged, or it is of a kind that we don't serve.
    """
    from myelin.model import opening

    facts, parameters, parts = opening.open_model(source, progress)
    try:
        return OpenedModel(
            uri=source.uri,
            facts=facts,
            parameters=parameters,
            part_sizes=tuple(part.size for part in parts),
            digest=header_digest(facts, parts),
            fingerprints=fingerprints(parts),
            files=local_paths(parts),
        )
    finally:
        opening.close_all(parts)


def make_tokenizer(request: RunRequest, facts: ModelFacts) -> Tokenizer:
    """The model's tokenizer. Blocking, takes a moment for large vocabularies.

    Raises:
        ModelError: The header has none, or one of an unknown kind.
    """
    from myelin.model.tokenizer import build_tokenizer

    return build_tokenizer(facts, request.tokenizer_path)


def resolved_options(options: EngineOptions, parameters: Hyperparameters) -> EngineOptions:
    """``options`` with the context that 0 stands for: the model's own, at most :data:`DEFAULT_CONTEXT`."""
    if options.max_context:
        return options
    return replace(options, max_context=min(parameters.context_length, DEFAULT_CONTEXT))


def engine_of(request: RunRequest, model: OpenedModel, registry: Registry) -> EngineSupport:
    """The engine that will compute every stage.

    Raises:
        EngineError: No engine, or not the named one, computes it.
    """
    names = stage_tensors(model.facts, model.parameters, 0, model.parameters.n_layers)
    tensors = [model.facts.tensors[name] for name in names]
    return choose_engine(request.engine, registry.engine_support(), model.facts.architecture, tensors)


def planner_of(request: RunRequest, model: OpenedModel, registry: Registry) -> Planner:
    """What plans the model on nodes, as the request wants it. It raises:

    Raises:
        PlanError: The model can't be split as it was asked for, or doesn't fit.
        PluginError: A planner that is named can't be used.
    """
    options = resolved_options(request.engine_options, model.parameters)

    def plan(nodes: tuple[NodeCapacity, ...]) -> RunPlan:
        return registry.plan(
            PlanRequest(
                facts=model.facts,
                parameters=model.parameters,
                model_uri=model.uri,
                nodes=nodes,
                split=request.split,
                max_context=options.max_context,
                max_sequences=options.max_sequences,
                max_batch_tokens=options.max_batch_tokens,
                kv_bytes_per_value=KV_BYTES.get(options.kv_dtype, 2),
            ),
            request.planner,
        )

    return plan


def plan_run(
    request: RunRequest,
    model: OpenedModel,
    registry: Registry,
    engine: EngineSupport,
    offers: Sequence[Offer] = (),
    *,
    packed: bool = False,
) -> Planning:
    """Decide which node holds which layers, and which offer each node is for.

    Args:
        offers: What the provider could start, the best first; none where that isn't known.
        packed: Whether few machines are better than many.

    Raises:
        PlanError: The model can't be split as it was asked for, or doesn't fit what is offered.
        PluginError: A plugin that is named can't be used.
    """
    options = resolved_options(request.engine_options, model.parameters)
    plan, placement = plan_on(offers, request.stages, planner_of(request, model, registry), packed=packed)
    return Planning(request, model, options, engine, plan, placement=placement)


def named_plugins(request: RunRequest) -> dict[str, list[str]]:
    """The plugins that a request names, by group: all must be usable, and all that are not are reported at once."""
    wanted = {"myelin.providers": [request.provider], "myelin.transports": [request.transport]}
    if request.engine != AUTO:
        wanted["myelin.engines"] = [request.engine]
    if request.planner:
        wanted["myelin.planners"] = [request.planner]
    return wanted


class AbandonedError(ModelError):
    """Fetching was given up because nobody waits for it any more."""


def abandonable(progress: FetchProgress, abandoned: Callable[[], bool]) -> FetchProgress:
    """``progress`` that ends the fetch in its thread once ``abandoned()``."""

    def tell(done: int, total: int) -> None:
        if abandoned():
            raise AbandonedError("fetching was interrupted", reason="interrupted")
        progress(done, total)

    return tell
