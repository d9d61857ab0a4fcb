"""A stage reads its own tensors' bytes and no others."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from myelin.errors import ModelError
from myelin.model.architecture import Activation, Hyperparameters, RopeStyle
from myelin.model.facts import ModelFacts, TensorInfo
from myelin.model.gguf import read_facts
from myelin.model.local import JoinedFiles, LocalFile
from myelin.model.quant import GgmlType
from myelin.model.shard import ByteRange, ShardReader, StageSlice, stage_byte_ranges

Header = Any  # the builder and the file of conftest.py, which can't be imported
MemoryFile = Any

PARAMETERS = Hyperparameters(
    architecture="llama",
    n_layers=2,
    width=64,
    n_heads=1,
    n_kv_heads=1,
    head_dim=64,
    value_dim=64,
    ffn_width=64,
    vocab_size=4,
    context_length=16,
    norm_epsilon=1e-5,
    rope_style=RopeStyle.INTERLEAVED,
    rope_dims=64,
    rope_base=1e4,
    rope_base_local=1e4,
    rope_scale=1.0,
    rope_scale_local=1.0,
    attention_scale=0.125,
    embedding_scale=1.0,
    activation=Activation.SILU,
    qkv_bias=False,
    qk_norm=False,
    post_norms=False,
    sliding_window=(0, 0),
    tied_output=True,
)


@pytest.fixture
def model(new_header: Header) -> bytes:
    """Embedding, one tensor in each of two layers, output norm; every byte of the data is its own offset modulo 251."""
    header = new_header().text("general.architecture", "llama")
    header.tensor("token_embd.weight", [64, 4], 8, 0)
    header.tensor("blk.0.ffn_up.weight", [64, 64], 8, 288)
    header.tensor("blk.1.ffn_up.weight", [64, 64], 8, 4640)
    header.tensor("output_norm.weight", [64], 0, 8992)
    header.data = bytes(index % 251 for index in range(8992 + 256))
    data: bytes = header.bytes()
    return data


def test_only_the_stages_own_bytes_are_read(model: bytes, memory_file: MemoryFile) -> None:
    file = memory_file(model)
    facts = read_facts([file])
    file.reads.clear()
    shard = ShardReader(facts, PARAMETERS, StageSlice(0, 1, 2), (file,))
    assert shard.names == ("token_embd.weight", "blk.0.ffn_up.weight")
    assert "blk.1.ffn_up.weight" not in shard
    for name in shard.names:
        shard.read(name)
    assert file.reads == [(facts.tensors[name].offset, facts.tensors[name].nbytes) for name in shard.names]
    assert shard.bytes_read == shard.total_bytes == 4 * 68 + 64 * 68


def test_a_tensor_is_read_as_rows_of_bytes(model: bytes, memory_file: MemoryFile) -> None:
    facts = read_facts([memory_file(model)])
    shard = ShardReader(facts, PARAMETERS, StageSlice(1, 2, 2), (memory_file(model),))
    assert shard.names == ("token_embd.weight", "blk.1.ffn_up.weight", "output_norm.weight")
    whole = shard.read("blk.1.ffn_up.weight")
    assert whole.shape == (64, 68)
    assert whole.dtype == np.uint8
    assert whole.flags.writeable
    assert whole.flags.c_contiguous
    info = shard.info("blk.1.ffn_up.weight")
    assert whole.tobytes() == model[info.offset : info.offset + info.nbytes]
    assert np.array_equal(shard.read_rows("blk.1.ffn_up.weight", 10, 5), whole[10:15])
    assert shard.read_rows("blk.1.ffn_up.weight", 64, 0).shape == (0, 68)
    assert shard.read("output_norm.weight").shape == (1, 256)


@pytest.mark.parametrize(("first", "count"), [(-1, 2), (0, 65), (64, 1), (3, -1)])
def test_rows_outside_the_tensor_are_refused(model: bytes, memory_file: MemoryFile, first: int, count: int) -> None:
    shard = ShardReader(read_facts([memory_file(model)]), PARAMETERS, StageSlice(0, 1, 2), (memory_file(model),))
    with pytest.raises(IndexError):
        shard.read_rows("blk.0.ffn_up.weight", first, count)


def test_another_stages_tensor_is_refused_by_name(model: bytes, memory_file: MemoryFile) -> None:
    shard = ShardReader(read_facts([memory_file(model)]), PARAMETERS, StageSlice(0, 1, 2), (memory_file(model),))
    with pytest.raises(ModelError, match=r"'blk\.1\.ffn_up\.weight' .* belongs to another stage"):
        shard.read("blk.1.ffn_up.weight")
    with pytest.raises(ModelError, match="is not in the model"):
        shard.info("nothing")


def test_files_on_disk_are_read_without_a_copy_and_by_many_threads(
    model: bytes, memory_file: MemoryFile, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(model)
    file = LocalFile(path)
    facts = read_facts([file])
    shard = ShardReader(facts, PARAMETERS, StageSlice(0, 2, 2), (file,))
    expected = {
        name: ShardReader(facts, PARAMETERS, StageSlice(0, 2, 2), (memory_file(model),)).read(name)
        for name in shard.names
    }
    wrong: list[str] = []

    def read_all() -> None:
        wrong.extend(
            name for _ in range(50) for name in shard.names if not np.array_equal(shard.read(name), expected[name])
        )

    threads = [threading.Thread(target=read_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    file.close()
    file.close()
    assert wrong == []
    assert shard.bytes_read == 4 * 50 * shard.total_bytes


def test_a_file_cut_short_while_in_use_is_an_error(model: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(model)
    file = LocalFile(path)
    facts = read_facts([file])
    path.write_bytes(model[:-1])
    shard = ShardReader(facts, PARAMETERS, StageSlice(1, 2, 2), (file,))
    with pytest.raises(ModelError, match="the file ends there"):
        shard.read("output_norm.weight")
    with pytest.raises(ModelError, match="the file ends there"):
        file.read_at(0, len(model))
    file.close()


def _facts(spans: list[tuple[int, int, int]]) -> ModelFacts:
    tensors = {
        f"t{index}": TensorInfo(f"t{index}", GgmlType.I8, (size,), part, offset, size)
        for index, (part, offset, size) in enumerate(spans)
    }
    return ModelFacts("llama", MappingProxyType({}), MappingProxyType(tensors))


def test_neighbours_become_one_range() -> None:
    facts = _facts([(0, 100, 10), (0, 110, 10), (0, 125, 5), (1, 0, 7)])
    names = list(facts.tensors)
    separate = (ByteRange(0, 100, 120), ByteRange(0, 125, 130), ByteRange(1, 0, 7))
    assert stage_byte_ranges(facts, names) == separate
    assert stage_byte_ranges(facts, names, 4) == separate
    assert stage_byte_ranges(facts, names, 5) == (ByteRange(0, 100, 130), ByteRange(1, 0, 7))
    assert stage_byte_ranges(facts, []) == ()


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 400), st.integers(1, 30)), max_size=12),
    st.integers(0, 40),
    st.randoms(use_true_random=False),
)
def test_ranges_hold_every_byte_and_little_else(spans: list[tuple[int, int, int]], gap: int, random: Any) -> None:
    facts = _facts(spans)
    names = list(facts.tensors) * 2
    random.shuffle(names)
    ranges = stage_byte_ranges(facts, names, gap)
    covered = {(r.part, byte) for r in ranges for byte in range(r.start, r.end)}
    wanted = {(part, byte) for part, offset, size in spans for byte in range(offset, offset + size)}
    assert wanted <= covered
    for one, other in pairwise(ranges):
        assert (one.part, one.end + gap) < (other.part, other.start)
    if gap == 0:
        assert wanted == covered


def test_pieces_read_as_one_file(tmp_path: Path) -> None:
    data = bytes(range(200))
    paths = []
    for index, (start, end) in enumerate(((0, 50), (50, 51), (51, 51), (51, 200))):
        paths.append(tmp_path / str(index))
        paths[-1].write_bytes(data[start:end])
    joined = JoinedFiles([LocalFile(path) for path in paths], "whole")
    assert (joined.name, joined.size) == ("whole", 200)
    for start in range(0, 200, 7):
        for length in (0, 1, 2, 60, 200 - start):
            if start + length <= 200:
                assert joined.read_at(start, length) == data[start : start + length]
    with pytest.raises(ModelError, match="its pieces end at 200"):
        joined.read_at(150, 51)
    joined.close()


def test_stage_slices_know_their_ends() -> None:
    assert StageSlice(0, 2, 2).is_head
    assert StageSlice(0, 2, 2).is_tail
    assert not StageSlice(0, 1, 2).is_tail
    assert not replace(StageSlice(0, 2, 2), first_layer=1).is_head
