"""Control messages: round trips, bounds, fuzzed bytes, and that the generated code belongs to the .proto file."""

from __future__ import annotations

import importlib.util
import math
import re
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import myelin.wire
from myelin.errors import WireError
from myelin.wire import control_pb2 as control
from myelin.wire.codec import MAX_ENVELOPE_BYTES, MAX_LIST_ENTRIES, TEXT_LIMITS, decode, encode

names = st.from_regex(r"[a-z0-9-]{1,20}", fullmatch=True)
u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
words = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
bodies = st.one_of(
    st.builds(
        lambda run, node, attempt: {"hello": control.Hello(run=run, node=node, attempt=attempt)}, names, names, u32
    ),
    st.builds(lambda nonce: {"ready_query": control.ReadyQuery(nonce=nonce)}, u64),
    st.builds(
        lambda uri, tokens, sizes, digest: {
            "provision": control.Provision(
                model_uri=uri,
                engine="cpu",
                end_tokens=tokens,
                part_sizes=sizes,
                header_digest=digest,
                options=control.EngineOptions(threads=2, kv_dtype="f16"),
            )
        },
        words,
        st.lists(u32, max_size=5),
        st.lists(u64, max_size=5),
        st.binary(max_size=32),
    ),
    st.builds(
        lambda epoch, node, candidates: {
            "open_edges": control.OpenEdges(epoch=epoch, next_node=node, next_candidates=candidates)
        },
        u32,
        names,
        st.lists(names, max_size=4),
    ),
    st.builds(lambda seconds: {"provisioned": control.Provisioned(seconds=seconds)}, st.floats(0, 1e9)),
    st.builds(lambda text: {"failure": control.Failure(reason="engine", message=text, fatal=True)}, words),
    st.sampled_from([{"status_query": control.StatusQuery()}, {"goodbye": control.Goodbye()}]),
)
envelopes = st.builds(lambda trace, body: control.Envelope(traceparent=trace, **body), words, bodies)


@given(envelopes)
def test_an_envelope_comes_back(envelope: control.Envelope) -> None:
    assert decode(encode(envelope)) == envelope


@given(envelopes, st.data())
def test_damaged_bytes_give_an_envelope_or_a_wire_error(envelope: control.Envelope, data: st.DataObject) -> None:
    damaged = bytearray(encode(envelope))
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(damaged)))
    for message in (bytes(damaged), bytes(damaged[:cut])):
        try:
            found = decode(message)
        except WireError:
            continue
        assert found.WhichOneof("body") is not None


@given(st.binary(max_size=300))
def test_any_bytes_give_an_envelope_or_a_wire_error(message: bytes) -> None:
    try:
        decode(message)
    except WireError:
        pass


def test_a_message_without_a_known_body_is_refused() -> None:
    field_99_of_length_0 = b"\x9a\x06\x00"
    for message in (b"", control.Envelope(traceparent="00-x").SerializeToString(), field_99_of_length_0):
        with pytest.raises(WireError, match="no body"):
            decode(message)
    with pytest.raises(WireError, match="no body"):
        encode(control.Envelope())


def test_unknown_fields_inside_a_known_body_are_ignored() -> None:
    body = control.Hello(run="r", node="n", attempt=1).SerializeToString() + b"\x9a\x06\x00"
    message = b"\x52" + bytes([len(body)]) + body
    assert decode(message).hello.run == "r"


BAD = [
    control.Envelope(traceparent="0" * 200, goodbye=control.Goodbye()),
    control.Envelope(hello=control.Hello(run="r" * 64)),
    control.Envelope(hello=control.Hello(run="../x")),
    control.Envelope(hello=control.Hello(node="a b")),
    control.Envelope(open_edges=control.OpenEdges(next_node="a\n")),
    control.Envelope(open_edges=control.OpenEdges(next_candidates=["x" * 256])),
    control.Envelope(open_edges=control.OpenEdges(next_candidates=["x"] * (MAX_LIST_ENTRIES + 1))),
    control.Envelope(provision=control.Provision(model_uri="x" * 5000)),
    control.Envelope(provision=control.Provision(header_digest=b"x" * 65)),
    control.Envelope(provision=control.Provision(options=control.EngineOptions(kv_dtype="x" * 17))),
    control.Envelope(provision=control.Provision(end_tokens=range(MAX_LIST_ENTRIES + 1))),
    control.Envelope(provisioned=control.Provisioned(seconds=math.nan)),
    control.Envelope(provisioned=control.Provisioned(seconds=-1.0)),
    control.Envelope(status=control.Status(busy_seconds=math.inf)),
]


@pytest.mark.parametrize("envelope", BAD)
def test_what_is_out_of_bounds_is_refused_both_ways(envelope: control.Envelope) -> None:
    with pytest.raises(WireError):
        encode(envelope)
    with pytest.raises(WireError):
        decode(envelope.SerializeToString())


def test_a_message_that_is_too_large_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(WireError, match="limit"):
        decode(bytes(MAX_ENVELOPE_BYTES + 1))


def test_a_long_failure_is_cut_rather_than_lost() -> None:
    envelope = control.Envelope(failure=control.Failure(message="x" * 100_000, hint="y" * 100_000))
    found = decode(encode(envelope)).failure
    assert len(found.message) == TEXT_LIMITS["message"]
    assert found.message.endswith("…")
    assert len(found.hint) == TEXT_LIMITS["hint"]


def test_the_generated_code_belongs_to_the_proto_file(tmp_path: Path) -> None:
    """Regenerates with `grpcio-tools` and compares; without that package, compares the schema in the generated code."""
    assert myelin.wire.__file__ is not None
    room = Path(myelin.wire.__file__).parent
    if importlib.util.find_spec("grpc_tools") is None:
        text = (room / "control.proto").read_text()
        assert set(re.findall(r"^message (\w+)", text, re.MULTILINE)) == set(control.DESCRIPTOR.message_types_by_name)
        return
    from grpc_tools import protoc

    arguments = [f"-I{room.parent.parent}", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    assert protoc.main(["protoc", *arguments, str(room / "control.proto")]) == 0
    for name in ("control_pb2.py", "control_pb2.pyi"):
        fresh, ours = [(folder / name).read_text() for folder in (tmp_path / "myelin" / "wire", room)]
        if version("grpcio-tools") != GENERATED_WITH:  # the compiler's version is written into its output
            fresh, ours = [_without_versions(text) for text in (fresh, ours)]
        assert fresh == ours, "run `nox -s proto`"


GENERATED_WITH = "1.85.1"


def _without_versions(text: str) -> str:
    return re.sub(r"# Protobuf Python Version.*|^    \d+,$", "", text, flags=re.MULTILINE)
