"""The file of requests of an offline run: JSON lines, each a request of the server's API."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree_trt.errors import UsageError, shown

_URLS = {"messages": "/v1/chat/completions", "prompt": "/v1/completions"}  # by the field that only this body has


@dataclass(frozen=True)
class OfflineRequest:
    """One line of the file."""

    custom_id: str  # what the answer is found by
    url: str
    body: str  # JSON


def read_requests(path: Path, seed: int) -> list[OfflineRequest]:
    """The requests of a file.

    A line is a line of OpenAI's batch files (`custom_id`, `url`, `body`), or a body alone: an object with `messages` or
    `prompt`, and `custom_id` if wanted, which else is the line's number. A body without a seed gets one that follows
    from `seed` and the line's number, so that an answer depends neither on the others nor on where it is computed.

    Raises UsageError that names the first line that is no request.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    requests: dict[str, OfflineRequest] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            request = _request(line, number, seed)
            if request.custom_id in requests:
                raise UsageError(f"custom_id {shown(request.custom_id)} is that of an earlier line, too")
        except UsageError as error:
            raise UsageError(f"{path}, line {number}: {error}") from error
        requests[request.custom_id] = request
    if not requests:
        raise UsageError(f"{path} has no requests; give one JSON object per line")
    return list(requests.values())


def _request(line: str, number: int, seed: int) -> OfflineRequest:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UsageError(f"no JSON: {error}") from error
    if not isinstance(row, dict):
        raise UsageError(f"a JSON object is expected, not {shown(row)}")
    custom_id = row.pop("custom_id", str(number))
    if not isinstance(custom_id, str):
        raise UsageError(f"custom_id must be a text, not {shown(custom_id)}")
    body: Any = row.get("body", row)
    if not isinstance(body, dict):
        raise UsageError(f"body must be an object, not {shown(body)}")
    if body is not row:
        url = str(row.get("url"))
        if url not in _URLS.values():
            raise UsageError(f"url must be {' or '.join(_URLS.values())}, not {shown(row.get('url'))}")
    else:
        fields = [field for field in _URLS if field in body]
        if len(fields) != 1:
            either = " or ".join(_URLS)
            raise UsageError(f"either {either}, or a body with a url is expected; the object has {shown([*row])}")
        url = _URLS[fields[0]]
    if body.get("stream"):
        raise UsageError("stream cannot be had in a file; leave it out")
    if body.get("seed") is None:
        body["seed"] = int.from_bytes(hashlib.sha256(f"{seed}:{number}".encode()).digest()[:4], "big")
    return OfflineRequest(custom_id, url, json.dumps(body))
