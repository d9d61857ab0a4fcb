"""Secrets are in nothing that is kept of a node's output, and each part of the end has its span."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from pydantic import SecretStr

from myelin.cluster.node_logs import kept_logs
from myelin.cluster.provider import BootSpec, Offer
from myelin.cluster.quote import Quote
from myelin.errors import MyelinError
from myelin.orchestrator.bootstrap import running
from myelin.values import RunId
from myelin_testkit.memory_provider import Announce, Say

if TYPE_CHECKING:
    from conftest import Toy

SECRET = "the-secret-of-this-run"
TOKEN = "hf_" + "a1b2c3d4" * 4
NODES = {("stage-0", 1), ("stage-1", 1)}


def told(spans: tuple[ReadableSpan, ...], name: str) -> list[tuple[object, object]]:
    """The node and the attempt of each span of a name."""
    fields = [span.attributes or {} for span in spans if span.name == name]
    return sorted((each["myelin.node.id"], each["myelin.node.attempt"]) for each in fields)


async def test_what_a_node_lets_out_is_kept_without_secrets(toy: Toy, tmp_path: Path) -> None:
    quiet = toy.provider.life

    async def careless(boot: BootSpec, announce: Announce, say: Say) -> None:
        say(f"dialled with {SECRET}; Authorization: Bearer {TOKEN}")
        await quiet(boot, announce, say)

    toy.provider.life = careless
    request = toy.ask(secret=SecretStr(SECRET), log_dir=tmp_path)
    async with running(request, toy.registry, toy.recorder):
        pass
    kept = [line for log in kept_logs(tmp_path, RunId("test-run")) for line in log.lines()]
    shown = [event.text for event in toy.recorder.logs]
    for lines in (kept, shown):
        assert sum("dialled with [redacted]" in line for line in lines) == 2
        assert not [line for line in lines if SECRET in line or TOKEN in line]


async def test_the_last_words_of_a_node_are_told_without_secrets(toy: Toy) -> None:
    quiet = toy.provider.life

    async def fails(boot: BootSpec, announce: Announce, say: Say) -> None:
        await asyncio.sleep(0.05)
        say(f"password={TOKEN} was refused")
        if boot.node == "stage-0":
            await quiet(boot, announce, say)
        raise RuntimeError("refused")

    toy.provider.life = fails
    with pytest.raises(MyelinError) as raised:
        async with running(toy.request, toy.registry, toy.recorder):
            pass
    whole = f"{raised.value.message} {raised.value.hint}"
    assert "was refused" in whole
    assert TOKEN not in whole


async def test_the_end_of_each_node_is_a_span_of_its_own(toy: Toy) -> None:
    async with running(toy.request, toy.registry, toy.recorder):
        pass
    spans = toy.exporter.get_finished_spans()
    by_id = {span.context.span_id: span for span in spans if span.context is not None}
    for name, around in (
        ("myelin.bootstrap.shutdown.node", "myelin.bootstrap.shutdown"),
        ("provider.release", "myelin.bootstrap.provider_stop"),
    ):
        assert set(told(spans, name)) == NODES
        for span in spans:
            if span.name == name:
                assert span.parent is not None
                assert by_id[span.parent.span_id].name == around
                assert span.attributes is not None
                assert span.attributes.get("myelin.node.goodbye", True)


async def test_the_search_for_offers_is_part_of_the_trace(toy: Toy) -> None:
    """Also the first one, whose price somebody has to agree to, before any phase that starts nodes."""
    toy.provider.cloud.offers = [Offer("good", "tasks", "a task", dollars_per_hour=0.5)]

    async def agree(quote: Quote, ceiling: float) -> bool:
        return True

    async with running(toy.ask(agree=agree), toy.registry, toy.recorder):
        pass
    spans = toy.exporter.get_finished_spans()
    by_id = {span.context.span_id: span for span in spans if span.context is not None}
    assert [span.name for span in spans if span.parent is None] == ["myelin.run"]
    parents = {by_id[span.parent.span_id].name for span in spans if span.parent and span.name == "provider.offers"}
    assert parents == {"myelin.bootstrap.node_spec", "myelin.bootstrap.provider_start.node"}
