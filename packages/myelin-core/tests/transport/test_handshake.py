"""The handshake by itself: what it proves, and what an attacker or a stranger gets out of it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from myelin.errors import TransportError, WireError
from myelin.transport.contract import Buffer, PeerIdentity, TransportOptions
from myelin.transport.handshake import MAX_HANDSHAKE_BYTES, prove_as_acceptor, prove_as_dialler
from myelin.values import Attempt, NodeId, RunId

SECRET = "correct horse battery staple"
DIALLER = PeerIdentity(RunId("run-1"), NodeId("orchestrator"), Attempt(1))
ACCEPTOR = PeerIdentity(RunId("run-1"), NodeId("stage-0"), Attempt(3))


class Wire:
    """One end of a pair of queues; notes all that it sent."""

    def __init__(self, incoming: asyncio.Queue[bytes], outgoing: asyncio.Queue[bytes]) -> None:
        self._incoming, self._outgoing = incoming, outgoing
        self.sent: list[bytes] = []
        self.meddle: Callable[[bytes], bytes] = bytes

    async def send(self, message: Buffer) -> None:
        self.sent.append(bytes(message))
        await self._outgoing.put(self.meddle(bytes(message)))

    async def receive(self) -> bytes:
        return await self._incoming.get()


class Script:
    """Answers with given messages, and then with the end of the stream."""

    def __init__(self, *answers: bytes) -> None:
        self._answers = list(answers)
        self.sent: list[bytes] = []

    async def send(self, message: Buffer) -> None:
        self.sent.append(bytes(message))

    async def receive(self) -> bytes:
        if not self._answers:
            raise TransportError("the stream broke", reason="stream-lost")
        return self._answers.pop(0)


def wires() -> tuple[Wire, Wire]:
    there: asyncio.Queue[bytes] = asyncio.Queue()
    back: asyncio.Queue[bytes] = asyncio.Queue()
    return Wire(back, there), Wire(there, back)


def options(identity: PeerIdentity, secret: str = SECRET) -> TransportOptions:
    return TransportOptions(identity, SecretStr(secret))


async def outcome(call: Awaitable[PeerIdentity]) -> PeerIdentity | str:
    """Who was proved to be there, or the reason why not."""
    try:
        async with asyncio.timeout(60):
            return await call
    except TransportError as error:
        return error.reason


async def shake(
    dialler: TransportOptions,
    acceptor: TransportOptions,
    *,
    protocols: tuple[str, str] = ("myelin/edge/1", "myelin/edge/1"),
    expect: NodeId | None = None,
) -> tuple[PeerIdentity | str, PeerIdentity | str, list[bytes]]:
    left, right = wires()
    results = await asyncio.gather(
        outcome(prove_as_dialler(left, dialler, protocols[0], expect)),
        outcome(prove_as_acceptor(right, acceptor, protocols[1])),
    )
    return results[0], results[1], left.sent + right.sent


async def test_both_learn_who_the_other_is_in_three_messages() -> None:
    seen_by_dialler, seen_by_acceptor, sent = await shake(options(DIALLER), options(ACCEPTOR), expect=ACCEPTOR.node)
    assert (seen_by_dialler, seen_by_acceptor) == (ACCEPTOR, DIALLER)
    assert len(sent) == 3
    assert not any(SECRET.encode() in message for message in sent)


async def test_no_two_handshakes_are_alike() -> None:
    first = await shake(options(DIALLER), options(ACCEPTOR))
    second = await shake(options(DIALLER), options(ACCEPTOR))
    assert not set(first[2]) & set(second[2])


async def test_another_secret() -> None:
    left, right, sent = await shake(options(DIALLER, "wrong"), options(ACCEPTOR))
    assert (left, right) == ("refused-secret", "refused-secret")
    assert not any(SECRET.encode() in message or b"wrong" in message for message in sent)


async def test_another_run() -> None:
    stranger = PeerIdentity(RunId("run-2"), NodeId("orchestrator"), Attempt(1))
    assert (await shake(options(stranger), options(ACCEPTOR)))[:2] == ("wrong-run", "wrong-run")


async def test_another_node() -> None:
    results = await shake(options(DIALLER), options(ACCEPTOR), expect=NodeId("stage-1"))
    assert results[:2] == ("wrong-node", "wrong-node")


async def test_another_protocol() -> None:
    """A proof made for one protocol is none for another."""
    results = await shake(options(DIALLER), options(ACCEPTOR), protocols=("myelin/edge/1", "myelin/control/1"))
    assert results[:2] == ("refused-secret", "refused-secret")


async def test_an_empty_secret_proves_nothing() -> None:
    for prove in (prove_as_dialler, prove_as_acceptor):
        stream = Script()
        assert await outcome(prove(stream, options(DIALLER, ""), "myelin/edge/1")) == "no-secret"
        assert not stream.sent


async def test_a_recorded_dialler_is_refused() -> None:
    _, _, (hello, proof, _) = await shake(options(DIALLER), options(ACCEPTOR))
    replay = Script(hello, proof)
    assert await outcome(prove_as_acceptor(replay, options(ACCEPTOR), "myelin/edge/1")) == "refused-secret"


async def test_a_recorded_acceptor_is_refused() -> None:
    _, _, (_, _, challenge) = await shake(options(DIALLER), options(ACCEPTOR))
    replay = Script(challenge)
    assert await outcome(prove_as_dialler(replay, options(DIALLER), "myelin/edge/1")) == "refused-secret"


async def test_a_dialler_that_reflects_our_proof_is_refused() -> None:
    """An attacker without the secret sends the acceptor's own proof back."""
    left, right = wires()
    accepting = asyncio.create_task(outcome(prove_as_acceptor(right, options(ACCEPTOR), "myelin/edge/1")))
    greeting = Script()
    await outcome(prove_as_dialler(greeting, options(DIALLER, "guess"), "myelin/edge/1"))
    await left.send(greeting.sent[0])
    challenge = await left.receive()
    await left.send(challenge[:5] + b"\x03" + challenge[-32:])
    assert await accepting == "refused-secret"


@pytest.mark.parametrize(
    "message",
    [b"", b"x", b"GET / HTTP/1.1\r\n", b"MYHS\x01", b"MYHS\x02\x01", b"MYHS\x01\x01", b"MYHS\x01\x09" + bytes(80),
     b"MYHS\x01\x01" + bytes(32), b"MYHS\x01\x01" + bytes(32) + b"\xff\xff" + bytes(4) + b"x",
     b"MYHS\x01\x01" + bytes(32) + b"\x02\x00" + bytes(4) + b"\xff\xfe", bytes(MAX_HANDSHAKE_BYTES + 1)],
)  # fmt: skip
async def test_strangers_get_a_wire_error(message: bytes) -> None:
    for prove in (prove_as_dialler, prove_as_acceptor):
        with pytest.raises(WireError):
            await prove(Script(message), options(ACCEPTOR), "myelin/edge/1")


async def test_a_refusal_of_an_unknown_kind_is_a_refusal() -> None:
    refusal = b"MYHS\x01\x04because\nI said so"
    assert await outcome(prove_as_dialler(Script(refusal), options(DIALLER), "myelin/edge/1")) == "refused"


async def test_a_silent_peer_is_left_to_the_callers_deadline() -> None:
    left, _ = wires()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await prove_as_dialler(left, options(DIALLER), "myelin/edge/1")


@given(st.data())
def test_any_damage_ends_in_a_refusal(data: st.DataObject) -> None:
    """Of each of the three messages one byte is changed on the way; neither side may accept the other's claim."""
    which = data.draw(st.integers(0, 2))
    position = data.draw(st.integers(0, 200))
    flip = data.draw(st.integers(1, 255))

    def damage(message: bytes) -> bytes:
        changed = bytearray(message)
        changed[position % len(changed)] ^= flip
        return bytes(changed)

    async def run() -> tuple[PeerIdentity | str, PeerIdentity | str]:
        left, right = wires()
        under_way = itertools.count()
        left.meddle = right.meddle = lambda message: damage(message) if next(under_way) == which else message

        async def brief(call: Awaitable[PeerIdentity]) -> PeerIdentity | str:
            try:
                async with asyncio.timeout(0.05):
                    return await call
            except TransportError as error:
                return error.reason
            except TimeoutError:
                return "silence"

        return await asyncio.gather(
            brief(prove_as_dialler(left, options(DIALLER), "myelin/edge/1")),
            brief(prove_as_acceptor(right, options(ACCEPTOR), "myelin/edge/1")),
        )

    seen_by_dialler, seen_by_acceptor = asyncio.run(run())
    assert isinstance(seen_by_acceptor, str)
    if which < 2:
        assert isinstance(seen_by_dialler, str)
