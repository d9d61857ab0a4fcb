"""Puts the example provider into the package, so that ``python -m myelin_testkit.new`` works where only wheels are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SKIPPED = {"__pycache__", "dist", "build"}


class ExampleHook(BuildHookInterface[Any]):
    """From the repository's ``examples`` where this is built there, else from the copy in the source distribution."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a build of either kind. An editable install reads the repository's own file."""
        if version == "editable":
            return
        in_repository = Path(self.root).parents[1] / "examples" / "myelin-provider-echo"
        source = in_repository if in_repository.is_dir() else Path(self.root) / "template"
        target = "myelin_testkit/template" if self.target_name == "wheel" else "template"
        for path in source.rglob("*"):
            relative = path.relative_to(source)
            if path.is_file() and not any(part in SKIPPED or part.startswith(".") for part in relative.parts):
                build_data["force_include"][str(path)] = f"{target}/{relative.as_posix()}"
