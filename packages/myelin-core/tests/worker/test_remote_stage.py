"""Stages of real models, fetched from a hub on loopback: what goes over the network, and what is right in the end."""

from __future__ import annotations

import hashlib
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from myelin.engine.contract import EngineOptions, LoadReport, Progress
from myelin.errors import ModelError
from myelin.model.remote.cache import ModelCache
from myelin.model.remote.fetch import CONNECTIONS
from myelin.model.remote.store import CELL_BYTES
from myelin.model.shard import ShardReader
from myelin.model.source import SourceOptions
from myelin.orchestrator.planning import OpenedModel, open_model
from myelin.plugins.registry import Registry
from myelin.wire import control_pb2 as control
from myelin.worker.provision import load_stage, stage_request
from myelin.worker.stage import LoadedStage
from myelin_testkit.hub import FakeHub, Fault
from myelin_testkit.models import gemma3_path, smollm2_path

URI = "hf:someone/model/model.gguf"


class DigestEngine:
    """Loads a stage by digesting it: all bytes are read, and none are kept."""

    def __init__(self) -> None:
        self.digest = ""

    def load(self, shard: ShardReader, progress: Progress) -> LoadReport:
        digest = hashlib.sha256()
        done = 0
        for name in shard.names:
            values = shard.read(name)
            digest.update(values.tobytes())
            done += values.nbytes
            progress("load", done, shard.total_bytes)
        self.digest = digest.hexdigest()
        return LoadReport(done, 0, 0.0)

    def close(self) -> None:
        pass


class Plugins:
    """The real sources, and the engine above."""

    def __init__(self) -> None:
        self.registry = Registry.discover()
        self.engines: list[DigestEngine] = []

    def engine(self, name: str, options: EngineOptions) -> Any:
        self.engines.append(DigestEngine())
        return self.engines[-1]

    def model_source(self, uri: str, options: SourceOptions) -> Any:
        return self.registry.model_source(uri, options)


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return Plugins()


@pytest.fixture(scope="module")
def real_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"smollm2": smollm2_path(), "gemma3": gemma3_path(tmp_path_factory.mktemp("gemma"))}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr("myelin.model.remote.http.LONGEST_WAIT_S", 0.02)
    with FakeHub() as hub:
        yield hub


def provision(model: OpenedModel, index: int, count: int, cache: Path) -> control.Provision:
    """As the orchestrator tells it."""
    from myelin.model.summary import pack_facts

    n_layers = model.parameters.n_layers
    return control.Provision(
        id=1,
        model_uri=model.uri,
        engine="digest",
        options=control.EngineOptions(threads=1, max_context=32, max_sequences=1, max_batch_tokens=8),
        stage_index=index,
        stage_count=count,
        first_layer=index * n_layers // count,
        end_layer=(index + 1) * n_layers // count,
        part_sizes=model.part_sizes,
        header_digest=model.digest,
        part_fingerprints=model.fingerprints,
        facts=pack_facts(model.facts),
        model_cache_dir=str(cache),
    )


def load(
    message: control.Provision, plugins: Plugins, hub: FakeHub, told: list[tuple[str, int, int]] | None = None
) -> tuple[LoadedStage, str]:
    request = stage_request(message, default_engine="digest", default_cache_dir=Path("/nowhere"), default_threads=1)
    environment = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": "/nonexistent"}
    seen = told if told is not None else []
    stage = load_stage(request, plugins, environment, lambda *event: seen.append(event))
    stage.close()
    assert isinstance(stage.engine, DigestEngine)
    return stage, stage.engine.digest


def expected(model: OpenedModel, message: control.Provision, path: Path) -> str:
    from myelin.model.architecture import stage_tensors

    digest = hashlib.sha256()
    with path.open("rb") as file:
        for name in stage_tensors(model.facts, model.parameters, message.first_layer, message.end_layer):
            tensor = model.facts.tensors[name]
            file.seek(tensor.offset)
            digest.update(file.read(tensor.nbytes))
    return digest.hexdigest()


def orchestrators(plugins: Plugins, hub: FakeHub, cache: Path) -> OpenedModel:
    return open_model(plugins.registry.model_source(URI, SourceOptions(cache, hub_endpoint=hub.url)))


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_planning_takes_three_requests_and_little_more_than_the_header(
    name: str, real_models: dict[str, Path], plugins: Plugins, hub: FakeHub, tmp_path: Path
) -> None:
    hub.add("someone/model", "model.gguf", real_models[name].read_bytes())
    model = orchestrators(plugins, hub, tmp_path)
    assert len(hub.seen) <= 3
    assert hub.served <= model.facts.parts[0].header_bytes + 1_000_000
    assert "@" in model.uri


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("smollm2", 1),
        ("smollm2", 2),
        ("smollm2", 3),
        ("smollm2", 5),
        ("gemma3", 2),
        pytest.param("gemma3", 1, marks=pytest.mark.slow),
        pytest.param("gemma3", 3, marks=pytest.mark.slow),
        pytest.param("gemma3", 5, marks=pytest.mark.slow),
    ],
)
def test_a_node_fetches_the_bytes_it_owns_and_no_others(
    name: str,
    count: int,
    real_models: dict[str, Path],
    plugins: Plugins,
    hub: FakeHub,
    tmp_path: Path,
) -> None:
    """Each stage on a host of its own: what is served is at most 1.02 times what the stage owns."""
    hub.add("someone/model", "model.gguf", real_models[name].read_bytes())
    model = orchestrators(plugins, hub, tmp_path / "orchestrator")
    for index in range(count):
        before = hub.served
        message = provision(model, index, count, tmp_path / f"host-{index}")
        told: list[tuple[str, int, int]] = []
        stage, digest = load(message, plugins, hub, told)
        assert digest == expected(model, message, real_models[name])
        assert stage.shard is not None
        assert stage.shard.tensor_bytes <= hub.served - before <= 1.02 * stage.shard.tensor_bytes
        assert stage.network_bytes == hub.served - before
        fetching = [event for event in told if event[0] == "fetch" and event[2]]
        assert fetching[0] == ("fetch", 0, stage.shard.range_bytes)
        assert fetching[-1] == ("fetch", stage.shard.range_bytes, stage.shard.range_bytes)
        assert told[-1] == ("load", stage.shard.tensor_bytes, stage.shard.tensor_bytes)


@pytest.mark.parametrize("name", ["smollm2", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_two_stages_on_one_host_fetch_no_byte_twice(
    name: str, real_models: dict[str, Path], plugins: Plugins, hub: FakeHub, tmp_path: Path
) -> None:
    """At the same time, and with the orchestrator's header in the same cache; both own the tied embedding."""
    data = real_models[name].read_bytes()
    hub.add("someone/model", "model.gguf", data)
    model = orchestrators(plugins, hub, tmp_path)
    messages = [provision(model, index, 2, tmp_path) for index in range(2)]
    digests: dict[int, str] = {}

    def run(index: int) -> None:
        digests[index] = load(messages[index], plugins, hub)[1]

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert digests == {index: expected(model, messages[index], real_models[name]) for index in range(2)}
    assert hub.served <= len(data)
    before = hub.served
    assert load(messages[0], plugins, hub)[1] == digests[0]  # a restart needs nothing
    assert hub.served == before


def test_a_node_that_sees_another_version_reads_the_header_and_says_so(
    plugins: Plugins, hub: FakeHub, tmp_path: Path
) -> None:
    data = smollm2_path().read_bytes()
    hub.add("someone/model", "model.gguf", data)
    model = orchestrators(plugins, hub, tmp_path / "orchestrator")
    message = provision(model, 0, 2, tmp_path / "node")
    message.part_fingerprints[0] = "another"
    assert load(message, plugins, hub)[1] == expected(model, message, smollm2_path())
    message = provision(model, 0, 2, tmp_path / "other-node")
    message.part_fingerprints[0] = "another"
    message.header_digest = bytes(32)
    with pytest.raises(ModelError) as caught:
        load(message, plugins, hub)
    assert caught.value.reason == "different-model"


def test_a_file_that_changes_while_a_stage_is_loaded_gives_an_error_and_no_stage(
    plugins: Plugins, hub: FakeHub, tmp_path: Path
) -> None:
    data = smollm2_path().read_bytes()
    hub.add("someone/model", "model.gguf", data)
    model = orchestrators(plugins, hub, tmp_path / "orchestrator")
    hub.bytes_per_s = 20e6
    message = provision(model, 1, 2, tmp_path / "node")

    def change() -> None:
        time.sleep(0.4)
        hub.swap("someone/model", "model.gguf", data[:-1000] + bytes(1000))

    thread = threading.Thread(target=change)
    thread.start()
    with pytest.raises(ModelError) as caught:
        load(message, plugins, hub)
    thread.join()
    assert caught.value.reason == "model-changed"


def test_a_flipped_byte_in_a_whole_model_gives_an_error_and_no_stage(
    plugins: Plugins, hub: FakeHub, tmp_path: Path
) -> None:
    data = smollm2_path().read_bytes()
    hub.add("someone/model", "model.gguf", data)
    model = orchestrators(plugins, hub, tmp_path)
    hub.fail(Fault(flip_at=1_000_000))
    with pytest.raises(ModelError) as caught:
        load(provision(model, 0, 1, tmp_path), plugins, hub)
    assert caught.value.reason == "model-corrupt"
    message = provision(model, 0, 1, tmp_path)
    assert load(message, plugins, hub)[1] == expected(model, message, smollm2_path())


# Kill -9

LOADER = """
import hashlib, json, sys
from pathlib import Path
from types import SimpleNamespace
from myelin.engine.contract import LoadReport
from myelin.plugins.registry import Registry
from myelin.wire import control_pb2 as control
from myelin.worker.provision import load_stage, stage_request

class Engine:
    def load(self, shard, progress):
        digest = hashlib.sha256()
        for name in shard.names:
            digest.update(shard.read(name).tobytes())
        self.digest = digest.hexdigest()
        return LoadReport(0, 0, 0.0)
    def close(self): pass

registry, engine = Registry.discover(), Engine()
plugins = SimpleNamespace(engine=lambda name, options: engine, model_source=registry.model_source)
message = control.Provision.FromString(bytes.fromhex(sys.argv[1]))
request = stage_request(message, default_engine="digest", default_cache_dir=Path("/nowhere"), default_threads=1)
print("begin", flush=True)
stage = load_stage(request, plugins, {"HF_ENDPOINT": sys.argv[2], "HF_HUB_CACHE": "/nonexistent"}, lambda *_: None)
print(json.dumps({"digest": engine.digest, "network": stage.network_bytes}))
"""


def start_loader(message: control.Provision, hub: FakeHub) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", LOADER, message.SerializeToString().hex(), hub.url]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "begin\n"
    return process


def wait_until_noticed(hub: FakeHub) -> None:
    """Until the hub has found out that its clients are gone: then it counts nothing more.

    A client may be killed while its connections wait to be accepted. They are accepted in their order: once somebody
    who came later has an answer, they have been.
    """
    for url in (hub.url, hub.store_url):
        with closing(HTTPConnection(urlsplit(url).netloc, timeout=150)) as later:
            later.request("HEAD", "/")
            later.getresponse().read()
    while hub.open_connections:
        time.sleep(0.01)


def held_bytes(cache: Path) -> int:
    return sum(entry.held_bytes for entry in ModelCache(cache).entries())


@pytest.mark.parametrize("times", [5, pytest.param(50, marks=pytest.mark.soak)])
def test_a_fetch_that_is_killed_goes_on_where_it_was(
    times: int, plugins: Plugins, hub: FakeHub, tmp_path: Path
) -> None:
    """Kill -9 at random moments, until the stage is there: at most a cell for each connection is lost each time."""
    hub.add("someone/model", "model.gguf", smollm2_path().read_bytes())
    model = orchestrators(plugins, hub, tmp_path / "orchestrator")
    chance = random.Random(times)
    killed = 0
    while killed < times:
        cache = tmp_path / f"node-{killed}"
        message = provision(model, 1, 2, cache)
        hub.bytes_per_s = 6e6
        lost = 0
        for _ in range(3):
            held_before, served_before = held_bytes(cache), hub.served
            process = start_loader(message, hub)
            time.sleep(chance.uniform(0.05, 0.8))
            process.send_signal(signal.SIGKILL)
            process.wait()
            process.stdout.close()  # type: ignore[union-attr]  # it is a pipe
            wait_until_noticed(hub)
            killed += 1
            came = hub.served - served_before
            kept = held_bytes(cache) - held_before
            assert came - kept <= CONNECTIONS * CELL_BYTES
            lost += came - kept
        hub.bytes_per_s = 0.0
        served, held = hub.served, held_bytes(cache)
        process = start_loader(message, hub)
        out, _ = process.communicate(timeout=150)
        answer = json.loads(out)
        assert answer["digest"] == expected(model, message, smollm2_path())
        plan_bytes = held_bytes(cache)
        assert hub.served - served == answer["network"] == plan_bytes - held  # the missing, and nothing else
