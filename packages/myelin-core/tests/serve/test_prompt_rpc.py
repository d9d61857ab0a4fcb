"""The prompt RPC's server over real sockets: answers, queues, cancels, and survives whatever it is sent."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted_pipeline import ByteTokenizer, ScriptedPipeline

from myelin.errors import ConfigError, NodeError, RequestError, TransportError
from myelin.serve.prompt_client import ServerModel
from myelin.serve.prompt_rpc import PromptServer, RequestDefaults, bind, show_address, split_address
from myelin.serve.prompts import Prompter
from myelin.values import SamplingParams


@pytest.fixture(autouse=True)
def plain_template(monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(template: object, tokenizer: ByteTokenizer, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return tokenizer.encode("".join(f"[{message['role']}={message['content']}]" for message in messages))

    monkeypatch.setattr("myelin.serve.prompts.encode_chat", encode)


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, **fields: Any) -> None:
        self.send_bytes(json.dumps({"SubmitPrompt": fields}).encode() + b"\n")

    def send_bytes(self, data: bytes) -> None:
        self.writer.write(data)

    async def receive(self) -> tuple[str, dict[str, Any]]:
        async with asyncio.timeout(60):
            line = await self.reader.readline()
        assert line, "the server closed the connection"
        ((kind, body),) = json.loads(line).items()
        return kind, body

    async def answer(self) -> tuple[str, str, dict[str, Any]]:
        """The text of the deltas, and what ended them."""
        text = ""
        while True:
            kind, body = await self.receive()
            if kind != "TextDelta":
                return text, kind, body
            text += body["text"]

    def close(self) -> None:
        self.writer.close()


@asynccontextmanager
async def serving(pipeline: ScriptedPipeline, **more: Any) -> AsyncIterator[Any]:
    """A server, and a function that connects to it."""
    listener = bind("127.0.0.1:0")
    host, port = listener.getsockname()[:2]
    prompter = Prompter(ByteTokenizer(), "any", 1000)
    server = PromptServer(pipeline, prompter, **more)
    clients: list[Client] = []

    async def connect() -> Client:
        clients.append(Client(*await asyncio.open_connection(host, port)))
        return clients[-1]

    await server.start(listener)
    connect.address = f"{host}:{port}"
    connect.server = server
    try:
        yield connect
    finally:
        for client in clients:
            client.close()
        await server.close()
        assert pipeline.running == 0


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  # what is waited for belongs to the code under test
            await asyncio.sleep(0.005)


async def test_a_prompt_is_answered_in_pieces_and_ended_by_done() -> None:
    async with serving(ScriptedPipeline(lambda text: f"{text} 👋")) as connect:
        client = await connect()
        client.send(request_id="r1", prompt_text="hi")
        text, kind, body = await client.answer()
        assert text == "[user=hi] 👋"
        assert kind == "Done"
        assert body["elapsed_ms"] >= 0
        body.pop("elapsed_ms")
        assert body == {
            "request_id": "r1",
            "final_text": "[user=hi] 👋",
            "tokens_generated": len(text.encode()),
            "finish_reason": "stop",
        }


async def test_requests_of_one_connection_are_answered_in_turn() -> None:
    async with serving(ScriptedPipeline()) as connect:
        client = await connect()
        for number in range(5):
            client.send(request_id=number, prompt_text=f"{number}", raw=True)
        for number in range(5):
            text, kind, body = await client.answer()
            assert (text, kind, body["request_id"]) == (f"<{number}>", "Done", number)


async def test_a_conversation_goes_through_the_template() -> None:
    async with serving(ScriptedPipeline(lambda text: text)) as connect:
        client = await connect()
        client.send(request_id=1, messages=[{"role": "system", "content": "s"}, {"role": "user", "content": "u"}])
        assert (await client.answer())[0] == "[system=s][user=u]"


async def test_a_request_takes_the_servers_settings_unless_it_has_its_own() -> None:
    pipeline = ScriptedPipeline()
    defaults = RequestDefaults(9, SamplingParams(0.5, 3, 0.9, 7), ("z",))
    async with serving(pipeline, defaults=defaults) as connect:
        client = await connect()
        client.send(request_id=1, prompt_text="a")
        client.send(
            request_id=2,
            prompt_text="a",
            max_tokens=2,
            temperature=0.0,
            top_k=0,
            top_p=1.0,
            seed=0,
            stop=["u"],
            raw=True,
        )
        await client.answer()
        text, _, _ = await client.answer()
    first, second = pipeline.calls
    assert (first.max_tokens, first.sampling) == (9, SamplingParams(0.5, 3, 0.9, 7))
    assert (second.max_tokens, second.sampling) == (2, SamplingParams())
    assert text == "<a"


async def test_connections_wait_for_a_place_in_order() -> None:
    pipeline = ScriptedPipeline(lambda text: text * 3, delay_s=0.002)
    async with serving(pipeline, places=2) as connect:
        clients = []
        for number in range(6):
            client = await connect()
            client.send(request_id=number, prompt_text=f"{number}", raw=True)
            clients.append(client)
            await until(lambda: len(pipeline.calls) >= min(len(clients), 2))  # awaited before the next one
        for number, client in enumerate(clients):
            assert (await client.answer())[0] == str(number) * 3
    assert pipeline.most == 2
    assert [call.text for call in pipeline.calls] == list("012345")


async def test_a_client_that_goes_away_cancels_its_own_and_only_its_own() -> None:
    pipeline = ScriptedPipeline(lambda text: "x" * 500, delay_s=0.002)
    async with serving(pipeline, places=2) as connect:
        leaving, staying = await connect(), await connect()
        leaving.send(request_id=1, prompt_text="leaving", raw=True, max_tokens=500)
        staying.send(request_id=2, prompt_text="staying", raw=True, max_tokens=50)
        await leaving.receive()
        leaving.close()
        text, kind, _ = await staying.answer()
        assert (text, kind) == ("x" * 50, "Done")
        await until(lambda: pipeline.running == 0)
    by_text = {call.text: call for call in pipeline.calls}
    assert by_text["leaving"].cancelled
    assert by_text["leaving"].given < 500
    assert not by_text["staying"].cancelled


async def test_a_client_that_goes_away_while_it_waits_is_never_computed() -> None:
    pipeline = ScriptedPipeline(lambda text: "x" * 20, delay_s=0.005)
    async with serving(pipeline, places=1) as connect:
        first, second, third = await connect(), await connect(), await connect()
        first.send(request_id=1, prompt_text="first", raw=True)
        await first.receive()
        second.send(request_id=2, prompt_text="second", raw=True)
        await asyncio.sleep(0.02)
        third.send(request_id=3, prompt_text="third", raw=True)
        second.close()
        await first.answer()
        await third.answer()
    assert [call.text for call in pipeline.calls] == ["first", "third"]


async def test_what_is_wrong_with_a_request_is_its_fault_and_no_one_elses() -> None:
    async with serving(ScriptedPipeline()) as connect:
        client = await connect()
        client.send(request_id="long", prompt_text="x" * 2000)
        client.send_bytes(b"this is no JSON\n")
        client.send(request_id="odd", prompt_text="x", max_tokens=0)
        client.send(request_id="well", prompt_text="x", raw=True)
        faults = [await client.receive() for _ in range(3)]
        assert [kind for kind, _ in faults] == ["Fault"] * 3
        assert [body["request_id"] for _, body in faults] == ["long", None, "odd"]
        assert [body["reason"] for _, body in faults] == ["context", "malformed", "malformed"]
        assert all(body["error"] and body["hint"] is not None for _, body in faults)
        assert (await client.answer())[0] == "<x>"


async def test_a_line_without_end_is_refused_and_the_next_one_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("myelin.serve.prompt_rpc.LineSplitter.__init__.__defaults__", (1000,))
    async with serving(ScriptedPipeline()) as connect:
        client = await connect()
        client.send_bytes(b"x" * 300_000 + b"\n")
        client.send(request_id=1, prompt_text="x", raw=True)
        kind, body = await client.receive()
        assert (kind, body["reason"]) == ("Fault", "malformed")
        assert (await client.answer())[0] == "<x>"


async def test_a_lost_pipeline_is_a_fault_for_those_who_wait() -> None:
    pipeline = ScriptedPipeline(lambda text: "x" * 100, delay_s=0.002)
    async with serving(pipeline) as connect:
        client = await connect()
        client.send(request_id=1, prompt_text="x", raw=True)
        await client.receive()
        pipeline.error = NodeError("stage-1 is gone", "start it again", reason="node-lost")
        _, kind, body = await client.answer()
        assert kind == "Fault"
        assert body == {"request_id": 1, "error": "stage-1 is gone", "hint": "start it again", "reason": "node-lost"}


@pytest.mark.parametrize("steps", range(12))
async def test_a_server_closes_at_any_moment_of_an_answer(steps: int) -> None:
    """Whatever an answer is just doing (sending a piece, or the fault of a lost pipeline), it takes being cancelled.

    ``asyncio.wait_for`` of Python 3.11 forgets a cancellation that comes as its work ends.
    """
    for lost in (False, True):
        pipeline = ScriptedPipeline(lambda text: "x" * 1000)
        async with serving(pipeline) as connect:
            client = await connect()
            client.send(request_id=1, prompt_text="a")
            await client.receive()
            if lost:
                pipeline.error = NodeError("stage-1 was lost")
            for _ in range(steps):
                await asyncio.sleep(0)
            async with asyncio.timeout(60):
                await connect.server.close()


async def test_a_browser_cannot_make_anyone_generate() -> None:
    pipeline = ScriptedPipeline()
    async with serving(pipeline) as connect:
        client = await connect()
        client.send_bytes(b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        client.send(request_id=1, prompt_text="x")
        assert await asyncio.wait_for(client.reader.read(), 60) == b""
    assert pipeline.calls == []


class Wordy(ByteTokenizer):
    """Its tokens are long."""

    def token_bytes(self, token: int) -> bytes:
        return b"long" * 1000


async def test_a_client_that_takes_nothing_is_given_up() -> None:
    pipeline = ScriptedPipeline(lambda text: "x" * 100_000, tokenizer=Wordy())
    listener = bind("127.0.0.1:0")
    server = PromptServer(pipeline, Prompter(ByteTokenizer(), None, 1000), write_timeout_s=0.1)
    await server.start(listener)
    stuck = socket.create_connection(listener.getsockname()[:2])
    try:
        stuck.sendall(b'{"SubmitPrompt":{"request_id":1,"prompt_text":"x","max_tokens":100000}}\n')
        await until(lambda: pipeline.calls and pipeline.calls[0].cancelled)
    finally:
        stuck.close()
        await server.close()
    assert pipeline.running == 0


async def test_closing_the_server_ends_what_runs() -> None:
    pipeline = ScriptedPipeline(lambda text: "x" * 1000, delay_s=0.002)
    async with serving(pipeline) as connect:
        client = await connect()
        client.send(request_id=1, prompt_text="x", raw=True, max_tokens=1000)
        await client.receive()
    assert pipeline.calls[0].cancelled


@given(
    st.lists(st.binary(max_size=100) | st.just(b'{"SubmitPrompt":{"request_id":1,"prompt_text":"x"}}\n'), max_size=5)
)
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_no_bytes_hurt_the_server(chunks: list[bytes]) -> None:
    async with serving(ScriptedPipeline()) as connect:
        nasty = await connect()
        for chunk in chunks:
            nasty.send_bytes(chunk)
        nasty.close()
        client = await connect()
        client.send(request_id=1, prompt_text="x", raw=True)
        assert (await client.answer())[0] == "<x>"


# The client


async def said(model: ServerModel, *texts: str) -> str:
    messages = [{"role": "user", "content": text} for text in texts]
    return "".join([piece async for piece in model.answer(messages)])


async def test_the_client_asks_and_gets_the_answer() -> None:
    pipeline = ScriptedPipeline(lambda text: f"{text} 👋")
    async with serving(pipeline, defaults=RequestDefaults(50)) as connect:
        model = ServerModel(connect.address, {"seed": 5, "stop": ["THE END"]})
        await model.check()
        assert await said(model, "one") == "[user=one] 👋"
        assert await said(model, "one THE END two") == "[user=one "
    assert pipeline.calls[0].sampling.seed == 5
    assert pipeline.calls[0].max_tokens == 50


async def test_the_client_tells_a_fault_and_can_go_on() -> None:
    async with serving(ScriptedPipeline()) as connect:
        model = ServerModel(connect.address, {})
        with pytest.raises(RequestError, match="the context 1000") as caught:
            await said(model, "x" * 2000)
        assert caught.value.reason == "context"
        assert await said(model, "hi") == "<[user=hi]>"


async def test_leaving_an_answer_cancels_it_on_the_server() -> None:
    pipeline = ScriptedPipeline(lambda text: "x" * 1000, delay_s=0.002)
    async with serving(pipeline, defaults=RequestDefaults(1000)) as connect:
        answer = ServerModel(connect.address, {}).answer([{"role": "user", "content": "hi"}])
        assert await anext(answer) == "x"
        await answer.aclose()
        await until(lambda: pipeline.calls[0].cancelled)


async def test_no_server_is_an_error_with_a_remedy() -> None:
    with bind("127.0.0.1:0") as listener:
        address = show_address(listener)
    with pytest.raises(TransportError, match="nobody answers at") as caught:
        await ServerModel(address, {}).check()
    assert "myelin serve" in caught.value.hint


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (b"", "gone away"),
        (b"220 mail ready\n", "doesn't speak"),
        (b"[]\n", "doesn't speak"),
        (b'{"Done":3}\n', "doesn't speak"),
    ],
)
async def test_a_server_of_another_kind_is_told(reply: bytes, words: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(reply)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        with pytest.raises(TransportError, match=words):
            await said(ServerModel(f"127.0.0.1:{port}", {}), "hi")


# Addresses


@pytest.mark.parametrize(
    ("address", "parts"),
    [("127.0.0.1:19777", ("127.0.0.1", 19777)), ("[::1]:5", ("::1", 5)), ("localhost:0", ("localhost", 0))],
)
def test_addresses_are_split(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts


@pytest.mark.parametrize("address", ["", "127.0.0.1", ":5", "host:", "host:x", "host:65536", "host:-1", "host:١"])
def test_what_is_no_address_is_an_error(address: str) -> None:
    with pytest.raises(ConfigError, match="is no address"):
        split_address(address)


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0"])
def test_only_this_machine_may_reach_it(address: str) -> None:
    with pytest.raises(ConfigError, match="other machines could reach"):
        bind(address)


def test_a_port_in_use_is_an_error_with_a_remedy() -> None:
    with bind("127.0.0.1:0") as listener:
        with pytest.raises(TransportError) as caught:
            bind(show_address(listener))
        assert caught.value.reason == "address-in-use"
        assert "--rpc-bind" in caught.value.hint
