"""What every provider must do, and what is this one's own."""

from __future__ import annotations

import sys
from collections.abc import Collection

import psutil

from myelin.plugin import Provider, ProviderContext, RunId
from myelin_provider_echo.plugin import EchoSection, myelin_config_section, myelin_provider
from myelin_testkit import tiny_worker
from myelin_testkit.provider_compliance import Feature, ProviderCompliance

CONTEXT = ProviderContext(RunId("run-1"))
TINY_WORKER = (sys.executable, str(tiny_worker.__file__))
"""It starts faster than a real worker, and does all that a provider can see of one."""


class TestEchoProvider(ProviderCompliance):
    """The contract, sentence by sentence."""

    features = frozenset({Feature.DIALLED, Feature.FAILING_LAUNCH})

    def make_provider(self, run: RunId) -> Provider:
        provider = myelin_provider("echo", ProviderContext(run, EchoSection(command=TINY_WORKER)))
        assert provider is not None
        return provider

    def failing_provider(self, run: RunId) -> Provider:
        provider = myelin_provider("echo", ProviderContext(run, EchoSection(command=("/nowhere/python",))))
        assert provider is not None
        return provider

    def outside(self) -> Collection[object]:
        return {process.pid for process in psutil.Process().children(recursive=True)}


def test_it_answers_for_its_own_name_only() -> None:
    assert myelin_provider("echo", CONTEXT) is not None
    assert myelin_provider("another", CONTEXT) is None


def test_every_setting_has_a_default() -> None:
    section = myelin_config_section()
    assert section.name == "echo"
    assert section.model().model_dump() == {"command": (), "grace_s": 5.0, "log_lines": 1000}
