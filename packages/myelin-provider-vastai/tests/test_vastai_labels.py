"""The label says whom a machine is for, and survives anything that others write into labels."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myelin.plugin import Attempt, LaunchKey, NodeId, RunId
from myelin_provider_vastai.labels import MAX_LABEL_CHARACTERS, Label, port_for, read_label, write_label

names = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9-]{0,62}\Z")
keys = st.builds(LaunchKey, names.map(RunId), names.map(NodeId), st.integers(1, 2**32 - 1).map(Attempt))


@given(keys, names)
def test_what_is_written_is_read(key: LaunchKey, offer: str) -> None:
    label = write_label(key, offer)
    assert read_label(label) == Label(key, offer)
    assert len(label) <= MAX_LABEL_CHARACTERS
    assert 1024 < port_for(label) < 32768


@given(keys, keys, names)
def test_different_keys_have_different_labels(one: LaunchKey, other: LaunchKey, offer: str) -> None:
    assert (write_label(one, offer) == write_label(other, offer)) == (one == other)


@given(st.text() | st.none())
def test_any_text_is_read_or_none(text: str | None) -> None:
    label = read_label(text)
    assert label is None or write_label(label.key, label.offer) == text


@pytest.mark.parametrize(
    "text",
    ["", "my box", "myelin.1.run.stage-0.0.5-m6", "myelin.2.run.stage-0.1.5-m6", "myelin.1.run.stage-0.1.5-m6\n"],
)
def test_others_labels_are_not_ours(text: str) -> None:
    assert read_label(text) is None


def test_what_would_not_be_read_again_is_not_written() -> None:
    with pytest.raises(ValueError, match="label"):
        write_label(LaunchKey(RunId("a.b"), NodeId("stage-0"), Attempt(1)), "5-m6")
