"""The process provider passes the suite that anyone's provider does, with a worker that starts in a blink."""

from __future__ import annotations

import sys
from collections.abc import Collection

import psutil

from myelin.plugin import Provider, ProviderContext, RunId
from myelin_provider_process.provider import ProcessProvider
from myelin_provider_process.section import ProcessSection
from myelin_testkit import tiny_worker
from myelin_testkit.provider_compliance import Feature, ProviderCompliance


class TestProcessProvider(ProviderCompliance):
    """No recovery: its nodes can't outlive it. No unreadable listing: it is a table in memory."""

    features = frozenset({Feature.DIALLED, Feature.FAILING_LAUNCH})

    def make_provider(self, run: RunId) -> Provider:
        return ProcessProvider(ProviderContext(run), command=(sys.executable, str(tiny_worker.__file__)))

    def failing_provider(self, run: RunId) -> Provider:
        return ProcessProvider(ProviderContext(run, ProcessSection(python="/nowhere/python")))

    def outside(self) -> Collection[object]:
        return {process.pid for process in psutil.Process().children(recursive=True)}
