"""The engine of an offline run: its end releases those that wait for parts."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from pacing import WAIT_S, wait_for

from ddtree_trt.replicas.part_worker import PartWorker
from ddtree_trt.replicas.requests import OfflineRequest, read_requests
from ddtree_trt.serve.options import ServeOptions


def test_closing_ends_the_parts_under_way(tiny_engine: Path, tmp_path: Path) -> None:
    body = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True, "method": "ar"}
    source = tmp_path / "requests.jsonl"
    source.write_text("\n".join([json.dumps(body)] * 24))
    requests: list[OfflineRequest] = read_requests(source, 0)
    worker = PartWorker(tiny_engine, ServeOptions())
    with ThreadPoolExecutor(2) as pool:
        parts = ["\n".join(r.line for r in requests[start : start + 12]) for start in (0, 12)]
        futures = [pool.submit(worker, part) for part in parts]
        wait_for(lambda: worker._app.llm.running > 0)
        worker.close()
        done, late = wait(futures, timeout=WAIT_S)
        assert len(done) == 2 and not late
