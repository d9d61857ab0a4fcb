"""The provider contract, money and secrets."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest
from pydantic import SecretStr

from myelin.plugin import Attempt, LaunchKey, NodeId, Offer, ProviderError, RunId
from myelin_provider_vastai.provider import account_key
from myelin_provider_vastai.ssh import load_identity
from myelin_testkit.fake_vastai import Trouble


async def test_the_same_key_twice_at_once_is_one_machine(rig, fake):
    provider = rig.provider()
    (best, *_) = await provider.offers(rig.need())
    both = await asyncio.gather(*(provider.launch(best, rig.boot(rig.key()), key=rig.key()) for _ in range(2)))
    assert both[0].id == both[1].id
    assert (await provider.launch(best, rig.boot(rig.key()), key=rig.key())).id == both[0].id
    assert len(fake.rented) == 1


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.03, 0.06, 0.1, 0.2])
async def test_a_cancelled_launch_leaves_nothing(rig, fake, after_s):
    provider = rig.provider()
    (best, *_) = await provider.offers(rig.need())
    launch = asyncio.create_task(provider.launch(best, rig.boot(rig.key()), key=rig.key()))
    await asyncio.sleep(after_s)
    launch.cancel()
    result = (await asyncio.gather(launch, return_exceptions=True))[0]
    if not isinstance(result, asyncio.CancelledError):
        await provider.release(result.id)
    assert fake.live() == []
    assert await provider.leases() == ()


async def test_one_of_two_launches_that_is_cancelled_leaves_the_other(rig, fake):
    provider = rig.provider()
    (best, *_) = await provider.offers(rig.need())
    one, other = (asyncio.create_task(provider.launch(best, rig.boot(rig.key()), key=rig.key())) for _ in range(2))
    await asyncio.sleep(0.01)
    one.cancel()
    assert (await other).id == str(fake.live()[0].id)


async def test_a_release_that_is_cancelled_goes_on(rig, fake):
    provider = rig.provider()
    lease = await rig.rent(provider)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.001):
            await provider.release(lease.id)
    await provider.close()
    assert fake.live() == []


async def test_releasing_twice_and_what_is_unknown_succeeds(rig, fake):
    provider = rig.provider()
    lease = await rig.rent(provider)
    await asyncio.gather(provider.release(lease.id), provider.release(lease.id))
    await provider.release(lease.id)
    await provider.release("999999")
    assert fake.live() == []


async def test_logs_follow_until_the_end(rig, fake):
    provider = rig.provider()
    lease = await rig.running(provider)

    async def everything() -> list[str]:
        return [line.text async for line in provider.logs(lease.id)]

    following = asyncio.create_task(everything())
    await rig.says(provider, lease, '"event": "listening"')
    await provider.release(lease.id)
    async with asyncio.timeout(60):
        lines = await following
    assert any('"event": "listening"' in line for line in lines)
    assert [line async for line in provider.logs("999999")] == []


async def test_excluded_offers_exclude_their_machines(rig, fake):
    provider = rig.provider()
    (best, *rest) = await provider.offers(rig.need())
    left = await provider.offers(rig.need(exclude=frozenset({best.id})))
    assert sorted(each.id for each in left) == sorted(each.id for each in rest)


async def test_nothing_that_fits_is_no_offer(rig, fake):
    assert await rig.provider(gpu_name="RTX 9090").offers(rig.need()) == ()


async def test_a_foreign_offer_is_refused(rig, fake):
    with pytest.raises(ProviderError) as caught:
        await rig.provider().launch(Offer("local", "process", "here"), rig.boot(rig.key()), key=rig.key())
    assert caught.value.reason == "no-offer"


async def test_whether_a_person_is_to_be_asked_is_said(rig):
    assert rig.provider().price_agreed is True
    assert rig.provider(confirm_lease=True).price_agreed is False


async def test_the_machines_of_all_runs_can_be_listed(rig, fake):
    fake._pace = 0.0  # two who share an account don't keep each other's pace
    mine, others = rig.provider(), rig.provider(run="another-run")
    first, second = (
        await rig.rent(mine),
        await others.launch(
            (await others.offers(rig.need(1)))[0],
            rig.boot(LaunchKey(RunId("another-run"), NodeId("stage-1"), Attempt(1))),
            key=LaunchKey(RunId("another-run"), NodeId("stage-1"), Attempt(1)),
        ),
    )
    assert {(lease.id, lease.key) for lease in await mine.all_leases()} == {
        (first.id, first.key),
        (second.id, second.key),
    }
    assert {lease.id for lease in await mine.leases()} == {first.id}


async def test_the_run_stays_below_its_cap_also_for_launches_at_once(rig, fake):
    provider = rig.provider(max_run_dollars_per_hour=0.42)
    results = await asyncio.gather(*(rig.rent(provider, node) for node in range(3)), return_exceptions=True)
    refused = [result for result in results if isinstance(result, ProviderError)]
    assert [error.reason for error in refused] == ["cost-cap"]
    assert len(fake.rented) == 2
    # What a crash has left counts as well.
    fake._pace = 0.0  # two who share an account don't keep each other's pace
    again = rig.provider(max_run_dollars_per_hour=0.42)
    with pytest.raises(ProviderError, match="above the cap"):
        await rig.rent(again, 5)


async def test_no_secret_is_where_it_should_not_be(rig, fake, caplog, tmp_path):
    caplog.set_level("DEBUG")
    provider = rig.provider(dead_man_s=60.0)
    lease = await rig.running(provider)
    commands = [" ".join(process.cmdline()) for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"]]
    log = await rig.log_text(provider, lease)
    await provider.release(lease.id)
    secrets = [*rig.planted, fake.api_key, fake.rented[0].key, "PRIVATE KEY"]
    texts = {
        "argv": "\n".join(commands),
        "log": log,
        "library logs": caplog.text,
        "reprs": f"{provider!r} {lease!r} {rig.section()!r} {provider._shop!r}",
        "requests": "".join(f"{request.path} {request.body}" for request in fake.seen),
        "machine": "".join(
            path.read_text(errors="replace")
            for path in tmp_path.rglob("*")
            if path.is_file() and path.name not in ("host_key", "id_ed25519")
        ),
    }
    assert any("--boot-stdin" in command for command in commands)
    assert [(place, secret) for place, text in texts.items() for secret in secrets if secret in text] == []


async def test_close_twice_is_fine(rig, fake):
    provider = rig.provider()
    await rig.rent(provider)
    await provider.close()
    await provider.close()
    assert len(fake.live()) == 1  # machines are not touched


async def test_a_service_that_is_not_there(rig, fake):
    provider = rig.provider(api_url="http://127.0.0.1:9")
    with pytest.raises(ProviderError) as caught:
        async with asyncio.timeout(60):
            await provider.offers(rig.need())
    assert caught.value.reason == "unreachable"


async def test_neighbours_without_mapped_ports_reach_each_other_through_us(rig, fake):
    fake.next_machines(Trouble(mapped=False), Trouble(mapped=False))
    provider = rig.provider()
    leases = await asyncio.gather(*(rig.running(provider, node) for node in range(2)))
    ports = {each.endpoint.candidates[0] for each in leases if each.endpoint is not None}
    assert len(ports) == 2
    # Machines of the fake share our loopback, where the port is taken by ourselves: each says that it was tried.
    for lease in leases:
        assert "could not be carried" in await rig.says(provider, lease, "could not be carried")


def test_the_key_of_the_account_is_found(rig, tmp_path):
    section = rig.section(api_key=None)
    environment = {"HOME": str(tmp_path)}
    with pytest.raises(ProviderError) as caught:
        account_key(section, environment)
    assert (caught.value.reason, "VAST_API_KEY" in caught.value.hint) == ("no-key", True)
    (tmp_path / ".vast_api_key").write_text("old\n")
    assert account_key(section, environment) == "old"
    (tmp_path / ".config" / "vastai").mkdir(parents=True)
    (tmp_path / ".config" / "vastai" / "vast_api_key").write_text("new\n")
    assert account_key(section, environment) == "new"
    assert account_key(rig.section(api_key=SecretStr("told")), environment) == "told"


def test_the_ssh_identity(identity: Path, tmp_path: Path) -> None:
    own = load_identity(identity, tmp_path)
    assert own.public.split()[:2] == identity.with_suffix(".pub").read_text().split()[:2]
    assert own.fingerprint.startswith("SHA256:")
    assert "PRIVATE" not in repr(own)
    with pytest.raises(ProviderError, match="no SSH key"):
        load_identity(None, tmp_path)
    (tmp_path / "broken").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\nnonsense\n")
    with pytest.raises(ProviderError, match="not a private key") as caught:
        load_identity(tmp_path / "broken", tmp_path)
    assert "nonsense" not in caught.value.message
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "id_ed25519").write_bytes(identity.read_bytes())
    assert load_identity(None, tmp_path).fingerprint == own.fingerprint
