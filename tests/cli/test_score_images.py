"""`qreward score` with images: data URLs and paths below the folder of the file."""

from __future__ import annotations

import base64
import io

import pytest
import yaml

from qreward_plugins.files import read_rollouts
from qreward_plugins.samples.images import Image

Pillow = pytest.importorskip("PIL.Image", reason="Pillow is not installed")


@pytest.fixture
def png():
    target = io.BytesIO()
    Pillow.new("RGB", (8, 6), "red").save(target, format="PNG")
    return target.getvalue()


def test_files_name_paths_or_hold_data_urls(server, run_cli, write_config, write_rows, read_rows, tmp_path, png):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(png)
    (tmp_path.parent / "outside.png").write_bytes(png)
    url = "data:image/png;base64," + base64.b64encode(png).decode()
    path = {"type": "image", "image": "pictures/a.png"}
    rows = [
        {"prompt": "<image>What?", "images": ["pictures/a.png"], "response": "5", "response_images": [url]},
        {"messages": [{"role": "user", "content": [path, {"type": "text", "text": "What?"}]}], "response": "5"},
        {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}], "response": "5"},
        {"prompt": "What?", "images": ["../outside.png"], "response": "5"},
        {"prompt": "What?", "images": ["http://127.0.0.1:9/a.png"], "response": "5"},
        {"prompt": "What?", "images": [f"{url}AA"], "response": "5"},
        {"prompt": "What?", "images": ["pictures/none.png"], "response": "5"},
        {"prompt": "What?", "response": "5"},
    ]
    file = write_rows(rows)
    config = write_config({"a": server})
    tree = yaml.safe_load(config.read_text())
    tree["sources"]["a"]["vision"] = True
    config.write_text(yaml.safe_dump(tree))
    result = run_cli("score", config, file, "-o", tmp_path / "out.jsonl")
    assert result.exit_code == 3, result.output
    written = read_rows(tmp_path / "out.jsonl")
    assert [row["qreward"]["outcome"] for row in written] == ["scored"] * 3 + ["failed"] * 4 + ["scored"]
    assert [row["images"] for row in written if "images" in row] == [row["images"] for row in rows if "images" in row]
    assert "is a path" in written[3]["qreward"]["detail"]
    assert "images are not fetched" in written[4]["qreward"]["detail"]
    assert server.report().requests == 4
    sample = next(read_rollouts(file)).sample
    assert sample.messages[0]["content"][0]["image"] == Image.of(png)
    assert sample.response_images == (Image.of(url),)
    assert "images" not in sample.extras


def test_a_judge_that_sees_no_images_is_not_bothered_by_them(server, run_cli, write_config, write_rows, tmp_path):
    rows = [{"prompt": "What?", "images": ["../../x.png", "http://h/a.png"], "response": "5"}]
    config = write_config({"a": server})
    result = run_cli("score", config, write_rows(rows), "-o", tmp_path / "out.jsonl")
    assert result.exit_code == 0, result.output


def test_a_column_of_images_is_a_list(server, run_cli, write_config, write_rows, tmp_path):
    file = write_rows([{"prompt": "What?", "images": "a.png", "response": "5"}])
    result = run_cli("score", write_config({"a": server}), file, "-o", tmp_path / "out.jsonl")
    assert result.exit_code == 2
    assert "images must be a list of images, not a text" in result.output
