"""The process that speaks with Ray, ``python -m myelin_provider_ray.bridge``: one JSON line in, one JSON line out.

Ray's driver has a process of its own because it ends the process that it is in: a minute after it has lost the
cluster's head, it says «The program will terminate», and does, from C++ (measured with Ray 2.60). A pipeline that
serves must outlive that. And its calls block, some of them for ever; a process can be left behind, a thread can't.

Requests are ``{"id": 1, "call": "snapshot", "with": {…}}``, answers ``{"id": 1, "answer": …}`` or ``{"id": 1, "error":
[kind, text]}``. Calls are served at once in threads, so they may be answered out of order. The first one is
:func:`connect`. The end of standard input ends the process.

With ``ray://`` the tables of the cluster can't be read from here; what reads them runs as tasks on the cluster then.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any

from myelin_provider_ray.names import read_name
from myelin_provider_ray.view import autoscales

THREADS = 32
PROBE_S = 0.5
LOOK_S = 1.5
GONE_S = 10.0
FINISH_S = 4.0
"""How long calls that change the cluster may still take once nobody reads their answers."""
_CHANGING = frozenset({"create", "remove"})
_LOCAL_STORE_BYTES = 100 * 1024 * 1024
"""Of the object store of a cluster of our own; nothing of Myelin is kept there, and Ray's least is 75 MB."""

_client = False
_booted: dict[str, Any] = {}


def connect(address: str, namespace: str, runtime_env: Mapping[str, Any], local_cpus: float) -> dict[str, Any]:
    """Join the cluster. Must be called on the main thread: what Ray starts of its own ends with the thread.

    Args:
        address: As in the configuration.
        namespace: Of the actors.
        runtime_env: Of all that runs on the cluster for us.
        local_cpus: CPUs of a cluster of our own, at least.
    """
    global _client
    import ray

    options: dict[str, Any] = {"namespace": namespace, "log_to_driver": False}
    if runtime_env:
        options["runtime_env"] = dict(runtime_env)
    if address.startswith("ray://"):
        _client = True
    else:
        options |= {"configure_logging": False, "logging_level": "ERROR"}
    if address == "local":
        cores = os.cpu_count() or 1
        options |= {"num_cpus": max(cores, local_cpus), "object_store_memory": _LOCAL_STORE_BYTES}
        options["include_dashboard"] = False
    ray.init(address=address, **options)
    return {"ray": ray.__version__, "python": sys.version.split()[0]}


def snapshot() -> dict[str, Any]:
    """What :func:`myelin_provider_ray.view.read_view` makes a view of."""
    return _on_the_cluster(_snapshot)  # type: ignore[no-any-return]  # Ray is Any


def obituaries(names: Sequence[str]) -> dict[str, Any]:
    """What the actors of these names died of, as :func:`myelin_provider_ray.endings.actor_death` wants it; those of
    which Ray knows nothing are left out."""
    return _on_the_cluster(_obituaries, list(names))  # type: ignore[no-any-return]  # Ray is Any


def create(
    name: str,
    bundle: Mapping[str, float],
    selector: Mapping[str, str],
    host: Mapping[str, Any],
    line: str,
    bind: str,
) -> dict[str, Any]:
    """Reserve a place and start a stage's host there, unless either is there already; nothing is waited for.

    Args:
        name: Of both.
        bundle: What is reserved.
        selector: Labels of the node.
        host: Arguments of :class:`myelin_provider_ray.host.WorkerHost`.
        line: The boot line. It is the argument of a call from this process to the actor's: neither Ray's tables nor
            its logs have such.
        bind: See :meth:`~myelin_provider_ray.host.WorkerHost.boot`.

    Returns:
        ``made``: whether the place was reserved by this call.
    """
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from myelin_provider_ray.host import WorkerHost

    made = True
    try:
        group = placement_group(
            [dict(bundle)],
            strategy="PACK",
            name=name,
            lifetime="detached",
            bundle_label_selector=[dict(selector)] if selector else None,
        )
    except Exception as error:
        if "already exists" not in str(error):
            raise
        made = False
        group = ray.util.get_placement_group(name)
    options: dict[str, Any] = {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0)}
    if memory := bundle.get("memory", 0):
        options["memory"] = memory
    try:
        actor = (
            ray.remote(WorkerHost)
            .options(
                name=name,
                lifetime="detached",
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0),
                **options,
            )
            .remote(**host)
        )
    except ValueError as error:  # ActorAlreadyExistsError is one, as is what a client gets of it
        if "already" not in str(error):
            raise
        actor = ray.get_actor(name)
    _booted[name] = actor.boot.remote(line.encode(), bind)
    return {"made": made}


def boot(name: str, line: str, bind: str) -> None:
    """Give a stage's host its boot line, where the one that came with its making may have been lost with the process
    that sent it. A host that has one already, or is gone, is left as it is.

    Args:
        name, line, bind: See :func:`create`.
    """
    import ray

    with suppress(ValueError):
        _booted[name] = ray.get_actor(name).boot.remote(line.encode(), bind)


def look(names: Sequence[str]) -> dict[str, Any]:
    """What the hosts of these names say of their workers.

    Returns:
        For each name ``{"worker": …}`` (see :meth:`~myelin_provider_ray.host.WorkerHost.look`), ``{"died": text}``,
        ``{"absent": true}`` where there is no such actor, or ``{"silent": true}`` where it didn't answer in time.
    """
    import ray

    found: dict[str, Any] = {}
    asked: dict[Any, str] = {}
    for name in names:
        try:
            asked[ray.get_actor(name).look.remote()] = name
        except ValueError:
            found[name] = {"absent": True}
    if not asked:
        return found
    answered, silent = ray.wait(list(asked), num_returns=len(asked), timeout=LOOK_S)
    for reference in answered:
        try:
            found[asked[reference]] = {"worker": ray.get(reference, timeout=LOOK_S)}
        except ray.exceptions.RayActorError as error:
            found[asked[reference]] = {"died": str(error)}
    return found | {asked[reference]: {"silent": True} for reference in silent}


def lines(name: str, after: int) -> dict[str, Any] | None:
    """What a stage has written from line ``after`` on: see :meth:`~myelin_provider_ray.host.WorkerHost.lines`;
    ``{"silent": true}`` where its host doesn't answer in time, None where it is gone."""
    import ray

    try:
        answer: dict[str, Any] = ray.get(ray.get_actor(name).lines.remote(after), timeout=LOOK_S)
    except ray.exceptions.GetTimeoutError:
        return {"silent": True}
    except (ValueError, ray.exceptions.RayActorError):
        return None
    return answer


def remove(name: str, grace_s: float, group: str) -> None:
    """End a stage and give its place back; returns once the cluster's own lists have neither.

    Args:
        name: Of the actor.
        grace_s: What the worker gets to end by itself; 0 doesn't ask it.
        group: The id of the placement group; empty where none is known.

    Raises:
        TimeoutError: They are still there.
    """
    import ray

    _booted.pop(name, None)
    with suppress(ValueError):
        actor = ray.get_actor(name)
        if grace_s > 0:
            with suppress(ray.exceptions.RayError):
                ray.wait([actor.stop.remote(grace_s)], timeout=grace_s + LOOK_S)
        ray.kill(actor, no_restart=True)
    deadline = time.monotonic() + GONE_S
    while _on_the_cluster(_still_there, name, group):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{name} is still on the cluster's lists")
        time.sleep(0.05)
        with suppress(ValueError):  # one that somebody else, who is gone by now, was just making
            ray.kill(ray.get_actor(name), no_restart=True)


def _snapshot() -> dict[str, Any]:
    import ray
    from ray._private.state import available_resources_per_node, state
    from ray.util.placement_group import placement_group_table

    keys = ("NodeID", "NodeManagerAddress", "NodeManagerHostname", "Alive", "Resources", "Labels")
    more = ("DeathReason", "DeathReasonMessage", "NodeManagerPort")
    nodes = [{key: node.get(key) for key in (*keys, *more)} for node in ray.nodes()]
    before = ray.util.list_named_actors()
    groups = [entry for entry in placement_group_table().values() if read_name(str(entry.get("name", "")))]
    used = {node for group in groups for node in group["bundles_to_node_id"].values()}
    now = time.time()
    return {
        "nodes": nodes,
        "free": available_resources_per_node(),
        "groups": groups,
        "actors": ray.util.list_named_actors(),
        "actors_before": before,
        "answering": {
            node["NodeID"]: _answers(node["NodeManagerAddress"], int(node["NodeManagerPort"]))
            for node in nodes
            if node["Alive"] and node["NodeID"] in used
        },
        "draining": {
            node: max(0.0, deadline / 1000 - now) if deadline else 0.0
            for node, deadline in state.get_draining_nodes().items()
        },
        "autoscaling": _autoscaling(),
    }


def _autoscaling() -> bool:
    """Whether the cluster can add nodes: what its autoscaler says, the old one or the new."""
    from ray._private.state import state
    from ray.experimental.internal_kv import _internal_kv_get

    if state.get_cluster_config():
        return True
    try:
        report = json.loads(_internal_kv_get("__autoscaling_status") or b"{}")
    except ValueError:
        return False
    return autoscales(report.get("autoscaler_report") or {})


def _answers(address: str, port: int) -> bool | None:
    """Whether a raylet takes connections; None where that can't be told."""
    try:
        socket.create_connection((address, port), timeout=PROBE_S).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return None
    return True


def _obituaries(names: list[str]) -> dict[str, Any]:
    from ray._private.state import actors

    newest: dict[str, Mapping[str, Any]] = {}
    for actor in actors().values():
        name = actor["Name"]
        if name in names and (name not in newest or actor["Timestamp"] >= newest[name]["Timestamp"]):
            newest[name] = actor
    return {name: _cause(actor["DeathCause"]) for name, actor in newest.items() if actor["State"] == "DEAD"}


def _cause(cause: Any) -> dict[str, Any]:
    kind = cause.WhichOneof("context") or ""
    context: Any = getattr(cause, kind) if kind else None
    told: dict[str, Any] = {"kind": kind, "text": getattr(context, "error_message", "")}
    if kind == "actor_died_error_context":
        told |= {
            "reason": type(context).Reason.Name(context.reason),
            "address": context.node_ip_address,
            "node_reason": int(context.node_death_info.reason),
            "node_text": context.node_death_info.reason_message,
        }
    elif kind == "creation_task_failure_context":
        told["text"] = getattr(context, "formatted_exception_string", "") or "its constructor failed"
    return told


def _still_there(name: str, group: str) -> bool:
    """Have the placement group removed, and tell whether it or the actor is still listed."""
    import ray
    from ray import PlacementGroupID
    from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

    left = False
    for id, entry in placement_group_table().items():
        if (id == group or entry.get("name") == name) and entry["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(id))))
            left = True
    return left or name in ray.util.list_named_actors()


def _on_the_cluster(function: Callable[..., Any], *arguments: object) -> Any:
    """Call ``function`` where the cluster's tables can be read: here, or as a task where we are but a client."""
    if not _client:
        return function(*arguments)
    import ray

    return ray.get(ray.remote(function).options(num_cpus=0).remote(*arguments), timeout=60)


CALLS: Mapping[str, Callable[..., Any]] = {
    call.__name__: call for call in (connect, snapshot, obituaries, create, boot, look, lines, remove)
}


def answer_to(request: Mapping[str, Any]) -> str:
    """Do what a request asks; its answer, as a line."""
    try:
        answer = {"id": request["id"], "answer": CALLS[request["call"]](**request["with"])}
    except Exception as error:
        answer = {"id": request["id"], "error": [type(error).__name__, str(error)]}
    return json.dumps(answer, separators=(",", ":"))


def main() -> None:
    """Serve requests until standard input ends. A launch or a release that is under way then is finished all the same:
    whoever asked may have been killed, and a place without an actor has nobody who would give it back."""
    wire = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # whatever Ray prints must not be taken for an answer
    turn = threading.Lock()
    under_way: set[Future[None]] = set()

    def serve(request: Mapping[str, Any]) -> None:
        line = answer_to(request)
        with turn, suppress(OSError):
            wire.write(line + "\n")

    with ThreadPoolExecutor(THREADS, "call") as threads:
        for line in sys.stdin:
            request = json.loads(line)
            if request["call"] == "connect":
                serve(request)
                continue
            future = threads.submit(serve, request)
            if request["call"] in _CHANGING:
                under_way = {future, *(each for each in under_way if not each.done())}
        wait(under_way, FINISH_S)
        _leave()


def _leave() -> None:
    """Leave the cluster, and end one of our own; whatever hangs is left behind."""
    import ray

    leaving = threading.Thread(target=ray.shutdown, daemon=True)
    leaving.start()
    leaving.join(10)
    os._exit(0)


if __name__ == "__main__":
    # Under its own name, so that what is sent to the cluster is found there by that name, too.
    from myelin_provider_ray import bridge

    bridge.main()
