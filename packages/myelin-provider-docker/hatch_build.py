"""Puts the repository's pinned versions into the package: the node image holds the versions that were tested."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

INSIDE = "myelin_provider_docker/node/constraints.txt"


class ConstraintsHook(BuildHookInterface[Any]):
    """From the repository where this is built there, else from the copy in the source distribution."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a build of either kind. An editable install reads the repository's own file."""
        if version == "editable":
            return
        in_repository = Path(self.root).parents[1] / "constraints.txt"
        source = in_repository if in_repository.is_file() else Path(self.root) / "constraints.txt"
        target = INSIDE if self.target_name == "wheel" else "constraints.txt"
        build_data["force_include"][str(source)] = target
