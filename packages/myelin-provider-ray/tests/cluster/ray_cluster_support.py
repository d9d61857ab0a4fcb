"""What tests need of a Ray cluster: starting one, looking at it without the provider, breaking parts of it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

from myelin_provider_ray import bridge
from myelin_provider_ray.driver import refusal, within
from myelin_provider_ray.names import read_name

STORE_BYTES = 80 << 20
"""Of a node's object store, which nothing of Myelin uses; Ray's least is 75 MB."""


@contextmanager
def short_folder() -> Iterator[None]:
    """Ray's files in a folder with a short name, since a socket's path has at most 107 characters; statistics off."""
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    settings = {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
    before = {name: os.environ.get(name) for name in settings}
    os.environ |= settings
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
        shutil.rmtree(folder, ignore_errors=True)


class ThreeNodes:
    """A cluster of three nodes, which this process has joined as well, to look at it.

    Args:
        memories: Bytes that each node has for stages; they are but numbers to Ray.
        cpus: Of each node.
        connect: Whether to join it.
    """

    def __init__(self, memories: tuple[int, ...] = (3_000_000_000,) * 3, cpus: int = 4, connect: bool = True) -> None:
        import ray
        from ray.cluster_utils import Cluster

        self.cluster = Cluster()
        self.nodes: list[Any] = [
            self.cluster.add_node(
                num_cpus=cpus,
                memory=memory,
                object_store_memory=STORE_BYTES,
                include_dashboard=False,
                labels={"zone": f"z{number}"},
            )
            for number, memory in enumerate(memories)
        ]
        self.address: str = self.cluster.address
        self.connected = connect
        if connect:
            ray.init(address=self.address, namespace="myelin", log_to_driver=False, configure_logging=False)

    def actors(self) -> set[str]:
        """Names of all actors."""
        import ray

        return {actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)}

    def actor_ids(self) -> dict[str, str]:
        """Ray's id of each actor, which no other one ever has, by name."""
        import ray

        named = ray.util.list_named_actors(all_namespaces=True)
        found = {each["name"]: ray.get_actor(each["name"], namespace=each["namespace"]) for each in named}
        return {name: actor._actor_id.hex() for name, actor in found.items()}

    def groups(self) -> set[str]:
        """Ids of all placement groups."""
        from ray.util.placement_group import placement_group_table

        return {id for id, group in placement_group_table().items() if group["state"] != "REMOVED"}

    def places(self) -> dict[str, str]:
        """The id of the cluster node of each stage, by the stage's node name."""
        from ray.util.placement_group import placement_group_table

        found: dict[str, str] = {}
        for group in placement_group_table().values():
            key = read_name(group["name"])
            if key is not None and group["state"] == "CREATED":
                found[str(key.node)] = group["bundles_to_node_id"][0]
        return found

    def rest(self) -> None:
        """Wait until all that was reserved on the first nodes is shown to be free again, which lags a moment behind."""
        import ray
        from ray._private.state import available_resources_per_node

        ours = {node.node_id for node in self.nodes}
        for _ in range(600):
            free = available_resources_per_node()
            total = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["NodeID"] in ours}
            reserved = [id for id in total for name in ("CPU", "memory") if free[id].get(name, 0.0) < total[id][name]]
            if not (reserved or self.actors() or self.groups()):
                return
            time.sleep(0.05)
        raise AssertionError(f"something is left: {self.actors()}, {self.groups()}, or reserved on {reserved}")

    def workers(self, marker: str) -> set[int]:
        """Process ids of all children of actors whose command line has ``marker``."""
        return {
            process.pid
            for process in psutil.Process().children(recursive=True)
            if marker in " ".join(_command_line(process))
        }

    def head(self) -> psutil.Process:
        """The process that holds the cluster's tables."""
        return next(p for p in psutil.Process().children(recursive=True) if p.name() == "gcs_server")

    def all_that_is_kept(self) -> str:
        """Everything that Ray shows or has written: tables of actors and placement groups, log files."""
        from ray._private.state import actors
        from ray.util.placement_group import placement_group_table

        session = Path(self.nodes[0].get_session_dir_path())
        logs = [path.read_bytes().decode(errors="replace") for path in session.rglob("*") if path.is_file()]
        return "\n".join([repr(actors()), repr(placement_group_table()), *logs])

    def close(self) -> None:
        """Leave it, end it, and remove its files."""
        import ray

        folder = Path(self.nodes[0].get_session_dir_path())
        if self.connected:
            ray.shutdown()
        self.cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


_shared: dict[tuple[tuple[int, ...], int], tuple[ThreeNodes, ExitStack]] = {}


def lent(memories: tuple[int, ...] = (3_000_000_000,) * 3, cpus: int = 4) -> Iterator[ThreeNodes]:
    """A cluster of this shape for one test, which must leave it as it was: it is shared, since its start takes long.

    There is one at a time, since a process can be in but one: that of another shape is ended.
    """
    shape = (memories, cpus)
    if shape not in _shared:
        end_shared()
        with ExitStack() as stack:
            stack.enter_context(short_folder())
            cluster = ThreeNodes(memories, cpus)
            stack.callback(cluster.close)
            _shared[shape] = cluster, stack.pop_all()
    cluster, _ = _shared[shape]
    yield cluster
    try:
        cluster.rest()
    except BaseException:
        end_shared()  # whatever is left there is no other test's trouble
        raise


def end_shared() -> None:
    """End the cluster that is shared, where there is one."""
    while _shared:
        _, (_, stack) = _shared.popitem()
        stack.close()


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


class InProcess:
    """The bridge's calls done by this very process, which has joined the cluster already: no process to start for each
    provider object. What goes in and out is JSON here, too.

    Args:
        call_s: How long a call may take.
    """

    def __init__(self, call_s: float) -> None:
        self._call_s = call_s

    async def call(self, name: str, /, *, timeout_s: float = 0.0, **arguments: Any) -> Any:
        """Do it in a thread."""
        request = json.loads(json.dumps({"id": 1, "call": name, "with": arguments}))
        work = asyncio.to_thread(bridge.answer_to, request)
        answer = json.loads(await within(timeout_s or self._call_s, work, "did not answer"))
        if "error" in answer:
            raise refusal(*answer["error"])
        return answer["answer"]

    async def close(self) -> None:
        """The process stays in the cluster."""
