"""The edge to the head: sorting what comes, refusing what is not due, telling everybody of a loss."""

from __future__ import annotations

import asyncio

import pytest

from myelin.errors import EngineError, MyelinError, NodeError, RequestError, StreamClosed, TransportError
from myelin.orchestrator.head_edge import HeadEdge, Mailbox
from myelin.transport.contract import ORCHESTRATOR, Buffer, PeerIdentity
from myelin.values import GREEDY, Attempt, Epoch, FinishReason, RunId, SequenceId
from myelin.wire.record import Record, RecordKind, pack, unpack
from myelin.wire.requests import (
    Fault,
    Finished,
    NewToken,
    fault_record,
    finished_record,
    read_cancel,
    read_submit,
    submit_record,
    tokens_record,
)

EPOCH = Epoch(3)


class FakeStream:
    """A stream that a test holds both ends of."""

    def __init__(self) -> None:
        self.incoming: asyncio.Queue[bytes | TransportError] = asyncio.Queue()
        self.sent: asyncio.Queue[bytes] = asyncio.Queue()
        self.peer = PeerIdentity(RunId("run"), ORCHESTRATOR, Attempt(1))

    async def send(self, message: Buffer) -> None:
        await self.sent.put(bytes(message))

    async def receive(self) -> bytes:
        message = await self.incoming.get()
        if isinstance(message, TransportError):
            raise message
        return message

    async def close(self) -> None:
        raise TransportError("it is broken already")


class Bench:
    """A served edge, and what it reported lost."""

    def __init__(self) -> None:
        self.stream = FakeStream()
        self.edge = HeadEdge(self.stream, EPOCH)
        self.lost: list[MyelinError] = []
        self.number = 0
        self.serving = asyncio.create_task(self.edge.serve(self.lost.append))

    def submit(self) -> Mailbox:
        return self.edge.submit((1, 2), max_tokens=5, sampling=GREEDY, ignore_end=False)

    async def sent(self) -> Record:
        async with asyncio.timeout(1):
            return unpack(await self.stream.sent.get())

    def token(self, mailbox: Mailbox, token: int) -> Record:
        new = NewToken(mailbox.sequence, 2, token, -1.0)
        return tokens_record([new], epoch=EPOCH, sequence=self.next())

    def next(self) -> int:
        self.number += 1
        return self.number - 1

    def comes(self, record: Record) -> None:
        self.stream.incoming.put_nowait(pack(record))

    async def loss(self) -> MyelinError:
        async with asyncio.timeout(1):
            await self.serving
        return self.lost[0]


async def test_tokens_find_their_mailboxes() -> None:
    bench = Bench()
    one, two = bench.submit(), bench.submit()
    first, second = await bench.sent(), await bench.sent()
    assert read_submit(first).prompt == (1, 2)
    assert (first.epoch, first.sequence, second.sequence) == (EPOCH, 0, 1)
    bench.comes(bench.token(two, 22))
    bench.comes(bench.token(one, 11))
    done = Finished(one.sequence, FinishReason.STOP, 1)
    bench.comes(finished_record(done, epoch=EPOCH, sequence=bench.next()))
    assert [getattr(await two.get(), "token", None), getattr(await one.get(), "token", None)] == [22, 11]
    assert await one.get() == done
    bench.edge.forget(one)  # it has ended: nothing to cancel
    bench.edge.forget(two)
    cancel = await bench.sent()
    assert read_cancel(cancel) == two.sequence
    assert cancel.sequence == 2
    bench.comes(bench.token(two, 33))  # it was under way
    three = bench.submit()
    assert three.sequence not in (one.sequence, two.sequence)
    assert bench.edge.submitted == 3
    bench.serving.cancel()


@pytest.mark.parametrize(
    ("reason", "kind"), [("prompt-too-long", RequestError), ("pipeline-lost", EngineError), ("engine", EngineError)]
)
async def test_a_fault_of_one_sequence_is_its_own(reason: str, kind: type[MyelinError]) -> None:
    bench = Bench()
    one, two = bench.submit(), bench.submit()
    fault = Fault(reason, "it can't be", "so what", one.sequence)
    bench.comes(fault_record(fault, epoch=EPOCH, sequence=bench.next()))
    bench.comes(bench.token(two, 5))
    with pytest.raises(kind, match="it can't be") as raised:
        await one.get()
    assert raised.value.reason == reason
    assert isinstance(await two.get(), NewToken)
    bench.serving.cancel()


async def test_a_fault_of_all_is_reported() -> None:
    bench = Bench()
    bench.comes(fault_record(Fault("engine", "stage-1 failed", "hint"), epoch=EPOCH, sequence=bench.next()))
    error = await bench.loss()
    assert (type(error), error.reason, error.message) == (NodeError, "engine", "stage-1 failed")


@pytest.mark.parametrize("reason", ["gap", "kind", "later epoch", "rubbish", "closed", "broken"])
async def test_what_is_not_due_ends_the_edge(reason: str) -> None:
    bench = Bench()
    mailbox = bench.submit()
    if reason == "gap":
        bench.number = 5
        bench.comes(bench.token(mailbox, 1))
    elif reason == "kind":
        submit = read_submit(await bench.sent())
        bench.comes(submit_record(submit, epoch=EPOCH, sequence=0))
    elif reason == "later epoch":
        bench.comes(Record(RecordKind.CANCEL, Epoch(EPOCH + 1), 0, 0))
    elif reason == "rubbish":
        bench.stream.incoming.put_nowait(b"rubbish")
    else:
        bench.stream.incoming.put_nowait(StreamClosed("bye") if reason == "closed" else TransportError("snap"))
    error = await bench.loss()
    assert error.reason == ("edge-lost" if reason in ("closed", "broken") else "edge-broken")


async def test_records_of_an_older_epoch_are_dropped() -> None:
    bench = Bench()
    mailbox = bench.submit()
    old = NewToken(mailbox.sequence, 2, 99, -1.0)
    bench.comes(tokens_record([old], epoch=Epoch(EPOCH - 1), sequence=17))
    bench.comes(bench.token(mailbox, 1))
    event = await mailbox.get()
    assert isinstance(event, NewToken)
    assert event.token == 1
    bench.serving.cancel()


async def test_a_loss_is_everybodys_and_stays() -> None:
    bench = Bench()
    mailboxes = [bench.submit() for _ in range(3)]
    bench.edge.fail(NodeError("gone", "hint", reason="node-lost"))
    bench.edge.fail(NodeError("gone twice"))
    errors = [error for m in mailboxes for error in await asyncio.gather(m.get(), return_exceptions=True)]
    assert {str(error) for error in errors} == {"gone"}
    assert len({id(error) for error in errors}) == 3
    with pytest.raises(NodeError, match="gone"):
        bench.submit()
    for mailbox in mailboxes:
        bench.edge.forget(mailbox)
    await bench.edge.close()
    assert SequenceId(1) == mailboxes[0].sequence
    bench.serving.cancel()
