"""A file of requests for offline runs, and what its answers must be."""

import json
from pathlib import Path
from typing import Any

from ddtree_trt import LLM, SamplingParams
from ddtree_trt.replicas.offline import read_requests

ROWS = 100  # four parts


def requests_file(folder: Path) -> Path:
    """Completions and chats, greedy and drawn, and one that is refused."""
    path = folder / "requests.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for i in range(ROWS):
            ask: dict[str, Any] = {"max_tokens": 6, "temperature": i % 2 * 0.9}
            if i % 3:
                ask["prompt"] = f"def get_{i}(numbers"
            else:
                ask["messages"] = [{"role": "user", "content": f"There are {i} drawers, each with 32 cards."}]
            if i == 50:
                ask["max_tokens"] = 99999
            file.write(json.dumps(ask) + "\n")
    return path


def texts(output: Path) -> list[tuple[str, str]]:
    """Id and text of each answer; of a refusal its code."""
    found = []
    for line in output.read_text(encoding="utf-8").split("\n")[:-1]:
        row = json.loads(line)
        body = row["response"]["body"]
        if row["response"]["status_code"] == 200:
            choice = body["choices"][0]
            found.append((row["custom_id"], choice["text"] if "text" in choice else choice["message"]["content"]))
        else:
            found.append((row["custom_id"], body["error"]["code"]))
    return found


def by_generate(engine: Path, source: Path) -> list[tuple[str, str]]:
    """The same by `LLM.generate`, one request at a time."""
    found = []
    with LLM(engine) as llm:
        for request in read_requests(source, 0):
            body = json.loads(request.body)
            prompt = body.pop("prompt", None) or body.pop("messages")
            if body["max_tokens"] > 2048:
                found.append((request.custom_id, "context_length_exceeded"))
            else:
                found.append((request.custom_id, llm.generate([prompt], SamplingParams(**body))[0].outputs[0].text))
    return found
