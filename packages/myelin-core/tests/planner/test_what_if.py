"""What-if arithmetic, by tables, and the choice of machines."""

from __future__ import annotations

import pytest

from myelin.errors import PlanError
from myelin.model.architecture import Hyperparameters, describe
from myelin.model.facts import ModelFacts
from myelin.model.gguf import read_facts
from myelin.model.local import open_files
from myelin.planner import cost
from myelin.planner.pipeline import plan_pipeline
from myelin.planner.run_plan import NodeCapacity, PlanRequest, RunPlan
from myelin.planner.what_if import (
    ALL_SETS_UP_TO,
    Machine,
    dollars_per_million_tokens,
    forecast,
    link_seconds,
    machine_sets,
    what_if,
)
from myelin_testkit.synthetic import Recipe, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelFacts, Hyperparameters]:
    files = open_files(write_model(Recipe(n_layers=4), tmp_path_factory.mktemp("m") / "m.gguf")[0])
    facts = read_facts(files)
    files[0].close()
    return facts, describe(facts)


def planned(model: tuple[ModelFacts, Hyperparameters], nodes: tuple[NodeCapacity, ...], context: int = 64) -> RunPlan:
    facts, parameters = model
    return plan_pipeline(PlanRequest(facts, parameters, "m", nodes, max_context=context, max_sequences=4))


@pytest.mark.parametrize(
    ("latency", "bandwidth", "size", "seconds"),
    [(0.0, 0.0, 1000, 0.0), (0.02, 0.0, 1000, 0.02), (0.02, 1000.0, 500, 0.52), (0.0, 1e9, 0, 0.0)],
)
def test_a_link_takes_its_latency_and_the_transfer(latency: float, bandwidth: float, size: int, seconds: float) -> None:
    assert link_seconds(Machine("m", 1, 1.0, latency, bandwidth), size) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("price", "rate", "dollars"), [(0.36, 100.0, 1.0), (0.0, 5.0, 0.0), (3.6, 1.0, 1000.0), (0.72, 200.0, 1.0)]
)
def test_dollars_for_a_million_tokens(price: float, rate: float, dollars: float) -> None:
    assert dollars_per_million_tokens(price, rate) == pytest.approx(dollars)


def test_a_forecast_adds_up_stages_and_links(model: tuple[ModelFacts, Hyperparameters]) -> None:
    facts, parameters = model
    machines = (Machine("a", 10**9, 1e9, 0.010, 0.0, 0.5), Machine("b", 10**9, 2e9, 0.030, 0.0, 0.22))
    plan = planned(model, tuple(NodeCapacity(m.name, m.memory_bytes, m.bandwidth) for m in machines))  # type: ignore[arg-type]  # a name is a node id
    layout = cost.weight_layout(facts, parameters)
    stages = [
        cost.bytes_read_per_token(layout, *stage.layers) / machine.bandwidth
        for stage, machine in zip(plan.stages, machines, strict=True)
    ]
    found = forecast(facts, parameters, machines, plan)
    assert found.stage_seconds == pytest.approx(stages)
    assert found.token_seconds == pytest.approx(sum(stages) + 0.040)
    assert found.tokens_per_second == pytest.approx(1 / found.token_seconds)
    assert found.batch_tokens_per_second == pytest.approx(4 / found.token_seconds)
    assert found.dollars_per_hour == pytest.approx(0.72)
    assert found.dollars_per_million == pytest.approx(200 * found.token_seconds)


def test_a_lone_machine_has_no_link(model: tuple[ModelFacts, Hyperparameters]) -> None:
    machine = Machine("a", 10**9, 1e9, 9.0)
    (found,) = what_if(*model, [machine], lambda nodes: planned(model, nodes))
    assert found.token_seconds < 1


def test_only_what_holds_the_model_is_ranked(model: tuple[ModelFacts, Hyperparameters]) -> None:
    whole = planned(model, (NodeCapacity("x", 0),)).stages[0].memory_bytes  # type: ignore[arg-type]  # a node id
    small = Machine("small", int(0.75 * whole), 1e9, 0.001, 0.0, 0.1)
    large = Machine("large", 2 * whole, 1e8, 0.001, 0.0, 0.1)
    found = what_if(*model, [small, large, small], lambda nodes: planned(model, nodes))
    names = [tuple(machine.name for machine in one.machines) for one in found]
    assert ("small",) not in names
    assert ("large",) in names
    assert [one.token_seconds for one in found] == sorted(one.token_seconds for one in found)
    with pytest.raises(PlanError, match="does not fit"):
        what_if(*model, [Machine("tiny", 1000, 1e9)], lambda nodes: planned(model, nodes))


def test_every_set_of_few_machines_is_tried_and_a_few_of_many() -> None:
    few = [Machine(f"m{n}", 10**9 + n, 1e9) for n in range(ALL_SETS_UP_TO)]
    assert len(set(machine_sets(few))) == 2**ALL_SETS_UP_TO - 1
    many = [Machine(f"m{n}", 10**9 + n, 1e9 - n, 0.0, 0.0, n) for n in range(40)]
    sets = set(machine_sets(many))
    assert len(sets) <= 4 * 40
    assert tuple(many) in sets
    for chosen in sets:
        numbers = [int(machine.name[1:]) for machine in chosen]
        assert numbers == sorted(numbers)


def test_a_set_keeps_the_order_in_which_the_machines_were_given() -> None:
    """They are a chain, and each has its own link to the next."""
    machines = [Machine(name, 10**9, 1e9) for name in "cab"]
    assert [tuple(m.name for m in chosen) for chosen in machine_sets(machines)][-1] == ("c", "a", "b")
