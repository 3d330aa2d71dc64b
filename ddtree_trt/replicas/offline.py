"""Offline runs: the answers to a file of requests, by an engine in this process or by several on a Ray cluster."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from ddtree_trt.artifact.files import MANIFEST, sha256_file
from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.artifact.progress import Progress, no_progress
from ddtree_trt.errors import MAX_COUNT, check_range
from ddtree_trt.replicas.options import ReplicaOptions
from ddtree_trt.replicas.part_worker import PARTS_AT_A_TIME, PartWorker
from ddtree_trt.replicas.parts import open_parts, rows_per_part
from ddtree_trt.replicas.requests import read_requests
from ddtree_trt.runtime.params import MAX_SEED
from ddtree_trt.serve.options import ANSWER_OPTIONS, ServeOptions


@dataclass(frozen=True)
class OfflineResult:
    """What an offline run came to."""

    rows: int  # answers in the output
    refused: int  # of these, answered with an error
    completion_tokens: int
    resumed: int  # rows that an interrupted run had answered


def map_prompts(
    engine_dir: Path,
    source: Path,
    output: Path,
    *,
    options: ServeOptions | None = None,
    replicas: ReplicaOptions | None = None,
    seed: int = 0,
    progress: Progress = no_progress,
) -> OfflineResult:
    """Answer every request of a file, each exactly once, and write the answers in the order of the requests.

    A call that was interrupted, by whatever, is gone on with by the same call. What the server would answer with a
    status below 500 is an answer, a refusal too.

    Args:
        engine_dir: the engine; with replicas at the same path on every machine.
        source: JSON lines, as `read_requests` takes them.
        output: JSON lines in the form of OpenAI's batch output. Until it appears, whole, there is a folder beside it.
        options: those of the server that concern the engine and its answers.
        replicas: engines on a Ray cluster; None: one in this process.
        seed: from which the seeds of requests that state none follow.
        progress: gets the parts that are finished.

    Raises UsageError for a file or an output that cannot be used, ArtifactError for an engine that cannot, EngineError
    when an engine fails; what was answered until then is kept.
    """
    check_range("seed", seed, 0, MAX_SEED)
    engine_dir = engine_dir.resolve()
    load_manifest(engine_dir)
    requests = read_requests(source, seed)
    size = rows_per_part(len(requests))
    parts = [requests[start : start + size] for start in range(0, len(requests), size)]
    options = replace(
        options or ServeOptions(), max_requests=MAX_COUNT, max_waiting=MAX_COUNT, max_body_bytes=1 << 30,
        request_timeout_s=0.0, api_key=None,
    )  # fmt: skip
    run = {
        "engine": sha256_file(engine_dir / MANIFEST),
        "requests": hashlib.sha256("\n".join(request.line for request in requests).encode()).hexdigest(),
        **{name: value for name, value in vars(options).items() if name in ANSWER_OPTIONS},
    }
    with open_parts(output, len(parts), run) as made:
        missing = made.missing()
        todo = {number: "\n".join(request.line for request in parts[number]) for number in missing}
        resumed = len(requests) - sum(len(parts[number]) for number in missing)
        with closing(_answers(engine_dir, options, replicas, todo)) as answers:
            for done, (number, text) in enumerate(answers, len(parts) - len(missing) + 1):
                made.write(number, text)
                progress("parts", done, len(parts))
        result = _result(made.read(), resumed)
        made.join()
    return result


def _answers(
    engine_dir: Path, options: ServeOptions, replicas: ReplicaOptions | None, todo: dict[int, str]
) -> Generator[tuple[int, str], None, None]:
    """Number and answers of each part, in the order in which they are finished."""
    if not todo:
        return
    if replicas is not None:
        from ddtree_trt.replicas.dataset import answers_by_ray

        yield from answers_by_ray(engine_dir, options, replicas, todo)
        return
    # The engine is closed first, which ends the parts that the pool then waits for.
    with ThreadPoolExecutor(PARTS_AT_A_TIME) as pool, closing(PartWorker(engine_dir, options)) as worker:
        futures = {pool.submit(worker, part): number for number, part in todo.items()}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _result(texts: Iterator[str], resumed: int) -> OfflineResult:
    found: Counter[str] = Counter()
    for line in (line for text in texts for line in text.split("\n")[:-1]):
        response = json.loads(line)["response"]
        found["rows"] += 1
        found["refused"] += response["status_code"] != 200
        found["tokens"] += response["body"].get("usage", {}).get("completion_tokens", 0)
    return OfflineResult(found["rows"], found["refused"], found["tokens"], resumed)
