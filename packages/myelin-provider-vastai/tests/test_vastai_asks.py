"""Which machines may be rented, and which is best."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myelin.plugin import Need, NodeId
from myelin_provider_vastai.asks import (
    Ask,
    as_offer,
    ask_of,
    expected_price,
    gpu_names,
    in_turn,
    machine_of,
    memory_bytes,
    misfit,
    ranked,
    read_ask,
    search_query,
)
from myelin_provider_vastai.section import VastaiSection
from myelin_testkit.fake_vastai import offer

NEED = Need(NodeId("stage-0"), 4_000_000_000, "triton")


def ask(number: int = 0, **changes: Any) -> Ask:
    found = read_ask(offer(number, **changes))
    assert found is not None
    return found


def section(**changes: Any) -> VastaiSection:
    return VastaiSection.model_validate(changes)


REFUSALS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # reason: what the setting asks for, what the machine has
    "another GPU": ({"gpu_name": "RTX_4090, H100 SXM"}, {}),
    "another number of GPUs": ({"num_gpus": 2}, {}),
    "too little GPU memory": ({"min_gpu_ram_gb": 40}, {}),
    "too little memory for the stage": ({}, {"gpu_ram": 2000}),
    "compute capability too low": ({"min_compute_cap": 8.9}, {}),
    "CUDA too old": ({}, {"cuda_max_good": 11.8}),
    "download too slow": ({"min_download_mbps": 900}, {}),
    "upload too slow": ({"min_upload_mbps": 900}, {}),
    "not reliable enough": ({"min_reliability": 0.995}, {}),
    "too few open ports": ({}, {"direct_port_count": 1}),
    "not verified": ({}, {"verification": "unverified"}),
    "too dear": ({"max_dollars_per_hour": 0.1}, {}),
    "its machine is blocked": ({"blocked_machines": [7, 100]}, {}),
    "its host is blocked": ({"blocked_hosts": [10]}, {}),
    "it is rented": ({}, {"rentable": False}),
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_each_filter_refuses_for_its_own_reason(reason: str) -> None:
    settings, machine = REFUSALS[reason]
    assert misfit(ask(), NEED, section()) == ""
    assert misfit(ask(**machine), NEED, section(**settings)) == reason


@pytest.mark.parametrize(
    ("settings", "name", "filter_"),
    [
        ({"gpu_name": "RTX_3090"}, "gpu_name", {"eq": "RTX 3090"}),
        ({"gpu_name": "RTX 3090,RTX 4090"}, "gpu_name", {"in": ["RTX 3090", "RTX 4090"]}),
        ({"min_gpu_ram_gb": 8}, "gpu_ram", {"gte": 8000.0}),
        ({"min_compute_cap": 8.6}, "compute_cap", {"gte": 860}),
        ({"min_cuda": 12.6}, "cuda_max_good", {"gte": 12.6}),
        ({"min_download_mbps": 100}, "inet_down", {"gte": 100.0}),
        ({"min_upload_mbps": 100}, "inet_up", {"gte": 100.0}),
        ({"min_reliability": 0.9}, "reliability2", {"gte": 0.9}),
        ({"max_dollars_per_hour": 0.5}, "dph_total", {"lte": 0.5}),
        ({"disk_gb": 20}, "allocated_storage", 20.0),
        ({}, "verified", {"eq": True}),
        ({}, "rentable", {"eq": True}),
    ],
)
def test_the_service_is_asked_to_filter(settings: dict[str, Any], name: str, filter_: object) -> None:
    assert search_query(section(**settings))[name] == filter_


def test_a_setting_that_is_zero_is_no_filter() -> None:
    query = search_query(section(verified=False, min_cuda=0, min_direct_ports=0))
    assert query.keys() == {"rentable", "num_gpus", "order", "type", "limit", "allocated_storage"}


def test_an_offer_that_failed_excludes_its_machine() -> None:
    failed = as_offer(ask(), "triton").id
    assert (ask_of(failed), machine_of(failed)) == (1000, 100)
    again = ask(id=5555)  # the same machine under another ask
    assert misfit(again, replace(NEED, exclude=frozenset({failed})), section()) == "it failed before"
    assert misfit(ask(1), replace(NEED, exclude=frozenset({failed, "local"})), section()) == ""


def test_the_cheaper_comes_first_and_a_slow_line_costs() -> None:
    cheap, dear = ask(1, dph_total=0.2), ask(2, dph_total=0.3)
    assert ranked([dear, cheap], NEED, section()) == [cheap, dear]
    # 8 GB at 10 Mbit/s take 1.8 hours: nearly three times the price.
    crawling = ask(1, dph_total=0.2, inet_down=10.0)
    assert ranked([crawling, dear], NEED, section()) == [dear, crawling]
    assert expected_price(crawling, 4_000_000_000) == pytest.approx(0.2 * (1 + 64e9 / 10e6 / 3600) / 0.99)


def test_engines_need_their_own_memory() -> None:
    assert memory_bytes(ask(num_gpus=2), "triton") == 49_152_000_000
    assert memory_bytes(ask(), "cpu") == 64_000_000_000
    assert memory_bytes(ask(cpu_ram=None), "cpu") == 0
    assert misfit(ask(cpu_ram=None), replace(NEED, engine="cpu"), section()) == ""


def test_machines_shown_to_others_come_last() -> None:
    first, second, third = ask(1), ask(2), ask(3)
    assert in_turn([first, second, third], {first.machine}) == [second, third, first]
    assert in_turn([first, second], {first.machine, second.machine}) == [first, second]


def test_names_are_spelled_as_the_service_spells_them() -> None:
    assert gpu_names(" RTX_3090 ,, H100  SXM") == ("RTX 3090", "H100 SXM")
    assert gpu_names("") == ()


json_values = st.none() | st.booleans() | st.integers(-9, 9**9) | st.floats(allow_nan=False) | st.text(max_size=5)


@given(st.dictionaries(st.sampled_from(sorted(offer(0))), json_values))
def test_any_offer_is_read_or_left_out(document: dict[str, Any]) -> None:
    found = read_ask(document)
    if found is not None:
        assert found.price >= 0
        assert machine_of(found.offer_id) == found.machine
        assert isinstance(misfit(found, NEED, section()), str)


@given(st.lists(st.builds(ask, st.integers(0, 50), dph_total=st.floats(0.01, 9), inet_down=st.floats(1, 9000))))
def test_ranking_keeps_what_fits_in_order(asks: list[Ask]) -> None:
    best = ranked(asks, NEED, section(max_dollars_per_hour=4))
    assert all(each.price <= 4 for each in best)
    assert len(best) == sum(each.price <= 4 for each in asks)
    prices = [expected_price(each, NEED.memory_bytes) for each in best]
    assert prices == sorted(prices)
