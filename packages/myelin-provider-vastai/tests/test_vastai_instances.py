"""Reading machines, and what their states mean."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myelin_provider_vastai.instances import (
    DEAD_STATES,
    HELD_STATES,
    Instance,
    Stand,
    judge,
    mapped_address,
    read_instance,
    ssh_addresses,
)

RUNNING = {
    "id": 77,
    "machine_id": 5,
    "actual_status": "running",
    "label": "myelin.1.run.stage-0.1.5-m6",
    "dph_total": 0.25,
    "public_ipaddr": " 203.0.113.7\n",
    "ports": {"22/tcp": [{"HostIp": "0.0.0.0", "HostPort": "40022"}], "25000/tcp": [{"HostPort": "41000"}]},
    "ssh_host": "ssh4.vast.ai",
    "ssh_port": 17077,
    "start_date": None,
}


def read(**changes: Any) -> Instance:
    instance = read_instance({**RUNNING, **changes})
    assert instance is not None
    return instance


def test_a_running_machine() -> None:
    instance = read()
    assert instance.label is not None
    assert str(instance.label.key) == "run.stage-0.1"
    assert mapped_address(instance, 25000) == ("203.0.113.7", 41000)
    assert (instance.price, instance.machine) == (0.25, 5)


def test_each_ssh_host_keeps_its_own_port() -> None:
    assert ssh_addresses(read()) == (("203.0.113.7", 40022), ("ssh4.vast.ai", 17077))
    assert ssh_addresses(read(ports=None)) == (("ssh4.vast.ai", 17077),)
    assert ssh_addresses(read(ssh_host=None)) == (("203.0.113.7", 40022),)
    assert ssh_addresses(read(ports=None, ssh_port=None)) == ()


@pytest.mark.parametrize(
    "ports", [None, {}, {"22/tcp": None}, {"22/tcp": []}, {"22/tcp": [{}]}, {"22/tcp": [{"HostPort": ""}]}, 7]
)
def test_odd_port_maps_map_nothing(ports: object) -> None:
    assert read(ports=ports).ports == {}


FAR = {"elapsed_s": 9999.0, "timeout_s": 1800.0, "was_seen": True}
EARLY = {"elapsed_s": 5.0, "timeout_s": 1800.0, "was_seen": True}


@pytest.mark.parametrize("status", [None, "created", "loading", "rebooting"])
def test_on_its_way_is_waited_for_until_the_deadline(status: str | None) -> None:
    assert judge(read(actual_status=status), **EARLY).stand is Stand.WAIT
    late = judge(read(actual_status=status), **FAR)
    assert late.stand is Stand.FAILED
    assert "1800 s" in late.reason


@pytest.mark.parametrize("status", sorted(DEAD_STATES | HELD_STATES))
def test_dead_and_held_states_fail_at_once_and_say_which(status: str) -> None:
    verdict = judge(read(actual_status=status, status_msg="some cause"), **EARLY)
    assert verdict.stand is Stand.FAILED
    assert status in verdict.reason
    assert "some cause" in verdict.reason


def test_outbid_is_said_to_be_billed() -> None:
    assert "billed" in judge(read(actual_status="stopped"), **EARLY).reason


def test_a_container_that_cannot_start_is_fatal_though_its_state_is_not() -> None:
    message = "Error response from daemon: OCI runtime create failed: unable to start"
    assert judge(read(actual_status="created", status_msg=message), **EARLY).stand is Stand.FAILED
    assert judge(read(actual_status="loading", status_msg="Pulling fs layer"), **EARLY).stand is Stand.WAIT
    assert judge(read(actual_status="running", status_msg="success, running image"), **EARLY).stand is Stand.RUNS


def test_a_listing_may_lag_behind_a_rent_but_not_vanish() -> None:
    assert judge(None, elapsed_s=5, timeout_s=60, was_seen=False).stand is Stand.WAIT
    assert judge(None, elapsed_s=99, timeout_s=60, was_seen=False).stand is Stand.FAILED
    assert "vanished" in judge(None, elapsed_s=5, timeout_s=60, was_seen=True).reason


odd = st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.lists(st.integers(), max_size=2)


@given(st.dictionaries(st.sampled_from(sorted(RUNNING)), odd), st.booleans())
def test_any_machine_is_read_or_refused_and_judged(changes: dict[str, Any], was_seen: bool) -> None:
    instance = read_instance({**RUNNING, **changes})
    if instance is not None:
        assert judge(instance, elapsed_s=1, timeout_s=2, was_seen=was_seen).reason
        assert all(port > 0 for _, port in ssh_addresses(instance))
    else:
        assert not isinstance(changes["id"], int) or isinstance(changes["id"], bool)
