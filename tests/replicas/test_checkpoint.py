"""Checkpoints that are broken, or that do not fit the model, are found by their headers."""

from __future__ import annotations

import json
import os
import struct

import pytest

from qreward_plugins.replicas.checkpoint import CheckpointUnusable, read_checkpoint


def written(folder, name="model.safetensors", cut=0, fill=0, **shapes):
    """Write tensors of bytes."""
    folder.mkdir(exist_ok=True)
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for tensor, shape in shapes.items():
        size = shape[0] * shape[1]
        header[tensor] = {"dtype": "U8", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    head = json.dumps(header).encode()
    (folder / name).write_bytes((struct.pack("<Q", len(head)) + head + bytes([fill]) * end)[: -cut or None])
    return folder


def test_names_and_shapes_are_compared_with_the_model(tmp_path):
    model = read_checkpoint(str(written(tmp_path / "model", a=(2, 3), b=(4, 4))))
    same = read_checkpoint(str(written(tmp_path / "same", a=(2, 3), b=(4, 4))))
    assert same.lacks(model) == ""
    assert not same.surely_differs(model)
    other = read_checkpoint(str(written(tmp_path / "other", a=(2, 3), b=(4, 4), fill=1)))
    assert other.surely_differs(model)
    assert len({model.files, same.files, other.files}) == 3  # times count, because samples may miss a change
    fewer = read_checkpoint(str(written(tmp_path / "fewer", a=(2, 3))))
    assert fewer.lacks(model) == "it lacks 1 tensors of the model (b)"
    larger = read_checkpoint(str(written(tmp_path / "larger", a=(2, 4), b=(4, 4))))
    assert larger.lacks(model) == "its tensor a has the shape [2, 4], that of the model [2, 3]"


def test_the_same_files_are_recognised_and_others_at_the_same_place_are_not(tmp_path):
    folder = written(tmp_path / "model", a=(2, 3))
    first = read_checkpoint(str(folder)).files
    (folder / "optimizer.log").write_text("not a part of the model")
    assert read_checkpoint(str(folder)).files == first
    os.utime(folder / "model.safetensors", (1, 1))
    assert read_checkpoint(str(folder)).files != first


def test_what_is_cut_off_or_missing_is_named(tmp_path):
    with pytest.raises(CheckpointUnusable, match="is cut off: it has"):
        read_checkpoint(str(written(tmp_path / "cut", a=(20, 30), cut=5)))
    (tmp_path / "short").mkdir()
    for content in (b"", b"abc", struct.pack("<Q", 2**62), struct.pack("<Q", 2) + b"no"):
        (tmp_path / "short" / "model.safetensors").write_bytes(content)
        with pytest.raises(CheckpointUnusable, match="safetensors"):
            read_checkpoint(str(tmp_path / "short"))
    indexed = written(tmp_path / "indexed", a=(2, 2))
    for index, why in [({"weight_map": {"a": "model-2.safetensors"}}, "lacks model-2"), ([], "cannot be read")]:
        for name in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
            (indexed / name).write_text(json.dumps(index))
            with pytest.raises(CheckpointUnusable, match=why):
                read_checkpoint(str(indexed))
            (indexed / name).unlink()
    # A server would load it, and be left with nothing.
    (indexed / "more.bin").touch()
    with pytest.raises(CheckpointUnusable, match=r"more\.bin is empty"):
        read_checkpoint(str(indexed))


def test_a_header_that_lies_is_refused(tmp_path):
    folder = tmp_path / "lies"
    folder.mkdir()
    whole = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    for lie in ({"data_offsets": [8, 0]}, {"data_offsets": [-4, 8]}, {"shape": [float("inf")]}, {"shape": 2}):
        header = json.dumps({"a": whole, "b": {**whole, **lie}}).encode()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
        with pytest.raises(CheckpointUnusable, match="is no safetensors file"):
            read_checkpoint(str(folder))


def test_folders_within_a_checkpoint_are_none_of_its_files(tmp_path):
    folder = written(tmp_path / "model", a=(2, 3))
    first = read_checkpoint(str(folder)).files
    for name in ("tokenizer", "global_step_7.pt"):
        (folder / name).mkdir()
    (folder / "vocab.json").symlink_to("nowhere")
    assert read_checkpoint(str(folder)).files == first
