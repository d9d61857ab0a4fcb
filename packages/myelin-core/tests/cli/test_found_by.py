"""By what another command finds a run's nodes: as the run was told, unless this command is told otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
from pydantic import BaseModel, SecretStr

from myelin.cli.composition import Root
from myelin.cli.ledgers import make_provider
from myelin.cluster.ledger import RunRecord
from myelin.cluster.provider import Provider, ProviderContext
from myelin.config.settings import Inputs, resolve
from myelin.plugins.registry import Registry
from myelin.values import RunId


class FarmSection(BaseModel):
    address: str = "auto"
    namespace: str = "myelin"
    grace_s: float = 5.0


class OneProvider:
    """A registry with one provider, whose context is kept."""

    context: ProviderContext

    def require(self, wanted: object) -> None:
        """It is there."""

    def section_of(self, group: str, name: str) -> str:
        return "farm"

    def provider(self, name: str, context: ProviderContext) -> Provider:
        self.context = context
        return cast(Provider, object())


def section_for(found_by: dict[str, str], folder: Path, *words: str, **environment: str) -> FarmSection:
    inputs = Inputs(folder=folder, assignments=words, environment=environment)
    registry = OneProvider()
    root = Root(resolve(inputs, {"farm": FarmSection}), cast(Registry, registry))
    record = RunRecord(RunId("run-1"), "farm", "toy.gguf", 2, SecretStr("secret"), found_by=found_by)
    make_provider(root, record)
    assert isinstance(registry.context.section, FarmSection)
    return registry.context.section


@pytest.mark.parametrize("environment", [{}, {"MYELIN_FARM_ADDRESS": "here:1"}])
def test_the_runs_own_settings_hold(tmp_path: Path, environment: dict[str, str]) -> None:
    section = section_for({"address": "there:1", "namespace": "mine"}, tmp_path, **environment)
    assert section == FarmSection(address="there:1", namespace="mine")


def test_unless_the_command_line_says_otherwise(tmp_path: Path) -> None:
    section = section_for({"address": "there:1", "namespace": "mine"}, tmp_path, "farm.address=moved:1")
    assert section == FarmSection(address="moved:1", namespace="mine")


def test_other_settings_are_as_they_are_now(tmp_path: Path) -> None:
    assert section_for({"address": "there:1"}, tmp_path, "farm.grace_s=9").grace_s == 9.0
    assert section_for({}, tmp_path, MYELIN_FARM_ADDRESS="here:1").address == "here:1"


def test_what_a_newer_provider_doesnt_know_any_more_is_left_out(tmp_path: Path) -> None:
    assert section_for({"address": "there:1", "region": "north"}, tmp_path) == FarmSection(address="there:1")
