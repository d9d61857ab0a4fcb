"""``myelin cache``, ``inspect --memory`` and ``plan --nodes``: what they answer, and what they refuse."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from myelin.cli.nodes_file import read_nodes
from myelin.cli.quantities import parse_bytes, parse_rate, parse_seconds
from myelin.errors import ConfigError, UsageError
from myelin.planner.what_if import Machine
from myelin_testkit.hub import FakeHub
from myelin_testkit.synthetic import Recipe, write_model

Myelin = Callable[..., tuple[int, str, str]]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(Recipe(n_layers=4), tmp_path / "small.gguf")[0]


@pytest.fixture
def hub(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with FakeHub() as hub:
        hub.add("someone/model", "small.gguf", model.read_bytes())
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("MYELIN_MODEL_CACHE_DIR", str(tmp_path / "cache"))
        yield hub


# Amounts


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GB", 24 * 10**9),
        ("16GiB", 16 << 30),
        ("1.5 MB", 1_500_000),
        ("512kb", 512_000),
        ("7", 7),
        ("2t", 2 * 10**12),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "rate"), [("936GB/s", 936e9), ("1Gbit/s", 1.25e8), ("100Mbps", 1.25e7), ("10GiB/s", 10 * 2.0**30)]
)
def test_rates(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize(("text", "seconds"), [("20ms", 0.02), ("150us", 150e-6), ("0.5s", 0.5), ("0ms", 0.0)])
def test_times(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "24XB", "24G B", "0GB", "1e9", "nan"])
def test_nonsense_is_refused(text: str) -> None:
    for parse in (parse_bytes, parse_rate, parse_seconds):
        with pytest.raises(UsageError) as caught:
            parse(text)
        assert caught.value.hint


# The cache


def test_the_cache_shows_what_is_held_and_lets_it_go(myelin: Myelin, hub: FakeHub, model: Path, tmp_path: Path) -> None:
    assert json.loads(myelin("cache", "list", "--json")[1])["files"] == []
    assert "holds nothing" in myelin("cache", "list")[1]
    assert myelin("inspect", "hf:someone/model/small.gguf")[0] == 0
    code, out, _ = myelin("cache", "list", "--json")
    (file,) = json.loads(out)["files"]
    assert code == 0
    assert file["source"].startswith("hf:someone/model/small.gguf")
    assert file["size"] == model.stat().st_size
    assert file["held_bytes"] == hub.served
    assert Path(file["path"]).stat().st_size == file["size"]
    assert "small.gguf" in myelin("cache", "list")[1]
    assert json.loads(myelin("cache", "prune", "--older-than", "1d", "--json")[1])["deleted"] == []
    assert json.loads(myelin("cache", "prune", "--keep", "1GB", "--json")[1])["deleted"] == []
    code, out, _ = myelin("cache", "prune")
    assert code == 0
    assert "deleted hf:someone/model/small.gguf" in out
    assert json.loads(myelin("cache", "list", "--json")[1])["held_bytes"] == 0
    assert myelin("cache", "prune", "--older-than", "soon")[0] == 2


# The doctor


def test_the_doctor_says_what_fits_where(myelin: Myelin, hub: FakeHub) -> None:
    code, out, _ = myelin("inspect", "hf:someone/model/small.gguf", "--memory", "1GB,500MB", "--json")
    document = json.loads(out)
    assert code == 0
    assert document["fit"]["fits"] is True
    assert document["fit"]["memory"] == [10**9, 5 * 10**8]
    stages = document["fit"]["stages"]
    assert [stage["layers"] for stage in stages] == [[0, stages[0]["layers"][1]], [stages[0]["layers"][1], 4]]
    assert all(
        stage["free_bytes"] == size - stage["memory_bytes"]
        for stage, size in zip(stages, document["fit"]["memory"], strict=True)
    )
    text = myelin("inspect", "hf:someone/model/small.gguf", "--memory", "1GB,500MB")[1]
    assert "fits with a context of 512" in text


@pytest.mark.parametrize("memory", ["1MB", "1MB,1MB", "1GB,1GB,1GB,1GB,1GB"])
def test_the_doctor_says_why_it_does_not_fit(myelin: Myelin, model: Path, memory: str) -> None:
    code, out, _ = myelin("inspect", str(model), "--memory", memory, "--json")
    document = json.loads(out)
    assert code == 1
    assert document["servable"] is False
    assert document["fit"]["reason"] in document["problems"]
    assert document["fit"]["hint"]
    assert "does not fit" in myelin("inspect", str(model), "--memory", memory)[1]


def test_a_smaller_context_fits_less_memory(myelin: Myelin, model: Path) -> None:
    needs = []
    for context in ("512", "64"):
        _, out, _ = myelin("inspect", str(model), "--memory", "1GB", "--max-context", context, "--json")
        needs.append(json.loads(out)["fit"]["stages"][0]["memory_bytes"])
    assert needs[1] < needs[0]


def test_memory_that_is_no_amount_is_refused(myelin: Myelin, model: Path) -> None:
    assert myelin("inspect", str(model), "--memory", "much")[0] == 2


# What if

NODES = """
[[node]]
name = "big"
memory = "24GB"
bandwidth = "936GB/s"
link_latency = "20ms"
link_bandwidth = "1Gbit/s"
price_per_hour = 0.25

[[node]]
memory = "16GiB"
bandwidth = "400GB/s"
price_per_hour = 1
count = 2
"""


def test_the_file_of_nodes(tmp_path: Path) -> None:
    (tmp_path / "nodes.toml").write_text(NODES)
    big, one, two = read_nodes(tmp_path / "nodes.toml")
    assert big == Machine("big", 24 * 10**9, 936e9, 0.02, 1.25e8, 0.25)
    assert one == Machine("node-1-0", 16 << 30, 400e9, 0.0, 0.0, 1.0)
    assert two.name == "node-1-1"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no [[node]] tables"),
        ("node = 3", "no [[node]] tables"),
        ("[[nodes]]\nmemory = '1GB'", "'nodes'"),
        ("[[node]]\nbandwidth = '1GB/s'", "memory is missing"),
        ("[[node]]\nmemory = '1GB'", "bandwidth is missing"),
        ("[[node]]\nmemory = '1GB'\nbandwidth = '1GB'", "no bandwidth"),
        ("[[node]]\nmemory = '1GB'\nbandwidth = '1GB/s'\nprize_per_hour = 1", "'prize_per_hour'"),
        ("[[node]]\nmemory = '1GB'\nbandwidth = '1GB/s'\nprice_per_hour = -1", "price_per_hour"),
        ("[[node]]\nmemory = '1GB'\nbandwidth = '1GB/s'\ncount = 0", "count"),
        ("[[node]]\nmemory = '1GB'\nbandwidth = '1GB/s'\ncount = true", "count"),
        ("[[node]]\nmemory = '1GB'\nbandwidth = '1GB/s'\nlink_latency = '20'", "no time"),
        ("[[node", "no TOML"),
    ],
)
def test_a_file_of_nodes_that_makes_no_sense_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "nodes.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_nodes(path)
    assert said in caught.value.message
    assert caught.value.hint


def test_a_file_of_nodes_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        read_nodes(tmp_path / "none.toml")


def test_plan_ranks_what_could_be(myelin: Myelin, model: Path, tmp_path: Path) -> None:
    (tmp_path / "nodes.toml").write_text(NODES)
    code, out, _ = myelin("plan", "--nodes", "nodes.toml", "--model", str(model), "--json")
    document = json.loads(out)
    assert code == 0
    alternatives = document["alternatives"]
    assert [one["rank"] for one in alternatives] == list(range(1, len(alternatives) + 1))
    assert alternatives[0]["nodes"] == ["big"]
    assert {tuple(one["nodes"]) for one in alternatives} == {
        ("big",),
        ("node-1-0",),
        ("big", "node-1-0"),
        ("node-1-0", "node-1-1"),
        ("big", "node-1-0", "node-1-1"),
    }
    seconds = [one["seconds_per_token"] for one in alternatives]
    assert seconds == sorted(seconds)
    assert sum(one["cheapest"] for one in alternatives) == 1
    for one in alternatives:
        assert one["tokens_per_s"] == pytest.approx(1 / one["seconds_per_token"])
        assert one["dollars_per_million_tokens"] == pytest.approx(
            one["dollars_per_hour"] / 3600 * one["seconds_per_token"] * 1e6
        )
        assert one["stages"][-1]["layers"][1] == 4
    text = myelin("plan", "--nodes", "nodes.toml", "--model", str(model))[1]
    assert "big (cheapest)" in text


def test_plan_on_nodes_that_are_too_small_says_so(myelin: Myelin, model: Path, tmp_path: Path) -> None:
    (tmp_path / "nodes.toml").write_text('[[node]]\nmemory = "1MB"\nbandwidth = "1GB/s"\ncount = 2\n')
    code, out, err = myelin("plan", "--nodes", "nodes.toml", "--model", str(model))
    assert (code, out) == (2, "")
    assert "does not fit 2 stages" in err


def test_plan_shows_the_shards(myelin: Myelin, model: Path) -> None:
    code, out, _ = myelin("plan", "-N", "2", "--model", str(model), "--json")
    assert code == 0
    for stage in json.loads(out)["stages"]:
        shard = stage["shard"]
        assert shard["tensors"] == stage["tensors"]
        assert shard["bytes"] == sum(end - start for _, start, end in shard["ranges"]) >= stage["weight_bytes"]
        assert shard["fraction"] == shard["bytes"] / model.stat().st_size
