"""What a node's container is made with. Pure: the daemon is told elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from myelin.plugin import CORES_VARIABLE, BootSpec, LaunchKey
from myelin_provider_docker.labels import container_name, labels_of
from myelin_provider_docker.section import DockerSection
from myelin_provider_docker.standing import NODE_PORT

WORKER_COMMAND = ("python", "-m", "myelin", "worker", "--boot-stdin")
CACHE_FOLDER = "/var/cache/myelin"
"""The home of everything that a node keeps: parts of models, compiled kernels."""
SCRATCH_FOLDER = "/tmp/myelin"
"""The same where nothing is kept and all else is read-only. In memory, and so part of the container's limit."""
_PACKAGE_FOLDERS = ("site-packages", "dist-packages")
_LOG = {"type": "json-file", "config": {"max-size": "16m", "max-file": "4"}}
"""The one log that every daemon can read back, whatever its default is, and bounded."""


@dataclass(frozen=True, slots=True)
class ContainerPlan:
    """All that the daemon is asked for a node. Nothing in it is secret: anybody on the daemon may see it.

    Attributes:
        name, image, command, user, labels: As in ``docker run``.
        environment: Plain settings.
        files: Read-only, at the same path inside.
        ports: Container ports to publish on ``publish_address``, each on a free port.
        section: Limits, network and cache.
    """

    name: str
    image: str
    command: tuple[str, ...]
    labels: dict[str, str]
    environment: dict[str, str]
    files: tuple[Path, ...]
    ports: tuple[int, ...]
    section: DockerSection = field(repr=False)


def plan_container(
    key: LaunchKey,
    offer: str,
    section: DockerSection,
    *,
    files: Sequence[Path] = (),
    cores: int = 0,
    command: Sequence[str] = (),
) -> ContainerPlan:
    """The container of one start of a node.

    Args:
        files: The model's files on this machine, where it has some.
        cores: How many of the machine's cores the node computes with; 0 is all that it sees.
        command: In place of :data:`WORKER_COMMAND`.
    """
    home = CACHE_FOLDER if section.cache or not section.read_only else SCRATCH_FOLDER
    environment = {
        "HOME": home,
        "XDG_CACHE_HOME": home,
        "TRITON_CACHE_DIR": f"{home}/triton",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    if cores:
        environment[CORES_VARIABLE] = str(cores)
    if folders := package_folders(files):
        environment["PYTHONPATH"] = ":".join(folders)
    return ContainerPlan(
        name=container_name(key),
        image=section.image_name,
        command=tuple(command) or WORKER_COMMAND,
        labels=labels_of(key, offer),
        environment=environment,
        files=tuple(files),
        ports=() if section.network == "host" else (NODE_PORT,),
        section=section,
    )


def boot_inside(boot: BootSpec, section: DockerSection) -> BootSpec:
    """``boot`` with the address that a worker binds inside its container: all of its own network, which others reach
    by the container's address and the published port alone."""
    return boot if section.network == "host" else replace(boot, bind=f"0.0.0.0:{NODE_PORT}")


def package_folders(files: Sequence[Path]) -> list[str]:
    """Folders of installed packages that ``files`` lie in: on Python's path, ``pkg:`` sources find them there."""
    found = [str(parent) for file in files for parent in file.parents if parent.name in _PACKAGE_FOLDERS]
    return list(dict.fromkeys(found))


def node_cores(machine: int, nodes: int, limit: float) -> int:
    """Cores that one of ``nodes`` nodes computes with on a machine of ``machine`` cores; ``limit`` 0 is none."""
    share = max(1, machine // max(1, nodes))
    return max(1, int(limit)) if limit else share


def creation(api: Any, plan: ContainerPlan) -> dict[str, Any]:
    """The arguments of ``api.create_container`` for a plan.

    Standard input is open and stays open when its writer leaves: a node whose orchestrator is gone ends by its own
    dead-man's time, and one whose orchestrator comes back meanwhile is taken up again.
    """
    from docker.types import LogConfig, Mount

    section = plan.section
    mounts = [Mount(str(file), str(file), type="bind", read_only=True) for file in plan.files]
    if section.cache:
        kind = "bind" if section.cache.startswith("/") else "volume"
        mounts.append(Mount(CACHE_FOLDER, section.cache, type=kind))
    limit = section.memory_limit
    host: dict[str, Any] = {
        "init": True,
        "read_only": section.read_only,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "tmpfs": {"/tmp": "rw,exec,nosuid,nodev,mode=1777"},  # exec: compiled kernels are loaded from there
        "mounts": mounts,
        "pids_limit": section.pids,
        "network_mode": section.network,
        "port_bindings": dict.fromkeys(plan.ports, (section.publish_address, None)),
        "log_config": LogConfig(**_LOG),
        "restart_policy": {"Name": "no"},
    }
    if limit:
        host |= {"mem_limit": limit, "memswap_limit": limit}  # no swap beside it: a node that swaps stops the chain
    if section.cpus:
        host["nano_cpus"] = round(section.cpus * 1e9)
    if section.gpus:
        host["device_requests"] = [gpu_request(section.gpus)]
    return {
        "name": plan.name,
        "image": plan.image,
        "entrypoint": list(plan.command),
        "user": section.user or None,
        "labels": plan.labels,
        "environment": plan.environment,
        "ports": list(plan.ports),
        "stdin_open": True,
        "detach": True,  # or else the end of one writer would be the end of input
        "host_config": api.create_host_config(**host),
    }


def gpu_request(text: str) -> Any:
    """What ``docker run --gpus`` makes of its word."""
    from docker.types import DeviceRequest

    if text.startswith("device="):
        return DeviceRequest(device_ids=text.removeprefix("device=").split(","), capabilities=[["gpu"]])
    return DeviceRequest(count=-1 if text == "all" else int(text), capabilities=[["gpu"]])
