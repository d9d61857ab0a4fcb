"""The logbook: bounded, correlated, without secrets, and no burden at 10,000 lines a second."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from contextlib import aclosing

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from myelin.telemetry.logbook import (
    FOLLOWER_ENTRIES,
    Logbook,
    LogbookHandler,
    LogEntry,
    entry_of_line,
    logs_request,
)
from myelin.telemetry.redaction import Redactor
from myelin.telemetry.tracing import configure_tracing, span

STRUCTURED = json.dumps(
    {
        "event": "loading",
        "model": "pkg:x/y.gguf",
        "level": "error",
        "timestamp": "2026-11-30T21:00:00.5Z",
        "node": "stage-0",
        "attempt": 1,
        "trace_id": "ab" * 16,
        "span_id": "cd" * 8,
    }
)


def test_a_structured_line_keeps_its_level_its_time_and_its_span() -> None:
    entry = entry_of_line("stage-0", "stderr", STRUCTURED, 1.0)
    assert entry == LogEntry(
        1796072400.5, "stage-0", "stderr", "error", "loading model=pkg:x/y.gguf", "ab" * 16, "cd" * 8
    )
    assert entry_of_line("stage-0", "stderr", STRUCTURED, 1.0, offset_s=5.0).time == 1796072395.5


def test_any_other_line_is_taken_as_it_is() -> None:
    for text in ("hello", '{"level": 3}', '{"level": "error"', '{"level"', "", '{"level": "loud", "event": "x"}'):
        assert entry_of_line("n", "stdout", text, 1.0) == LogEntry(1.0, "n", "stdout", "info", text)
    assert entry_of_line("n", "stderr", "hello", 1.0).level == "warning"
    odd = entry_of_line("n", "stderr", '{"level": "info", "event": "x", "trace_id": "../..", "timestamp": 3}', 1.0)
    assert (odd.trace_id, odd.time) == ("", 1.0)


def test_it_forgets_the_oldest_and_cuts_what_is_too_long() -> None:
    logbook = Logbook(kept=3)
    for number in range(5):
        logbook.line("n", "stdout", f"{number}" * 10_000)
    assert [entry.text[0] for entry in logbook.recent()] == ["2", "3", "4"]
    assert all(len(entry.text) == 8_192 for entry in logbook.recent())
    assert [entry.text[0] for entry in logbook.recent(1)] == ["4"]
    assert logbook.added == 5


def test_planted_keys_are_in_no_entry() -> None:
    logbook = Logbook(Redactor(["the-secret"]))
    handed: list[LogEntry] = []
    logbook.hand_over(handed.append)
    logbook.line("n", "stderr", "the-secret and hf_" + "a" * 30)
    (entry,) = logbook.recent()
    assert entry.text == "[redacted] and [redacted]"
    assert handed == [entry]


async def test_a_follower_gets_the_last_lines_and_those_that_come() -> None:
    logbook = Logbook()
    logbook.line("n", "stdout", "before")
    async with aclosing(logbook.subscribe(recent=5)) as lines:
        assert (await anext(lines)).text == "before"
        waiting = asyncio.ensure_future(anext(lines))
        await asyncio.sleep(0)
        await asyncio.to_thread(logbook.line, "n", "stdout", "from a thread")
        assert (await asyncio.wait_for(waiting, 60)).text == "from a thread"
    logbook.line("n", "stdout", "nobody follows")
    assert logbook.missed == 0


async def test_a_follower_who_is_too_slow_misses_lines_and_that_is_counted() -> None:
    logbook = Logbook(kept=10)
    async with aclosing(logbook.subscribe(recent=1)) as lines:
        logbook.line("n", "stdout", "first")
        await anext(lines)
        for number in range(FOLLOWER_ENTRIES + 100):
            logbook.line("n", "stdout", f"{number}")
        assert logbook.missed == 100
        assert (await anext(lines)).text == "0"


def test_ten_thousand_lines_are_no_burden() -> None:
    """A second's worth of a very talkative node takes well under half of one, in a ring that does not grow."""
    logbook = Logbook(Redactor(["the-secret-of-the-run", "another-secret"]))
    lines = [STRUCTURED if number % 2 else f"line {number} of a library that talks a lot" for number in range(10_000)]
    began = time.thread_time()
    for line in lines:
        logbook.line("stage-0", "stderr", line)
    assert time.thread_time() - began < 0.5
    assert len(logbook.recent()) == 10_000


def test_our_own_loggers_are_heard_with_their_span() -> None:
    logbook = Logbook()
    tracing = configure_tracing("a", (InMemorySpanExporter(),))
    handler = LogbookHandler(logbook, "orchestrator")
    logging.getLogger("myelin").addHandler(handler)
    try:
        with span(tracing.tracer, "work") as current:
            logging.getLogger("myelin.somewhere").warning("it is %s", "so")
            wanted = f"{current.get_span_context().trace_id:032x}"
    finally:
        logging.getLogger("myelin").removeHandler(handler)
    logging.getLogger("myelin.somewhere").warning("nobody listens")
    (entry,) = logbook.recent()
    assert (entry.text, entry.level, entry.trace_id) == ("myelin.somewhere: it is so", "warning", wanted)
    tracing.shutdown()


def test_lines_as_otlp_are_grouped_by_their_resource() -> None:
    entry = entry_of_line("stage-0", "stderr", STRUCTURED, 1.0)
    request = logs_request([({"service.name": "a"}, [entry]), ({"service.name": "b"}, [])])
    first, second = request.resource_logs
    (record,) = first.scope_logs[0].log_records
    assert record.severity_text == "ERROR"
    assert record.severity_number == 17
    assert record.trace_id == b"\xab" * 16
    assert record.time_unix_nano == 1796072400_500_000_000
    assert {each.key: each.value.string_value for each in record.attributes} == {
        "myelin.node.id": "stage-0",
        "log.iostream": "stderr",
    }
    assert not second.scope_logs[0].log_records
