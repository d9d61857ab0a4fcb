"""The edge to the head: sorting what comes, refusing what is not due, telling of a loss."""

from __future__ import annotations

import asyncio

import pytest

from myelin.errors import EngineError, MyelinError, NodeError, RequestError, StreamClosed, TransportError
from myelin.orchestrator.admissions import Admissions, Mailbox
from myelin.orchestrator.head_edge import HeadEdge
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
    """A served edge with the requests on it, and what it reported lost."""

    def __init__(self, admissions: Admissions | None = None, epoch: Epoch = EPOCH) -> None:
        self.epoch = epoch
        self.stream = FakeStream()
        self.edge = HeadEdge(self.stream, epoch)
        self.admissions = admissions or Admissions(max_context=64)
        self.admissions.resume(self.edge)
        self.lost: list[MyelinError] = []
        self.number = 0
        self.serving = asyncio.create_task(self.edge.serve(self.lost.append))

    def submit(self, prompt: tuple[int, ...] = (1, 2), max_tokens: int = 5) -> Mailbox:
        return self.admissions.submit(prompt, max_tokens=max_tokens, sampling=GREEDY, ignore_end=False)

    async def sent(self) -> Record:
        async with asyncio.timeout(60):
            return unpack(await self.stream.sent.get())

    def token(self, mailbox: Mailbox, token: int, position: int = 2) -> Record:
        new = NewToken(mailbox.order.sequence, position, token, -1.0)
        return tokens_record([new], epoch=self.epoch, sequence=self.next())

    def next(self) -> int:
        self.number += 1
        return self.number - 1

    def comes(self, record: Record) -> None:
        self.stream.incoming.put_nowait(pack(record))

    async def loss(self) -> MyelinError:
        async with asyncio.timeout(60):
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
    done = Finished(one.order.sequence, FinishReason.STOP, 1)
    bench.comes(finished_record(done, epoch=EPOCH, sequence=bench.next()))
    assert [getattr(await two.get(), "token", None), getattr(await one.get(), "token", None)] == [22, 11]
    assert await one.get() == done
    bench.admissions.forget(one)  # it has ended: nothing to cancel
    bench.admissions.forget(two)
    cancel = await bench.sent()
    assert read_cancel(cancel) == two.order.sequence
    assert cancel.sequence == 2
    bench.comes(bench.token(two, 33))  # it was under way
    three = bench.submit()
    assert three.order.sequence not in (one.order.sequence, two.order.sequence)
    assert bench.admissions.submitted == 3
    bench.serving.cancel()


@pytest.mark.parametrize(("reason", "kind"), [("prompt-too-long", RequestError), ("engine", EngineError)])
async def test_a_fault_of_one_sequence_is_its_own(reason: str, kind: type[MyelinError]) -> None:
    bench = Bench()
    one, two = bench.submit(), bench.submit()
    fault = Fault(reason, "it can't be", "so what", one.order.sequence)
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


async def test_a_head_that_can_take_nothing_is_the_epochs_fault_and_not_the_requests() -> None:
    bench = Bench()
    mailbox = bench.submit()
    fault = Fault("pipeline-lost", "the pipeline has failed", "wait", mailbox.order.sequence)
    bench.comes(fault_record(fault, epoch=EPOCH, sequence=bench.next()))
    assert (await bench.loss()).reason == "pipeline-lost"
    assert not mailbox.finished


@pytest.mark.parametrize("reason", ["gap", "kind", "later epoch", "rubbish", "closed", "broken", "twice", "left out"])
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
    elif reason == "twice":
        bench.comes(bench.token(mailbox, 1))
        bench.comes(bench.token(mailbox, 1))
    elif reason == "left out":
        bench.comes(bench.token(mailbox, 1, position=3))
    else:
        bench.stream.incoming.put_nowait(StreamClosed("bye") if reason == "closed" else TransportError("snap"))
    error = await bench.loss()
    assert error.reason == ("edge-lost" if reason in ("closed", "broken") else "edge-broken")
    assert mailbox.sent == ([1] if reason == "twice" else [])


async def test_records_of_an_older_epoch_are_dropped() -> None:
    bench = Bench()
    mailbox = bench.submit()
    old = NewToken(mailbox.order.sequence, 2, 99, -1.0)
    bench.comes(tokens_record([old], epoch=Epoch(EPOCH - 1), sequence=17))
    bench.comes(bench.token(mailbox, 1))
    event = await mailbox.get()
    assert isinstance(event, NewToken)
    assert event.token == 1
    bench.serving.cancel()


async def test_a_loss_is_everybodys_and_stays() -> None:
    bench = Bench()
    mailboxes = [bench.submit() for _ in range(3)]
    bench.admissions.fail(NodeError("gone", "hint", reason="node-lost"))
    bench.admissions.fail(NodeError("gone twice"))
    errors = [error for m in mailboxes for error in await asyncio.gather(m.get(), return_exceptions=True)]
    assert {str(error) for error in errors} == {"gone"}
    assert len({id(error) for error in errors}) == 3
    with pytest.raises(NodeError, match="gone"):
        bench.submit()
    for mailbox in mailboxes:
        bench.admissions.forget(mailbox)
    await bench.edge.close()
    assert SequenceId(1) == mailboxes[0].order.sequence
    bench.serving.cancel()


async def test_a_pause_holds_what_is_under_way_and_what_comes() -> None:
    old = Bench()
    whole, started, gone = old.submit(max_tokens=1), old.submit(), old.submit()
    for mailbox in (whole, started):
        await old.sent()
        old.comes(old.token(mailbox, 7))
        assert isinstance(await mailbox.get(), NewToken)
    await old.sent()
    admissions = old.admissions
    admissions.pause()
    assert admissions.paused
    admissions.forget(gone)  # its client went away meanwhile
    meanwhile = admissions.submit((9,), max_tokens=2, sampling=GREEDY, ignore_end=True)
    old.comes(old.token(started, 8, position=3))  # too late: it is of the epoch before
    await asyncio.sleep(0.01)
    assert started.sent == [7]

    new = Bench(admissions, Epoch(EPOCH + 1))
    finished = await whole.get()  # it had all its tokens: only its end was missing
    assert finished == Finished(whole.order.sequence, FinishReason.LENGTH, 1)
    again, first = read_submit(await new.sent()), read_submit(await new.sent())
    assert (again.sequence, again.prompt, again.max_tokens) == (started.order.sequence, (1, 2, 7), 4)
    assert (first.sequence, first.prompt, first.max_tokens) == (meanwhile.order.sequence, (9,), 2)
    assert new.stream.sent.empty()
    new.comes(new.token(started, 8, position=3))
    done = Finished(started.order.sequence, FinishReason.STOP, 1)
    new.comes(finished_record(done, epoch=new.epoch, sequence=new.next()))
    assert [(await started.get()), (await started.get())] == [
        NewToken(started.order.sequence, 3, 8, -1.0),
        Finished(started.order.sequence, FinishReason.STOP, 2),  # counted from the client's side
    ]
    for bench in (old, new):
        bench.serving.cancel()


async def test_a_request_that_was_there_whenever_an_engine_died_ends() -> None:
    bench = Bench()
    poison = bench.submit()
    bench.admissions.pause()
    bench.admissions.strike(EngineError("it died", reason="engine-fault"))
    bench.admissions.resume(HeadEdge(FakeStream(), Epoch(4)))
    innocent = bench.submit()
    bench.admissions.pause()
    late = bench.submit()
    bench.admissions.strike(EngineError("it died again", reason="engine-fault"))
    with pytest.raises(EngineError, match="again"):
        await poison.get()
    assert not innocent.finished
    assert not late.finished
    assert (innocent.strikes, late.strikes) == (1, 0)
    assert bench.admissions.under_way == 2
    bench.serving.cancel()
