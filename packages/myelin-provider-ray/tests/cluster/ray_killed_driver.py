"""A process that joins a cluster, begins a launch there, and is killed at a step of it:
``ray_killed_driver.py STEP ADDRESS NAME NODE COMMAND``, with the boot line on standard input.

The steps: ``place``, once the placement group is made; ``actor``, once Ray knows of the actor, which it may give up
with its maker; ``boot``, once the boot line is on its way to an actor whose process isn't up yet; ``booted``, once it
has arrived.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import ray

from myelin_provider_ray import bridge


def dying(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, after which there is nothing any more."""

    def last(*arguments: Any, **more: Any) -> None:
        function(*arguments, **more)
        os.kill(os.getpid(), signal.SIGKILL)

    return last


def main(step: str, address: str, name: str, node: str, command: str) -> None:
    """Begin the launch."""
    bridge.connect(address, "myelin", {}, 1.0)
    if step == "place":
        groups = importlib.import_module("ray.util.placement_group")
        groups.placement_group = dying(groups.placement_group)
    elif step == "actor":
        ray.actor.ActorClass._remote = dying(ray.actor.ActorClass._remote)
    create = dying(bridge.create) if step == "boot" else bridge.create
    host = {"command": json.loads(command)}
    create(name, {"CPU": 1.0, "memory": 5e7}, {"ray.io/node-id": node}, host, sys.stdin.readline(), "")
    dying(ray.get)(bridge._booted[name], timeout=60)


if __name__ == "__main__":
    main(*sys.argv[1:])
