"""The pure parts: names, labels, frames, addresses, reasons, amounts, and what goes into an image."""

from __future__ import annotations

import io
import struct
import tarfile
import threading
import zipfile
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from myelin.plugin import Attempt, Endpoint, LaunchKey, LeaseState, NodeId, ProviderError, RunId, announcement
from myelin_provider_docker import image
from myelin_provider_docker.containers import gpu_request, node_cores, package_folders
from myelin_provider_docker.daemon import Daemon
from myelin_provider_docker.frames import frames, log_line, unix_time
from myelin_provider_docker.labels import container_name, key_of, labels_of
from myelin_provider_docker.section import DockerSection, memory_bytes
from myelin_provider_docker.standing import endpoint_of, exit_reason, last_told, lease_of

identifiers = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9-]{0,62}\Z")
keys = st.builds(
    lambda run, node, attempt: LaunchKey(RunId(run), NodeId(node), Attempt(attempt)),
    identifiers,
    identifiers,
    st.integers(1, 2**32 - 1),
)


@given(keys, st.text())
def test_a_key_is_found_again_in_its_labels(key: LaunchKey, offer: str) -> None:
    assert key_of(labels_of(key, offer)) == key


@given(keys, keys)
def test_keys_have_names_of_their_own(one: LaunchKey, other: LaunchKey) -> None:
    assert (container_name(one) == container_name(other)) == (one == other)


@pytest.mark.parametrize(
    "labels", [None, {}, {"myelin.run": "r"}, {"myelin.run": "r", "myelin.node": "n", "myelin.attempt": "x"}]
)
def test_other_containers_have_no_key(labels: dict[str, str] | None) -> None:
    assert key_of(labels) is None


def frame(stream: int, payload: bytes) -> bytes:
    return struct.pack(">BxxxL", stream, len(payload)) + payload


@given(st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(max_size=200))), st.integers(1, 64), st.integers(0, 9))
def test_frames_are_what_was_sent_however_it_is_cut(sent: list[tuple[int, bytes]], most: int, lost: int) -> None:
    data = b"".join(frame(stream, payload) for stream, payload in sent)
    source = io.BytesIO(data)
    whole = list(frames(lambda count: source.read(min(count, most))))
    assert whole == [("stdout" if stream == 1 else "stderr", payload) for stream, payload in sent]
    cut = list(frames(io.BytesIO(data[: max(0, len(data) - lost)]).read))
    assert cut == whole[: len(cut)]


@given(st.binary(max_size=300))
def test_anything_else_is_no_frame_and_no_error(data: bytes) -> None:
    for stream, _ in frames(io.BytesIO(data).read):
        assert stream in ("stdout", "stderr")


def test_a_line_has_its_stream_text_and_time() -> None:
    line = log_line("stderr", b"2026-11-30T21:08:22.123456789Z a line\r\n")
    assert line is not None
    assert (line.stream, line.text) == ("stderr", "a line")
    assert line.time == pytest.approx(datetime(2026, 11, 30, 21, 8, 22, 123457, UTC).timestamp(), abs=1e-6)
    assert unix_time("nonsense") == 0.0


def test_an_announcement_is_no_line_for_people() -> None:
    told = announcement(Endpoint(("0.0.0.0:19700",))).encode()
    assert log_line("stdout", b"2026-11-30T21:08:22Z " + told + b"\n") is None
    assert log_line("stderr", b"2026-11-30T21:08:22Z " + told + b"\n") is not None


def summary(state: str = "running", *, networks: object = None, ports: object = ()) -> dict[str, object]:
    key = LaunchKey(RunId("r"), NodeId("stage-0"), Attempt(2))
    return {
        "Id": "0123456789abcdef" * 4,
        "State": state,
        "Labels": labels_of(key, "docker"),
        "NetworkSettings": {"Networks": networks},
        "Ports": ports,
    }


BRIDGE = {"bridge": {"IPAddress": "172.17.0.2"}}
PORTS = [{"IP": "127.0.0.1", "PrivatePort": 19700, "PublicPort": 32768, "Type": "tcp"}]
ANNOUNCED = Endpoint(("0.0.0.0:19700",))


@pytest.mark.parametrize(
    ("networks", "ports", "inside_first", "host", "candidates"),
    [
        (BRIDGE, PORTS, True, "127.0.0.1", ("172.17.0.2:19700", "127.0.0.1:32768")),
        (BRIDGE, PORTS, False, "127.0.0.1", ("127.0.0.1:32768", "172.17.0.2:19700")),
        (BRIDGE, [{**PORTS[0], "IP": "0.0.0.0"}], False, "gpu.lan", ("gpu.lan:32768", "172.17.0.2:19700")),
        (BRIDGE, [{**PORTS[0], "IP": "::"}, *PORTS], True, "127.0.0.1", ("172.17.0.2:19700", "127.0.0.1:32768")),
        (BRIDGE, [{**PORTS[0], "IP": "10.0.0.5"}], False, "x", ("10.0.0.5:32768", "172.17.0.2:19700")),
        (BRIDGE, [{"PrivatePort": 8080, "PublicPort": 1}], True, "x", ("172.17.0.2:19700",)),
        ({"host": {"IPAddress": ""}}, (), True, "x", ("0.0.0.0:19700",)),
        ({"bridge": {"IPAddress": ""}}, (), True, "x", None),
        (None, None, True, "x", None),
    ],
)
def test_addresses(networks: object, ports: object, inside_first: bool, host: str, candidates: object) -> None:
    found = endpoint_of(summary(networks=networks, ports=ports), ANNOUNCED, daemon_host=host, inside_first=inside_first)
    assert (found and found.candidates) == candidates


@pytest.mark.parametrize(
    ("state", "announced", "expected"),
    [
        ("created", False, LeaseState.STARTING),
        ("running", False, LeaseState.STARTING),
        ("running", True, LeaseState.RUNNING),
        ("paused", True, LeaseState.RUNNING),
        ("exited", False, LeaseState.EXITED),
        ("dead", False, LeaseState.EXITED),
        ("removing", True, LeaseState.EXITED),
    ],
)
def test_states(state: str, announced: bool, expected: LeaseState) -> None:
    lease = lease_of(summary(state), ANNOUNCED if announced else None, "why")
    assert lease is not None
    assert lease.state is expected
    assert lease.id == "0123456789ab"
    assert (lease.endpoint is not None) == (expected is LeaseState.RUNNING)
    assert bool(lease.exit_reason) == (expected is LeaseState.EXITED)


@pytest.mark.parametrize(
    ("state", "limit", "last", "reason"),
    [
        ({"ExitCode": 137, "OOMKilled": True}, 512 << 20, "", "ran out of memory (its limit of 512 MiB)"),
        ({"ExitCode": 137, "OOMKilled": True}, 0, "", "ran out of memory (that of the machine)"),
        ({"ExitCode": 137}, 0, "", "was killed (SIGKILL)"),
        ({"ExitCode": 143}, 0, "", "was ended by SIGTERM"),
        ({"ExitCode": 139}, 0, "", "crashed (SIGSEGV)"),
        ({"ExitCode": 0}, 0, "noise", "ended by itself (status 0)"),
        ({"ExitCode": 1}, 0, " it broke ", "exited with status 1: it broke"),
        ({"ExitCode": 255}, 0, "", "exited with status 255"),
        (
            {"ExitCode": 127, "Error": 'exec: "python":\nnot found'},
            0,
            "",
            'could not be run: exec: "python": not found',
        ),
        ({"ExitCode": 0, "Status": "removing"}, 0, "", "is being removed"),
    ],
)
def test_reasons(state: dict[str, object], limit: int, last: str, reason: str) -> None:
    told = exit_reason(state, limit, last)
    assert reason in told
    assert "\n" not in told


def test_the_last_word_is_the_last_that_is_one() -> None:
    assert last_told(["a", "b", " ", ""]) == "b"
    assert last_told([]) == ""


@pytest.mark.parametrize(
    ("text", "amount"), [("512m", 512 << 20), ("4g", 4 << 30), ("1.5G", 3 << 29), ("1024", 1024), ("8GiB", 8 << 30)]
)
def test_amounts(text: str, amount: int) -> None:
    assert memory_bytes(text) == amount


@pytest.mark.parametrize(
    "wrong",
    [
        {"memory": "lots"},
        {"memory": "1k"},
        {"gpus": "two"},
        {"gpus": "0"},
        {"cpus": -1},
        {"network": "none"},
        {"imgae": "x"},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        DockerSection.model_validate(wrong)


def test_gpus_as_docker_run_takes_them() -> None:
    assert gpu_request("all")["Count"] == -1
    assert gpu_request("2")["Count"] == 2
    assert gpu_request("device=0,GPU-8f6d")["DeviceIDs"] == ["0", "GPU-8f6d"]
    assert gpu_request("all")["Capabilities"] == [["gpu"]]


@pytest.mark.parametrize(
    ("machine", "nodes", "limit", "cores"), [(8, 2, 0, 4), (2, 3, 0, 1), (8, 2, 1.5, 1), (8, 2, 0.5, 1), (4, 0, 0, 4)]
)
def test_cores(machine: int, nodes: int, limit: float, cores: int) -> None:
    assert node_cores(machine, nodes, limit) == cores


def test_packages_are_found_by_their_folder() -> None:
    files = [Path("/v/lib/site-packages/m/a.gguf"), Path("/v/lib/site-packages/m2/b.gguf"), Path("/data/c.gguf")]
    assert package_folders(files) == ["/v/lib/site-packages"]


def test_the_image_has_a_default_for_each_kind() -> None:
    assert DockerSection().image_name.startswith("myelin-node:")
    assert DockerSection.model_validate({"gpus": "all"}).image_name.endswith("-cuda")
    assert DockerSection.model_validate({"image": "mine:1"}).image_name == "mine:1"


def test_an_image_has_this_version_of_what_a_node_needs() -> None:
    assert image.requirements(image.ImageRequest(), "1.2") == ["myelin-core==1.2", "myelin-worker-cpu==1.2"]
    with_gpu = image.requirements(image.ImageRequest(cuda=True, packages=("acme>=1",)), "1.2")
    assert with_gpu[2:] == ["myelin-worker-triton==1.2", "acme>=1"]
    assert image.build_arguments(image.ImageRequest()) == {"VARIANT": "cpu"}
    told = image.build_arguments(image.ImageRequest(cuda=True, base="b:1", wheels=Path("w")))
    assert told == {"VARIANT": "cuda", "BASE": "b:1", "PIP_NO_INDEX": "1"}


def test_the_context_has_all_that_the_dockerfile_names_and_packs_the_same_each_time(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "a-1-py3-none-any.whl").write_bytes(b"wheel")
    packed = []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        image.fill_context(folder, image.ImageRequest(wheels=wheels), "1.2", lambda line: None)
        archive = io.BytesIO()
        image.pack(folder, archive)
        packed.append(archive.getvalue())
    assert packed[0] == packed[1]
    with tarfile.open(fileobj=io.BytesIO(packed[0])) as tar:
        names = set(tar.getnames())
        dockerfile = tar.extractfile("Dockerfile")
        assert dockerfile is not None
        text = dockerfile.read().decode()
    assert names == {"Dockerfile", "constraints.txt", "requirements.txt", "wheels", "wheels/a-1-py3-none-any.whl"}
    assert "@sha256:" in text.splitlines()[4], "the base is pinned to its content"
    assert "USER 10001" in text
    assert image.constraints() == (Path(__file__).parents[3] / "constraints.txt").read_text()


@pytest.mark.parametrize("stalls", [True, False])
def test_output_of_which_the_rest_does_not_come_is_unknown_and_not_empty(stalls: bool) -> None:
    told = frame(1, b"up\n") + frame(1, announcement(Endpoint(("0.0.0.0:19700",))).encode() + b"\n")
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            version = self.path.endswith("/version")
            body = b'{"ApiVersion": "1.41"}' if version else told
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body if version or not stalls else body[:9])
            if stalls and not version:
                over.wait(60)

        def log_message(self, format: str, *arguments: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        timeout_s = 0.3 if stalls else 60.0
        section = DockerSection.model_validate(
            {"host": f"tcp://127.0.0.1:{server.server_address[1]}", "timeout_s": timeout_s}
        )
        daemon = Daemon(section, {})
        try:
            if stalls:
                with pytest.raises(ProviderError) as caught:
                    daemon.announced("c0ffee")
                assert caught.value.reason == "daemon-timeout"
            else:
                assert daemon.announced("c0ffee") == Endpoint(("0.0.0.0:19700",))
        finally:
            over.set()
            daemon.close()
            server.shutdown()


def test_a_folder_without_wheels_is_an_error(tmp_path: Path) -> None:
    target = tmp_path / "context"
    target.mkdir()
    with pytest.raises(ProviderError, match="no wheels"):
        image.fill_context(target, image.ImageRequest(wheels=tmp_path), "1", lambda line: None)


def test_a_wheel_of_this_package_has_what_an_image_is_built_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_BUILD_ISOLATION", "0")  # pip's way of saying: with what is installed here
    tree = Path(__file__).parents[1]
    image.make_wheel(tree, tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("myelin_provider_docker/node/Dockerfile").decode() == image.dockerfile()
        assert archive.read("myelin_provider_docker/node/constraints.txt").decode() == image.constraints()


def test_a_tree_that_is_none_says_so(tmp_path: Path) -> None:
    with pytest.raises(ProviderError, match="no wheel could be made") as caught:
        image.make_wheel(tmp_path / "nothing", tmp_path)
    assert "--wheels" in caught.value.hint


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ('{"url": "file://FOLDER", "dir_info": {"editable": true}}', True),
        ('{"url": "file://FOLDER/nothing", "dir_info": {}}', False),
        ('{"url": "https://example.org/a.whl"}', False),
        ("not JSON", False),
        (None, False),
    ],
)
def test_a_source_tree_is_known_by_its_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str | None, expected: bool
) -> None:
    (tmp_path / "pyproject.toml").write_text("")

    class Installed:
        @staticmethod
        def read_text(name: str) -> str | None:
            assert name == "direct_url.json"
            return told and told.replace("FOLDER", str(tmp_path))

    monkeypatch.setattr(image.metadata, "distribution", lambda name: Installed)
    assert image.source_tree("myelin-core") == (tmp_path if expected else None)


def test_a_build_that_fails_tells_its_last_words() -> None:
    said: list[str] = []
    steps = [
        {"stream": "Step 1/2 : FROM base\n"},
        {"stream": "\n"},
        {"stream": "No matching distribution found\n"},
        {"error": "The command returned a non-zero code: 1"},
    ]
    with pytest.raises(ProviderError, match="non-zero code") as caught:
        image._followed(steps, "myelin-node:1", said.append)
    assert caught.value.reason == "image-build"
    assert "No matching distribution found" in caught.value.hint
    assert said == ["Step 1/2 : FROM base", "No matching distribution found"]
    assert image._followed([{"stream": "ok"}, {"aux": {"ID": "sha256:1"}}], "n", said.append) == "sha256:1"


def test_the_command_says_in_two_lines_that_there_is_no_daemon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from myelin.cli.main import main

    assert main(["docker", "build", "--host", f"unix://{tmp_path}/nothing.sock"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split(":")[0] for line in err.splitlines()] == ["Error", "Hint"]
    assert "nothing.sock" in err


def test_the_command_is_told_of_only_when_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    from myelin.cli.main import main

    assert main(["docker", "--help"]) == 0
    assert "build" in capsys.readouterr().out
    assert main(["no-such-command"]) == 2
