"""What would it be like on these machines? Plans for sets of nodes that need not exist, ranked.

The arithmetic is of decoding, which is bound by memory traffic: a node streams its stage's weights once for each
token, whatever the number of sequences in the batch. See ``docs/planning.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from myelin.errors import PlanError
from myelin.model.architecture import Hyperparameters
from myelin.model.facts import ModelFacts
from myelin.planner import cost
from myelin.planner.run_plan import NodeCapacity, RunPlan
from myelin.values import NodeId

ALL_SETS_UP_TO = 6
"""With so many nodes, every set of them is tried; with more, the first, the fastest, the largest and the cheapest of
each number."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A node that we could have.

    Attributes:
        name: What people call it.
        memory_bytes: What a stage may use.
        bandwidth: Bytes per second between its memory and what computes.
        link_seconds: How long a message is under way from it to the next node.
        link_bandwidth: Bytes per second of that link; 0 is unknown (not counted).
        dollars_per_hour: Its price; 0 is free.
    """

    name: str
    memory_bytes: int
    bandwidth: float
    link_seconds: float = 0.0
    link_bandwidth: float = 0.0
    dollars_per_hour: float = 0.0


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a plan on some machines would be like.

    Attributes:
        machines: The machines, in pipeline order.
        plan: The stages on them.
        stage_seconds: What a decoded token costs each stage.
        token_seconds: From one token to the next of a lone sequence, links included.
        tokens_per_second: Of a lone sequence.
        batch_tokens_per_second: Of ``max_sequences`` sequences at once, together.
        dollars_per_hour: All machines together.
        dollars_per_million: For a million tokens at ``tokens_per_second``.
        batch_dollars_per_million: At ``batch_tokens_per_second``.
    """

    machines: tuple[Machine, ...]
    plan: RunPlan
    stage_seconds: tuple[float, ...]
    token_seconds: float
    tokens_per_second: float
    batch_tokens_per_second: float
    dollars_per_hour: float
    dollars_per_million: float
    batch_dollars_per_million: float


def link_seconds(machine: Machine, record_bytes: int) -> float:
    """How long a record is under way from ``machine``: ``latency + bytes / bandwidth``."""
    transfer = record_bytes / machine.link_bandwidth if machine.link_bandwidth else 0.0
    return machine.link_seconds + transfer


def dollars_per_million_tokens(dollars_per_hour: float, tokens_per_second: float) -> float:
    """``dollars_per_hour / 3600 / tokens_per_second * 10^6``."""
    return dollars_per_hour / 3600.0 / tokens_per_second * 1e6


def forecast(facts: ModelFacts, parameters: Hyperparameters, machines: Sequence[Machine], plan: RunPlan) -> Forecast:
    """What ``plan``, whose stages are on ``machines`` in order, would be like.

    ``token_seconds = sum(stage bytes / memory bandwidth) + sum(links)``, with a link from each machine to the next, the
    last one's leading back to the head; a lone machine needs none. A batch costs no more memory traffic than a single
    token does, so ``batch_tokens_per_second = max_sequences / (sum(stages) + sum(links with a batch's records))``.
    """
    layout = cost.weight_layout(facts, parameters)
    stages = tuple(
        cost.stage_seconds(cost.bytes_read_per_token(layout, *stage.layers), machine.bandwidth)
        for stage, machine in zip(plan.stages, machines, strict=True)
    )

    def links(sequences: int) -> float:
        if len(machines) == 1:
            return 0.0
        rows = sequences * cost.activation_token_bytes(parameters)
        onward = sum(link_seconds(machine, rows) for machine in machines[:-1])
        return onward + link_seconds(machines[-1], sequences * cost.SAMPLE_BYTES)

    seconds = sum(stages) + links(1)
    together = plan.max_sequences / (sum(stages) + links(plan.max_sequences))
    price = sum(machine.dollars_per_hour for machine in machines)
    return Forecast(
        machines=tuple(machines),
        plan=plan,
        stage_seconds=stages,
        token_seconds=seconds,
        tokens_per_second=1.0 / seconds,
        batch_tokens_per_second=together,
        dollars_per_hour=price,
        dollars_per_million=dollars_per_million_tokens(price, 1.0 / seconds),
        batch_dollars_per_million=dollars_per_million_tokens(price, together),
    )


def what_if(
    facts: ModelFacts,
    parameters: Hyperparameters,
    machines: Sequence[Machine],
    plan: Callable[[tuple[NodeCapacity, ...]], RunPlan],
) -> list[Forecast]:
    """Forecasts for the sets of machines that hold the model, the fastest first (then the cheapest).

    Args:
        machines: In pipeline order, which every set keeps.
        plan: Plans the model on nodes.

    Raises:
        PlanError: No set holds it; the error is that of all machines together.
    """
    found: list[Forecast] = []
    seen: set[tuple[object, ...]] = set()
    problem: PlanError | None = None
    for chosen in machine_sets(machines):
        alike = tuple(
            (m.memory_bytes, m.bandwidth, m.link_seconds, m.link_bandwidth, m.dollars_per_hour) for m in chosen
        )
        if alike in seen:
            continue
        seen.add(alike)
        nodes = tuple(NodeCapacity(NodeId(m.name), m.memory_bytes, m.bandwidth) for m in chosen)
        try:
            found.append(forecast(facts, parameters, chosen, plan(nodes)))
        except PlanError as error:
            if problem is None or len(chosen) == len(machines):
                problem = error
    if not found and problem is not None:
        raise problem
    return sorted(found, key=lambda one: (one.token_seconds, one.dollars_per_hour, len(one.machines)))


def machine_sets(machines: Sequence[Machine]) -> Iterator[tuple[Machine, ...]]:
    """The sets of machines to try, each in the order of ``machines``; some may come twice."""
    numbers = range(len(machines))
    if len(machines) <= ALL_SETS_UP_TO:
        for size in range(1, len(machines) + 1):
            for chosen in combinations(numbers, size):
                yield tuple(machines[index] for index in chosen)
        return
    orders: Iterable[list[int]] = (
        list(numbers),
        sorted(numbers, key=lambda index: -machines[index].bandwidth),
        sorted(numbers, key=lambda index: -machines[index].memory_bytes),
        sorted(numbers, key=lambda index: machines[index].dollars_per_hour / machines[index].memory_bytes),
    )
    for order in orders:
        for size in range(1, len(machines) + 1):
            yield tuple(machines[index] for index in sorted(order[:size]))
