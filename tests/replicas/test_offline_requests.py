"""Files of requests: what is one, what is refused, and seeds that follow from a line's place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddtree_trt.errors import UsageError
from ddtree_trt.replicas.requests import read_requests


def written(folder: Path, *lines: object) -> Path:
    path = folder / "requests.jsonl"
    path.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines), encoding="utf-8")
    return path


def test_bodies_alone_and_lines_of_batch_files(tmp_path: Path) -> None:
    whole = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x\u2028y", "seed": 3}}
    chat = {"messages": [{"role": "user", "content": "hi"}], "custom_id": "b"}
    found = read_requests(written(tmp_path, whole, "", chat, {"prompt": "z"}), seed=0)
    assert [(r.custom_id, r.url) for r in found] == [
        ("a", "/v1/completions"),
        ("b", "/v1/chat/completions"),
        ("4", "/v1/completions"),
    ]
    assert json.loads(found[0].body) == whole["body"]
    assert "custom_id" not in json.loads(found[1].body)


def test_a_seed_follows_from_the_line_and_the_run(tmp_path: Path) -> None:
    def seeds(*lines: object, seed: int) -> list[int]:
        return [json.loads(r.body)["seed"] for r in read_requests(written(tmp_path, *lines), seed)]

    same = [{"prompt": "x"}] * 3
    first = seeds(*same, seed=0)
    assert len(set(first)) == 3 and all(0 <= s < 2**32 for s in first)
    assert seeds({"prompt": "other"}, *same[1:], seed=0) == first, "the other lines do not matter"
    assert set(seeds(*same, seed=1)).isdisjoint(first)
    assert seeds({"prompt": "x", "seed": 7}, {"prompt": "x", "seed": None}, seed=0) == [7, first[1]]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "no JSON"),
        ("[1]", "a JSON object is expected"),
        ({"text": "x"}, "either messages or prompt"),
        ({"prompt": "x", "messages": []}, "either messages or prompt"),
        ({"prompt": "x", "stream": True}, "stream cannot be had"),
        ({"prompt": "x", "custom_id": 5}, "custom_id must be a text"),
        ({"custom_id": "q", "url": "/v1/embeddings", "body": {}}, "url must be"),
        ({"custom_id": "q", "url": "/v1/completions", "body": 5}, "body must be an object"),
        ({"prompt": "x", "custom_id": "1"}, "that of an earlier line"),
    ],
)
def test_what_is_no_request_is_named_by_its_line(tmp_path: Path, line: object, complaint: str) -> None:
    path = written(tmp_path, {"prompt": "ok"}, line)
    with pytest.raises(UsageError, match=complaint) as caught:
        read_requests(path, 0)
    assert f"{path}, line 2: " in str(caught.value) and "\n" not in str(caught.value)


def test_no_requests_at_all(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no requests"):
        read_requests(written(tmp_path, "", ""), 0)
    with pytest.raises(UsageError, match="cannot read"):
        read_requests(tmp_path / "none", 0)
