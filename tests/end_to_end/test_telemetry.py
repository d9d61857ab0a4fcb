"""What a run tells of itself, as a real collector receives it; and that nothing waits for one that is away."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import closing

import pytest
from end_to_end_support import SMOLLM2, wait_for_rpc
from rotel_support import agent, free_port, rotel

PHASES = (
    *("config", "telemetry", "run_plan", "transport", "membership", "provisioner", "node_spec", "stage_shard_plan"),
    *("provider_start", "node_runtime_ready", "runtime_ready_ack", "stage_provision", "weights_loaded"),
    *("pipeline_probe", "serving", "shutdown", "provider_stop"),
)
BY_NODE = (
    *("stage_shard_plan", "provider_start", "node_runtime_ready", "runtime_ready_ack", "stage_provision"),
    *("weights_loaded", "shutdown"),
)
RUN = ("prompt", "-N", "2", "--model", SMOLLM2, "--max-tokens", "8", "--threads", "1", "--json", "Say something.")

HOLD_MS = "120000"
"""The time that a collector may take for a request, in milliseconds: more than any run here takes."""

needs_rotel = pytest.mark.skipif(agent() is None, reason="the collector `rotel` has no wheel for this Python")


@needs_rotel
@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_a_collector_receives_one_trace_of_the_whole_run(myelin, tmp_path, protocol):
    with rotel(tmp_path) as collector:
        endpoint = collector.grpc if protocol == "grpc" else collector.http
        done = myelin.run(*RUN, OTEL_EXPORTER_OTLP_ENDPOINT=endpoint, OTEL_EXPORTER_OTLP_PROTOCOL=protocol)
        received = collector.received()
    assert done.code == 0, done.err
    assert "telemetry" not in done.err
    spans = received.spans
    by_id = {span.id: span for span in spans}
    assert len(by_id) == len(spans)
    assert len({span.trace for span in spans}) == 1
    named = {name: [span for span in spans if span.name == name] for name in {span.name for span in spans}}

    (root,) = named["myelin.run"]
    assert root.parent == ""
    for phase in PHASES:
        (span,) = named[f"myelin.bootstrap.{phase}"]
        assert span.parent == root.id
        assert span.service == "myelin-orchestrator"
    for phase in BY_NODE:
        nodes = named[f"myelin.bootstrap.{phase}.node"]
        assert {span.attributes["myelin.node.id"] for span in nodes} == {"stage-0", "stage-1"}
        assert {by_id[span.parent].name for span in nodes} == {f"myelin.bootstrap.{phase}"}

    # What was asked of the provider, from the search for an offer to the release.
    for name, around in (
        ("provider.offers", "myelin.bootstrap.provider_start.node"),
        ("provider.launch", "myelin.bootstrap.provider_start.node"),
        ("provider.release", "myelin.bootstrap.provider_stop"),
    ):
        assert {span.attributes["myelin.node.id"] for span in named[name]} == {"stage-0", "stage-1"}
        assert {by_id[span.parent].name for span in named[name]} == {around}

    # What a node did is inside what the orchestrator asked of it, by the corrected times too.
    for name, asked in (
        ("worker.provision", "myelin.bootstrap.stage_provision.node"),
        ("worker.open_edges", "myelin.bootstrap.pipeline_probe.node"),
        ("myelin.stage.prefill", "chat SmolLM2-135M-Instruct.Q4_1"),
        ("myelin.stage.decode", "chat SmolLM2-135M-Instruct.Q4_1"),
    ):
        theirs = named[name]
        assert {span.service for span in theirs} == {"myelin-worker"}
        assert {span.attributes["myelin.node.id"] for span in theirs} == {"stage-0", "stage-1"}
        for span in theirs:
            assert by_id[span.parent].name == asked
            assert by_id[span.parent].attributes.get("myelin.node.id") in (span.attributes["myelin.node.id"], None)
    for span in spans:
        if span.parent:
            assert span.within(by_id[span.parent]), f"{span.name} in {by_id[span.parent].name}"

    (request,) = named["chat SmolLM2-135M-Instruct.Q4_1"]
    assert request.kind == "SPAN_KIND_SERVER"
    assert by_id[request.parent].name == "myelin.bootstrap.serving"
    said = request.attributes
    assert said["gen_ai.operation.name"] == "chat"
    assert said["gen_ai.usage.input_tokens"] == f"{done.json()['prompt_tokens']}"
    assert said["gen_ai.usage.output_tokens"] == f"{len(done.json()['tokens'])}"
    prefills = named["myelin.stage.prefill"]
    assert {span.attributes["myelin.stage.rows"] for span in prefills} == {said["gen_ai.usage.input_tokens"]}
    assert {span.attributes["myelin.stage.rows"] for span in named["myelin.stage.decode"]} == {"7"}
    (telemetry,) = named["myelin.bootstrap.telemetry"]
    assert "otlp" in telemetry.attributes["myelin.telemetry.observed"]

    assert {"gen_ai.server.request.duration", "myelin.tokens.generation"} <= received.metrics["myelin-orchestrator"]
    assert {"myelin.stage.busy", "process.memory.usage"} <= received.metrics["myelin-worker"]
    assert any(line.startswith("loaded") for line in received.logs["myelin-worker"])
    assert any(line.startswith("serving started") for line in received.logs["myelin-orchestrator"])


class Silent:
    """A collector that takes connections and never answers."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._taken: list[socket.socket] = []
        self._taking = threading.Thread(target=self._take, daemon=True)
        self._taking.start()

    def _take(self) -> None:
        while True:
            try:
                self._taken.append(self._socket.accept()[0])
            except OSError:
                return

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)  # closing it alone would not wake who waits in accept
        self._taking.join()
        for each in (self._socket, *self._taken):
            each.close()


@pytest.mark.parametrize("collector", ["dead", "silent", "full disk"])
def test_a_collector_that_fails_holds_nobody_up(myelin, collector):
    """The answer is the same, the end is bounded, and what was lost is told."""
    with closing(Silent()) as silent:
        extra: tuple[str, ...] = ()
        environment = {"OTEL_EXPORTER_OTLP_TIMEOUT": HOLD_MS}
        if collector == "dead":
            environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{free_port()}"
        elif collector == "silent":
            environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = silent.endpoint
        else:
            extra = ("--telemetry-frame-log", "/dev/full")
        done = myelin.run(*RUN[:-1], *extra, RUN[-1], **environment)
    assert done.code == 0, done.err
    assert done.json()["tokens"]
    assert "has not taken a first event" in done.err
    assert "telemetry was dropped" in done.err
    assert "Traceback" not in done.err
    assert not myelin.wait_until_gone(15)
    assert done.seconds < 90, "one that was waited for would have had two minutes"


def test_the_end_waits_for_a_silent_collector_no_longer_than_it_says(myelin):
    with closing(Silent()) as silent:
        serving = myelin.start(
            "serve", "-N", "1", "--model", SMOLLM2, "--rpc-bind", "127.0.0.1:0", "--threads", "1",
            OTEL_EXPORTER_OTLP_ENDPOINT=silent.endpoint, OTEL_EXPORTER_OTLP_TIMEOUT=HOLD_MS,
        )  # fmt: skip
        wait_for_rpc(serving)
        began = time.monotonic()
        serving.terminate()
        serving.wait(timeout=110)
        assert time.monotonic() - began < 90, "a collector may take two minutes"


def test_the_frame_log_holds_all_signals_of_all_processes(myelin, tmp_path):
    path = tmp_path / "frames.jsonl"
    done = myelin.run(*RUN[:-1], "--telemetry-frame-log", str(path), RUN[-1])
    assert done.code == 0, done.err
    seen = set()
    for line in path.read_text("utf-8").splitlines():
        for kind, resources in json.loads(line).items():
            for resource in resources:
                service = {each["key"]: each["value"] for each in resource["resource"]["attributes"]}["service.name"]
                seen.add((kind, service["stringValue"]))
    kinds = ("resourceSpans", "resourceMetrics", "resourceLogs")
    assert seen == {(kind, service) for kind in kinds for service in ("myelin-orchestrator", "myelin-worker")}


def test_the_doctor_says_whether_telemetry_arrives(myelin):
    with closing(Silent()) as silent:
        done = myelin.run("doctor", "--json", OTEL_EXPORTER_OTLP_ENDPOINT=silent.endpoint)
    (found,) = [check for check in done.json() if check["name"] == "telemetry otlp"]
    assert found["state"] == "warning"
    assert "not observed" in found["detail"]
