"""Which offer is taken under a cap, and what is said where none fits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myelin.cluster.provider import Offer
from myelin.cluster.quote import HEADROOM, Quote, choose, dollars
from myelin.errors import ProviderError
from myelin.values import NodeId

DEAR, CHEAP = Offer("dear", "p", "", dollars_per_hour=1.0), Offer("cheap", "p", "", dollars_per_hour=0.3)


def test_the_best_is_taken_where_there_is_no_cap() -> None:
    assert choose([DEAR, CHEAP], "p", 5.0, 3, 0.0) is DEAR


def test_each_node_is_left_its_share() -> None:
    assert choose([DEAR, CHEAP], "p", 0.0, 2, 2.0) is DEAR
    assert choose([DEAR, CHEAP], "p", 0.0, 2, 1.5) is CHEAP


def test_what_does_not_fit_is_refused_with_what_it_would_cost() -> None:
    with pytest.raises(
        ProviderError, match=r"cost \$0\.90/h at the provider p, more than the cap of \$0\.80/h"
    ) as raised:
        choose([DEAR, CHEAP], "p", 0.0, 3, 0.8)
    assert raised.value.reason == "cost-cap"


@given(st.lists(st.lists(st.floats(0.01, 10), min_size=1, max_size=4), min_size=1, max_size=5), st.floats(0.01, 30))
def test_a_run_never_comes_to_more_than_its_cap(prices: list[list[float]], cap: float) -> None:
    committed = 0.0
    for left, of_node in zip(range(len(prices), 0, -1), prices, strict=True):
        offers = [Offer(str(n), "p", "", dollars_per_hour=price) for n, price in enumerate(of_node)]
        try:
            committed += choose(offers, "p", committed, left, cap).dollars_per_hour
        except ProviderError:
            break
        assert committed <= cap + 1e-6


def test_a_quote_adds_up_and_has_headroom() -> None:
    quote = Quote("p", ((NodeId("stage-0"), DEAR), (NodeId("stage-1"), CHEAP)))
    assert quote.dollars_per_hour == 1.3
    assert quote.ceiling(0.0) == 1.3 * HEADROOM
    assert quote.ceiling(1.4) == 1.4
    assert Quote("p").dollars_per_hour == 0


@pytest.mark.parametrize(
    ("amount", "text"),
    [(0, "$0.00"), (0.0004, "under $0.001"), (0.0042, "$0.004"), (0.05, "$0.050"), (0.42, "$0.42"), (12.3, "$12.30")],
)
def test_money_as_people_write_it(amount: float, text: str) -> None:
    assert dollars(amount) == text
