"""Before the first dollar: the cap, the question, the ledger; and what the run leaves in it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from myelin.cluster.ledger import Ledger
from myelin.cluster.provider import Offer
from myelin.cluster.quote import Quote
from myelin.errors import MyelinError, ProviderError, UsageError
from myelin.orchestrator.accounts import launch_times
from myelin.orchestrator.bootstrap import running

if TYPE_CHECKING:
    from conftest import Toy


@pytest.fixture
def priced(toy: Toy) -> Toy:
    """The toy's nodes cost half a dollar an hour each."""
    toy.provider.cloud.offers = [Offer("good", "tasks", "a task", dollars_per_hour=0.5)]
    return toy


async def comes_up(toy: Any, **changes: Any) -> Any:
    """Bring the run up and down; what it cost."""
    async with running(toy.ask(**changes), toy.registry, toy.recorder) as pipeline:
        now = pipeline.spend()
    assert toy.provider.running == {}
    return now, pipeline.spend()


async def test_what_costs_nothing_is_not_asked_about(toy: Any) -> None:
    now, after = await comes_up(toy)
    assert (now.dollars_per_hour, after.dollars) == (0, 0)


async def test_without_an_agreement_nothing_is_started(priced: Any) -> None:
    with pytest.raises(ProviderError, match=r"2 nodes for \$1\.00/h was not confirmed") as raised:
        await comes_up(priced)
    assert raised.value.reason == "not-confirmed"
    assert priced.provider.started == []


@pytest.mark.parametrize("answer", [True, False])
async def test_a_person_is_asked_once_for_the_whole_run(priced: Any, answer: bool) -> None:
    asked: list[tuple[Quote, float]] = []

    async def agree(quote: Quote, ceiling: float) -> bool:
        assert priced.provider.started == []
        asked.append((quote, ceiling))
        return answer

    if answer:
        now, after = await comes_up(priced, agree=agree)
        assert now.dollars_per_hour == 1.0
        assert after.dollars_per_hour == 0
        assert 0 < now.dollars <= after.dollars < 0.1
    else:
        with pytest.raises(ProviderError, match="not confirmed"):
            await comes_up(priced, agree=agree)
        assert priced.provider.started == []
    ((quote, ceiling),) = asked
    assert [node for node, _ in quote.offers] == ["stage-0", "stage-1"]
    assert (quote.dollars_per_hour, ceiling) == (1.0, 1.5)


async def test_above_the_cap_nothing_is_started_and_nobody_asked(priced: Any) -> None:
    async def agree(quote: Quote, ceiling: float) -> bool:
        raise AssertionError("there is nothing to agree to")

    with pytest.raises(ProviderError, match=r"cost \$1\.00/h .* cap of \$0\.70/h") as raised:
        await comes_up(priced, agree=agree, max_dollars_per_hour=0.7)
    assert raised.value.reason == "cost-cap"
    assert priced.provider.started == []


async def test_a_provider_may_say_that_the_price_is_agreed(priced: Any) -> None:
    priced.provider.price_agreed = True
    now, _ = await comes_up(priced, max_dollars_per_hour=1.0)
    assert now.dollars_per_hour == 1.0


async def test_a_run_is_in_the_ledger_while_it_lives_and_ended_after(toy: Any, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "state")
    async with running(toy.ask(state_dir=tmp_path / "state"), toy.registry, toy.recorder):
        (run,) = ledger.runs()
        assert (run.run, run.provider, run.nodes, run.owner.lives, run.ended) == ("test-run", "tasks", 2, True, 0)
        assert run.secret.get_secret_value()
        assert {intent.state.value for intent in ledger.intents(run.run)} == {"launched"}
    (run,) = ledger.runs()
    assert run.ended
    assert run.secret.get_secret_value() == ""
    assert {intent.state.value for intent in ledger.intents(run.run)} == {"released"}


async def test_a_run_that_fails_early_is_ended_in_the_ledger(toy: Any, tmp_path: Path) -> None:
    toy.provider.cloud.offers = []
    with pytest.raises(MyelinError):
        await comes_up(toy, state_dir=tmp_path / "state")
    (run,) = Ledger(tmp_path / "state").runs()
    assert run.ended


async def test_without_a_ledger_only_nodes_that_end_with_us_are_started(toy: Any, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("in the way")
    with pytest.raises(MyelinError, match="ledger") as raised:
        await comes_up(toy, state_dir=tmp_path / "state")
    assert "runtime.state_dir" in raised.value.hint
    assert toy.provider.started == []
    toy.provider.same_host = True
    await comes_up(toy, state_dir=tmp_path / "state")


async def test_a_run_of_another_process_is_not_taken(toy: Any, tmp_path: Path) -> None:
    import os
    import sqlite3

    from myelin.cluster.owner import start_of

    Ledger(tmp_path / "state").open_run(_record())
    with sqlite3.connect(tmp_path / "state" / "ledger.sqlite") as base:
        base.execute("UPDATE runs SET process = ?, process_started = ?", (os.getppid(), start_of(os.getppid())))
    base.close()
    with pytest.raises(UsageError, match=f"process {os.getppid()}'s"):
        await comes_up(toy, state_dir=tmp_path / "state")
    assert toy.provider.started == []


def _record() -> Any:
    from pydantic import SecretStr

    from myelin.cluster.ledger import RunRecord
    from myelin.values import RunId

    return RunRecord(RunId("test-run"), "tasks", "toy", 2, SecretStr("s"))


def test_deadlines_grow_with_the_nodes(toy: Any) -> None:
    few, many = (launch_times(toy.ask(stages=stages), same_host=False, lag_s=3.0) for stages in (1, 10))
    assert many.launch - few.launch >= 9 * 4.5
    assert many.release_each >= 3
    assert many.settle == 3.0
    assert launch_times(toy.request, same_host=True).release == toy.request.stop_grace_s + 15
