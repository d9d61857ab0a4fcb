"""Fetching again is told where the work is being traced."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from myelin.model.remote import http
from myelin.orchestrator.background import in_thread
from myelin.telemetry.tracing import configure_tracing, span


async def test_each_try_is_an_event_of_the_span_that_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "FIRST_WAIT_S", 0.001)
    kept = InMemorySpanExporter()
    tracing = configure_tracing("a", (kept,))
    tries = 0

    def action() -> str:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise http._TransientError(f"try {tries} was cut off")
        return "done"

    with span(tracing.tracer, "load"):
        assert await in_thread(lambda: http._patiently(action, 5)) == "done"
    tracing.shutdown()
    (load,) = kept.get_finished_spans()
    assert [event.name for event in load.events] == ["fetch again", "fetch again"]
    assert [(event.attributes or {})["myelin.fetch.why"] for event in load.events] == [
        "try 1 was cut off",
        "try 2 was cut off",
    ]
