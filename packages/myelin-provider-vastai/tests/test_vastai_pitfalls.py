"""Every trap of the service that we know of, sprung by the fake: what is rented, what is said, what is left."""

from __future__ import annotations

import asyncio
import json
import os
import time
from contextlib import suppress
from itertools import pairwise

import psutil
import pytest

from myelin.plugin import LeaseState, ProviderError
from myelin_provider_vastai.scripts import HEARTBEAT, boot_command
from myelin_testkit.fake_vastai import SPACING_S, Trouble, kind_of_call, offer


async def test_a_504_after_the_machine_was_made_rents_no_second_one(rig, fake):
    fake.next_machines(Trouble(answer="created-504"))
    provider = rig.provider()
    lease = await rig.running(provider)
    assert [rented.id for rented in fake.rented] == [int(lease.id)]
    assert len(fake.requests("PUT", "/api/v0/asks/.*")) == 1


async def test_a_504_and_no_machine_is_an_error_and_one_create(rig, fake):
    fake.next_machines(Trouble(answer="lost-504"))
    with pytest.raises(ProviderError) as caught:
        await rig.rent(rig.provider())
    assert caught.value.reason == "doubtful"
    assert len(fake.requests("PUT", "/api/v0/asks/.*")) == 1
    assert fake.rented == []


async def test_a_machine_that_turns_up_late_after_a_504_is_destroyed(rig, fake):
    fake.next_machines(Trouble(answer="created-504", listed_after_s=float("inf")))
    provider = rig.provider()
    with pytest.raises(ProviderError):
        await rig.rent(provider)
    fake.rented[0].trouble = Trouble()  # now it turns up
    second = await rig.rent(provider, attempt=2)  # as the executor would, with an attempt of its own

    async def one_is_left():
        await provider.leases()
        return len(fake.live()) == 1

    await rig.until(one_is_left)
    assert [str(rented.id) for rented in fake.live()] == [second.id]


async def test_a_connection_cut_after_the_machine_was_made_rents_no_second_one(rig, fake):
    fake.next_machines(Trouble(answer="broken"))
    lease = await rig.rent(rig.provider())
    assert [rented.id for rented in fake.rented] == [int(lease.id)]


async def test_after_a_doubtful_create_an_unreadable_list_is_an_error(rig, fake):
    fake.next_machines(Trouble(answer="created-504"))
    provider = rig.provider()
    offers = await provider.offers(rig.need())
    await provider.leases()
    create = fake._create

    def then_unreadable(*arguments):
        fake.list_faults.extend(["deprecated"] * 12)
        return create(*arguments)

    fake._create = then_unreadable
    with pytest.raises(ProviderError):
        await provider.launch(offers[0], rig.boot(rig.key()), key=rig.key())
    fake._create = create
    fake.list_faults.clear()
    # The next listing that can be read shows it, and it goes.

    async def none_is_left():
        return not await provider.leases()

    await rig.until(none_is_left)
    assert fake.live() == []


async def test_an_error_with_a_machine_is_an_error_and_the_machine_goes(rig, fake):
    fake.next_machines(Trouble(answer="error-and-contract"))
    with pytest.raises(ProviderError, match="an error and a machine"):
        await rig.rent(rig.provider())
    assert len(fake.rented) == 1
    assert fake.live() == []


async def test_creates_ask_not_to_be_left_stopped_and_billed(rig, fake):
    await rig.rent(rig.provider())
    (request,) = fake.requests("PUT", "/api/v0/asks/.*")
    body = json.loads(request.body)
    assert body["cancel_unavail"] is True
    assert body["runtype"] == "ssh_direc ssh_proxy"
    assert body["disk"] >= 8
    assert body["label"].startswith(f"myelin.1.{rig.run}.stage-0.1.")


async def test_two_launches_of_one_offer_take_two_machines(rig, fake):
    provider = rig.provider()
    (best, *_) = await provider.offers(rig.need())
    keys = [rig.key(0), rig.key(1)]
    leases = await asyncio.gather(*(provider.launch(best, rig.boot(key), key=key) for key in keys))
    assert leases[0].offer == best.id
    assert [rented.machine_id for rented in fake.rented] == [100, 101]
    assert [lease.dollars_per_hour for lease in leases] == pytest.approx([0.2, 0.21])


async def test_an_offer_that_another_node_has_is_not_rented_twice(rig, fake):
    fake.offers = [offer(0)]
    provider = rig.provider()
    (best, *_) = await provider.offers(rig.need())
    keys = [rig.key(0), rig.key(1)]
    results = await asyncio.gather(
        *(provider.launch(best, rig.boot(key), key=key) for key in keys), return_exceptions=True
    )
    assert [getattr(result, "reason", "leased") for result in results] == ["leased", "offer-taken"]
    assert len(fake.rented) == 1


async def test_nodes_are_shown_different_machines_first(rig, fake):
    provider = rig.provider()
    firsts = [(await provider.offers(rig.need(node)))[0].id for node in range(4)]
    assert len(set(firsts)) == 4
    assert (await provider.offers(rig.need(0)))[0].id == firsts[0]
    assert len(fake.requests("POST", "/api/v0/bundles/")) == 1


async def test_a_lost_race_for_an_ask_ends_the_node_and_excludes_its_machine(rig, fake):
    fake._pace = 0.0  # two who share an account don't keep each other's pace
    other, ours = rig.provider(run="other-run"), rig.provider()
    (best, *_) = await ours.offers(rig.need())
    await other.launch(best, rig.boot(rig.key()), key=rig.key(7))
    lease = await ours.launch(best, rig.boot(rig.key()), key=rig.key())
    assert "exited" in await rig.exited(ours, lease)
    assert best.details["machine"] not in [each.details["machine"] for each in await ours.offers(rig.need(1))]


@pytest.mark.parametrize("status", ["404", "410", "400"])
async def test_an_offer_that_was_taken(rig, fake, status):
    fake.next_machines(Trouble(answer=f"no_such_ask-{status}"))
    provider = rig.provider()
    (best, *_) = await provider.offers(rig.need())
    with pytest.raises(ProviderError) as caught:
        await rig.rent(provider)
    assert caught.value.reason == "offer-taken"
    assert best.id not in [each.id for each in await provider.offers(rig.need())]
    assert fake.rented == []


async def test_outbid_is_seen_and_said(rig, fake):
    provider = rig.provider()
    lease = await rig.running(provider)
    fake.outbid(fake.rented[0])
    assert "outbid" in await rig.exited(provider, lease)
    await provider.release(lease.id)
    assert fake.live() == []


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        (Trouble(state="created", message="OCI runtime create failed: bad device"), "OCI runtime create failed"),
        (Trouble(state="exited"), "exited"),
        (Trouble(state="unknown"), "unknown"),
        (Trouble(state="offline"), "offline"),
        (Trouble(state="stopped"), "stopped"),
        (Trouble(state="frozen"), "frozen"),
        (Trouble(vanishes_after_s=0.4), "vanished"),
    ],
)
async def test_a_machine_that_will_not_run(rig, fake, trouble, said):
    fake.next_machines(trouble)
    provider = rig.provider()
    lease = await rig.rent(provider)
    assert said in await rig.exited(provider, lease)
    await provider.release(lease.id)
    assert (fake.live(), await provider.leases()) == ([], ())


async def test_loading_for_ever_has_a_deadline(rig, fake):
    fake.next_machines(Trouble(state="loading"))
    provider = rig.provider(ready_timeout_s=0.6)
    assert "still loading after 0.6 s" in await rig.exited(provider, await rig.rent(provider))


async def test_ssh_that_never_answers_has_a_deadline_and_its_machine_is_not_used_again(rig, fake):
    fake.next_machines(Trouble(ssh=False))
    provider = rig.provider(ssh_timeout_s=0.6)
    lease = await rig.rent(provider)
    assert "SSH was not ready in 0.6 s" in await rig.exited(provider, lease)
    machine = lease.offer.partition("-m")[2]
    assert machine not in [each.details["machine"] for each in await provider.offers(rig.need())]


async def test_ssh_that_answers_late_is_waited_for(rig, fake):
    fake.next_machines(Trouble(ssh_after_s=0.8))
    await rig.running(rig.provider())


async def test_the_key_is_registered_once_and_attached_to_each_machine(rig, fake, identity):
    provider = rig.provider()
    await asyncio.gather(*(rig.running(provider, node) for node in range(2)))
    public = identity.with_suffix(".pub").read_text().split()[:2]
    assert [key.split()[:2] for key in fake.ssh_keys] == [public]
    attached = [each for each in fake.requests("POST", r"/api/v0/instances/\d+/ssh/") if each.status == 200]
    assert len(attached) == 2
    fake._pace = 0.0  # two who share an account don't keep each other's pace
    await rig.rent(rig.provider(), node=2)
    assert len(fake.ssh_keys) == 1


async def test_without_mapped_ports_ssh_goes_by_the_proxy_and_carries_the_worker(rig, fake):
    fake.next_machines(Trouble(mapped=False))
    provider = rig.provider()
    lease = await rig.running(provider)
    assert "SSH answers at 127.0.0.2:" in await rig.log_text(provider, lease)
    assert lease.endpoint is not None
    host, _, port = lease.endpoint.candidates[0].rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.close()
    await writer.wait_closed()


async def test_the_mapped_port_is_the_endpoint(rig, fake):
    lease = await rig.running(rig.provider())
    (inside,) = set(fake.rented[0].machine.ports) - {22}
    assert lease.endpoint is not None
    assert lease.endpoint.candidates == (f"127.0.0.1:{fake.rented[0].machine.ports[inside]}",)


async def test_the_login_is_kept_out_of_tmux(rig, fake):
    await rig.running(rig.provider())
    assert (fake.rented[0].machine.folder / ".no_auto_tmux").exists()


async def test_a_machine_with_old_cuda_is_not_offered(rig, fake):
    fake.offers = [offer(1, cuda_max_good=11.8), offer(2, cuda_max_good=12.8)]
    assert [each.details["machine"] for each in await rig.provider().offers(rig.need())] == ["102"]


@pytest.mark.parametrize("fault", ["deprecated", "500", "html", "empty-object"])
async def test_a_list_that_cannot_be_read_is_unknown_and_never_empty(rig, fake, fault):
    fake.list_faults.extend([fault] * 50)
    provider = rig.provider()
    with pytest.raises(ProviderError):
        await provider.leases()
    with pytest.raises(ProviderError):
        await rig.rent(provider)  # a rent that can't see what is rented already isn't made
    assert fake.rented == []


async def test_a_list_that_fails_once_is_asked_again(rig, fake):
    fake.list_faults.extend(["500", "html"])
    assert await rig.provider().leases() == ()


async def test_a_list_that_cannot_be_read_when_a_worker_announces_itself_costs_no_machine(rig, fake, monkeypatch):
    provider = rig.provider()
    lease = await rig.rent(provider)
    node, inventory = provider._nodes[rig.key()], provider._inventory
    listing, faults = inventory.listing, [ProviderError("not now")]

    async def unreadable(**more):
        if node._announced.is_set() and asyncio.current_task() is node._life and faults:
            raise faults.pop()
        return await listing(**more)

    monkeypatch.setattr(inventory, "listing", unreadable)
    assert (await rig.wait(provider, lease)).state is LeaseState.RUNNING
    assert faults == []


async def test_a_run_that_is_begun_again_finds_its_machines(rig, fake):
    fake._pace = 0.0  # two who share an account don't keep each other's pace
    first = rig.provider()
    leases = [await rig.rent(first, node) for node in range(2)]
    fake.foreign = 60  # several pages, of machines that aren't ours
    again = rig.provider()
    found = {lease.id: lease for lease in await again.leases()}
    assert {lease.id: lease.key for lease in leases} == {lease.id: lease.key for lease in found.values()}
    # Launching the same keys takes what is there.
    (best, *_) = await again.offers(rig.need())
    for lease in leases:
        assert (await again.launch(best, rig.boot(lease.key), key=lease.key)).id == lease.id
    assert len(fake.rented) == 2
    await asyncio.gather(*(again.release(lease) for lease in found))
    assert fake.live() == []


async def test_what_is_not_of_this_run_is_never_touched(rig, fake):
    fake.foreign = 3
    fake._pace = 0.0  # two who share an account don't keep each other's pace
    stranger = await rig.rent(rig.provider(run="other-run"), node=1)  # its label names the key's own run
    provider = rig.provider(run="a-third-run")
    assert await provider.leases() == ()
    for lease in (stranger.id, "0", "1", "123456", "no number", ""):
        await provider.release(lease)
    assert fake.requests("DELETE", ".*") == []


async def test_a_destroy_that_does_nothing_is_noticed_and_repeated(rig, fake):
    fake.next_machines(Trouble(deaf_destroys=1))
    provider = rig.provider()
    lease = await rig.rent(provider)
    await provider.release(lease.id)
    assert fake.live() == []
    assert len(fake.requests("DELETE", ".*")) >= 2


async def test_a_destroy_that_never_does_is_an_error_that_says_so(rig, fake):
    fake.next_machines(Trouble(deaf_destroys=10_000))
    provider = rig.provider(destroy_timeout_s=0.5)
    lease = await rig.rent(provider)
    with pytest.raises(ProviderError, match="could not be shown to be destroyed") as caught:
        await provider.release(lease.id)
    assert "billed" in caught.value.hint
    assert lease.id in [each.id for each in await provider.leases()]


async def test_a_machine_is_not_released_while_the_list_cannot_be_read(rig, fake):
    provider = rig.provider(destroy_timeout_s=0.5)
    lease = await rig.rent(provider)
    fake.list_faults.extend(["deprecated"] * 500)
    with pytest.raises(ProviderError):
        await provider.release(lease.id)
    fake.list_faults.clear()
    provider._section = rig.section()  # with time enough for the machine to end
    await provider.release(lease.id)
    assert fake.live() == []


@pytest.mark.parametrize("told", ["", "0.05"])
async def test_too_many_calls_are_waited_for(rig, fake, told):
    fake._pace = 0.0  # so that no other call is one too many, however unevenly a loaded machine delivers them
    fake.too_often.extend([told] * 3)
    await rig.running(rig.provider())
    assert [request.status for request in fake.seen].count(429) == 3


async def test_our_own_pace_is_never_too_fast(rig, fake, monkeypatch):
    """As we send; how evenly calls then arrive is a matter of who carries them."""
    fake._pace = 0.0
    provider = rig.provider(call_spacing=0.05)
    sent, send = [], provider._api._send

    def noted(method, path, *more):
        sent.append((kind_of_call(method, path), time.monotonic()))
        return send(method, path, *more)

    monkeypatch.setattr(provider._api, "_send", noted)
    await asyncio.gather(*(rig.rent(provider, node) for node in range(4)))
    leases = await provider.leases()
    await asyncio.gather(*(provider.release(lease.id) for lease in leases))
    for kind, seconds in SPACING_S.items():
        times = [time for of, time in sent if of == kind]
        assert all(after - before >= 0.05 * seconds for before, after in pairwise(times)), kind
    assert {"create", "destroy", "list", "ssh", "search"} <= {kind for kind, _ in sent}
    assert (len(fake.rented), fake.live()) == (4, [])


async def test_calls_that_are_refused_for_ever_end(rig, fake):
    fake.too_often.extend([""] * 100)
    with pytest.raises(ProviderError) as caught:
        await rig.provider().offers(rig.need())
    assert caught.value.reason == "rate-limited"
    assert len(fake.seen) < 10


async def test_the_search_quota_is_not_waited_for(rig, fake):
    fake.search_quota_exceeded = True
    with pytest.raises(ProviderError) as caught:
        await rig.provider().offers(rig.need())
    assert (caught.value.reason, "midnight" in caught.value.hint) == ("quota", True)
    assert len(fake.seen) == 1


async def test_a_bad_key_is_said_and_not_shown(rig, fake):
    provider = rig.provider(api_key="planted-wrong-key-4711")
    with pytest.raises(ProviderError) as caught:
        await provider.offers(rig.need())
    assert caught.value.reason == "bad-key"
    assert "4711" not in f"{caught.value!r} {caught.value.hint} {provider!r} {vars(provider)['_section']!r}"


async def test_a_changed_host_key_ends_the_node(rig, fake):
    from myelin_provider_vastai.ssh import HostKeyChanged, HostKeys, connect, load_identity

    provider = rig.provider()
    await rig.running(provider)
    machine = fake.rented[0].machine
    keys = HostKeys()
    own = load_identity(rig.identity, rig.identity.parent)
    address = ("127.0.0.1", machine.ports[22])
    user = rig.section().ssh_user
    for _ in range(2):
        connection = await connect(address, user, own, keys, 1)
        connection.close()
        await connection.wait_closed()
    machine.stop_sshd()
    machine.new_host_key()
    machine.start_sshd()
    with pytest.raises(HostKeyChanged):
        await connect(address, user, own, keys, 1)
    connection = await connect(address, user, own, keys, 2)  # another machine has a pin of its own
    connection.close()
    await connection.wait_closed()


async def test_a_lost_ssh_connection_is_made_again_and_the_worker_is_the_same(rig, fake):
    provider = rig.provider()
    lease = await rig.running(provider)
    before = workers(fake)
    fake.rented[0].machine.cut_connections()
    assert "lost: logging in again" in await rig.says(provider, lease, "SSH answers", 2)
    await asyncio.sleep(1)  # in which it would be told again
    (now,) = await provider.leases()
    assert (now.state, now.endpoint) == (LeaseState.RUNNING, (await rig.wait(provider, lease)).endpoint)
    assert workers(fake) == before
    log = await rig.log_text(provider, lease)
    assert log.count('"event": "listening"') == 1  # nothing is told twice
    assert log.count("SSH answers") == 2


async def test_a_forward_is_made_again_at_the_same_port(rig, fake):
    fake.next_machines(Trouble(mapped=False))
    provider = rig.provider()
    lease = await rig.running(provider)
    host, _, port = lease.endpoint.candidates[0].rpartition(":")
    fake.rented[0].machine.cut_connections()

    async def noticed():
        return "lost: logging in again" in await rig.log_text(provider, lease)

    async def answers():
        try:
            _, writer = await asyncio.open_connection(host, int(port))
        except OSError:
            return False
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        return True

    # Not dialled before: whoever dials while the old forward closes may meet CPython's issue 109564, a connection
    # that is accepted and never closed.
    await rig.until(noticed)
    assert await noticed()
    await rig.until(answers)
    assert await answers()


async def test_a_new_orchestrator_follows_the_worker_that_the_old_one_left(rig, fake):
    fake._pace = 0.0  # two who share an account don't keep each other's pace
    old = rig.provider()
    lease = await rig.running(old)
    before = workers(fake)
    await old.close()
    new = rig.provider()
    again = await rig.running(new)
    assert (again.id, again.endpoint) == (lease.id, lease.endpoint)
    assert workers(fake) == before
    listening = '"event": "listening"'
    assert listening in await rig.says(new, again, listening)  # its log from the beginning
    await new.release(again.id)
    assert (fake.live(), workers(fake)) == ([], [])


async def test_a_worker_whose_keeper_is_gone_ends(rig, fake):
    provider = rig.provider()
    lease = await rig.running(provider)
    keeper = int((fake.rented[0].machine.folder / ".myelin-node" / "keeper").read_text())
    psutil.Process(keeper).kill()
    assert "its worker ended" in await rig.exited(provider, lease)


def workers(fake):
    """The process ids of all workers on all machines."""
    found = []
    for rented in fake.rented:
        for process in rented.machine.processes():
            with suppress(psutil.Error):
                if "--boot-stdin" in process.cmdline():
                    found.append(process.pid)
    return found


async def test_the_dead_mans_switch_destroys_a_machine_that_nobody_uses(rig, fake):
    rig.first_dial_s = "5"  # nobody dials this worker: it ends by itself
    provider = rig.provider(dead_man_s=12.0)
    lease = await rig.running(provider)
    sign = fake.rented[0].machine.folder / HEARTBEAT

    def as_old_as(seconds):
        os.utime(sign, times=(time.time() - seconds,) * 2)

    as_old_as(6)

    async def renewed():
        return time.time() - sign.stat().st_mtime < 5

    await rig.until(renewed)
    assert await renewed()  # while the worker runs
    assert len(fake.live()) == 1
    await provider.close()  # the orchestrator is gone

    async def it_is_gone():
        if not workers(fake):
            as_old_as(20)  # nobody renews it any more
        return not fake.live()

    await rig.until(it_is_gone)
    assert [(str(rented.id), rented.destroyed_by) for rented in fake.rented] == [(lease.id, "machine")]


async def test_a_worker_that_ends_is_said_with_its_last_words(rig, fake):
    provider = rig.provider(setup="echo no space left >&2; false")
    reason = await rig.exited(provider, await rig.rent(provider))
    assert "status 97" in reason
    assert "setup of the node failed" in reason


async def test_a_worker_that_never_listens_has_a_deadline(rig, fake, monkeypatch):
    from myelin_provider_vastai import node

    provider = rig.provider(setup="sleep 100")

    def late(*arguments):
        """The machine is logged in to, and all but a second of the time was needed for that."""
        provider._nodes[rig.key()]._began = time.monotonic() - provider._section.ready_timeout_s + 1
        return boot_command(*arguments)

    monkeypatch.setattr(node, "boot_command", late)
    assert "did not listen within 90 s" in await rig.exited(provider, await rig.rent(provider))


async def test_released_means_that_the_worker_is_gone_too(rig, fake):
    provider = rig.provider()
    lease = await rig.running(provider)
    assert fake.rented[0].machine.processes()
    await provider.release(lease.id)

    async def silent():
        return not fake.rented[0].machine.processes()

    await rig.until(silent)
    assert fake.rented[0].machine.processes() == []
    assert await provider.leases() == ()


async def test_states_are_those_of_the_contract(rig, fake):
    provider = rig.provider()
    lease = await rig.rent(provider)
    assert (lease.state, lease.endpoint) == (LeaseState.STARTING, None)
    assert lease.dollars_per_hour == 0.2
    running = await rig.wait(provider, lease)
    assert (running.state, running.key, running.dollars_per_hour) == (LeaseState.RUNNING, rig.key(), 0.2)
