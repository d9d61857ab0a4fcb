"""What nodes are told: the stage to load, and the variables to live with. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping

from pydantic import SecretStr

from myelin.model.summary import MOST_BYTES, pack_facts
from myelin.orchestrator.planning import Planning
from myelin.orchestrator.request import RunRequest
from myelin.wire import control_pb2 as pb
from myelin.worker.main import DEAD_MAN_VARIABLE

PROVISION_ID = 1
"""Each node gets one stage in its life, so one number will do."""
HANDED_ON = ("MYELIN_CPU_ISA", "MYELIN_LOG_FORMAT")
"""Variables of ours that are meant for the nodes, which inherit nothing else that begins like a setting."""


def provision_message(plan: Planning, index: int, *, same_host: bool = True) -> pb.Provision:
    """What the node of stage ``index`` is told to load; without the end tokens.

    Args:
        same_host: The nodes share this machine's files, and so its cache; others keep what they fetch in their own.
    """
    stage, options = plan.plan.stages[index], plan.options
    facts = pack_facts(plan.facts) if plan.model.fingerprints else b""
    if len(facts) > MOST_BYTES:
        facts = b""
    return pb.Provision(
        id=PROVISION_ID,
        model_uri=plan.model.uri,
        engine=plan.engine.name,
        options=pb.EngineOptions(
            threads=options.threads,
            max_context=options.max_context,
            max_sequences=options.max_sequences,
            max_batch_tokens=options.max_batch_tokens,
            kv_dtype=options.kv_dtype,
            memory_bytes=options.memory_bytes,
        ),
        stage_index=index,
        stage_count=len(plan.plan.stages),
        first_layer=stage.slice.first_layer,
        end_layer=stage.slice.end_layer,
        model_cache_dir=str(plan.request.source_options.cache_dir) if same_host else "",
        part_sizes=plan.model.part_sizes,
        header_digest=plan.model.digest,
        part_fingerprints=plan.model.fingerprints,
        facts=facts,
    )


def handed_on(ours: Mapping[str, str]) -> dict[str, str]:
    """Those of ``ours`` that are meant for the nodes."""
    return {name: ours[name] for name in HANDED_ON if ours.get(name)}


def node_environment(request: RunRequest, variables: Mapping[str, str], *, same_host: bool) -> dict[str, SecretStr]:
    """The variables that nodes get: what to tell of themselves, how to fetch the model, what the request adds.

    Args:
        variables: What nodes are told of telemetry, and what is handed on to them.
        same_host: The nodes share this machine's files, and with them the cache of the Hub.
    """
    environment = dict(variables)
    options = request.source_options
    if options.hub_cache_dir is not None and same_host:
        environment["HF_HUB_CACHE"] = os.path.abspath(options.hub_cache_dir)
    if options.token is not None:
        environment["HF_TOKEN"] = options.token.get_secret_value()
    if options.offline:
        environment["HF_HUB_OFFLINE"] = "1"
    environment["HF_ENDPOINT"] = options.hub_endpoint
    if request.dead_man_s > 0:
        environment[DEAD_MAN_VARIABLE] = f"{request.dead_man_s:g}"
    environment.update(request.environment)
    return {name: SecretStr(value) for name, value in environment.items()}
