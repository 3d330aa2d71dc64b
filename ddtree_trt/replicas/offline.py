"""Offline runs: the answers to a file of requests, by an engine in this process or by several on a Ray cluster."""

import asyncio
import errno
import fcntl
import hashlib
import json
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ddtree_trt.artifact.files import MANIFEST, sha256_file
from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.artifact.progress import Progress, no_progress
from ddtree_trt.errors import MAX_COUNT, DDTreeError, EngineError, UsageError, check_range, shown
from ddtree_trt.runtime.params import MAX_SEED
from ddtree_trt.runtime.values import check_text
from ddtree_trt.serve.app import open_app
from ddtree_trt.serve.options import ANSWER_OPTIONS, ReplicaOptions, ServeOptions

Row = dict[str, Any]  # an answer as a line of OpenAI's batch output
Ask = Callable[["OfflineRequest"], Awaitable[Row]]  # of an engine
Starting = Callable[[], Awaitable[None]]  # waits until an engine is there
_URLS = {"messages": "/v1/chat/completions", "prompt": "/v1/completions"}  # by the field that only this body has
_ENDS = ".part", ".tmp"  # of files beside the output while it is made
_REQUESTS_PER_SLOT = 2  # under way at a time, so that the next is there when one ends


@dataclass(frozen=True)
class OfflineRequest:
    custom_id: str  # what the answer is found by
    url: str
    body: str  # JSON


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
    """Answer every request of a file, each once, and write the answers in the order of the requests. A call that was
    interrupted is gone on with by the same call. A refusal, with a status below 500, is an answer, too.

    Args:
        engine_dir: the engine; with replicas at the same path on every machine.
        source: JSON lines, as `read_requests` takes them.
        output: JSON lines in the form of OpenAI's batch output. Until it appears, whole, `OUTPUT.part` has the answers.
        options: those of the server that concern the engine and its answers.
        replicas: engines on a Ray cluster; None: one in this process.
        seed: from which the seeds of requests that state none follow.
        progress: gets the requests that are answered.

    Raises UsageError for a file or an output that cannot be used, ArtifactError for an engine that cannot, EngineError
    when an engine fails; what was answered until then is kept.
    """
    check_range("seed", seed, 0, MAX_SEED)
    engine_dir = engine_dir.resolve()
    slots = load_manifest(engine_dir).limits.max_batch
    if source.resolve() in [output.resolve().parent / f"{output.name}{end}" for end in ("", *_ENDS)]:
        raise UsageError(f"{source} is what {output} is written by; choose another --output-file")
    requests = read_requests(source, seed)
    options = replace(
        options or ServeOptions(), max_requests=MAX_COUNT, max_waiting=MAX_COUNT, max_body_bytes=1 << 30,
        request_timeout_s=0.0, api_key=None,
    )  # fmt: skip
    run = {
        "engine": sha256_file(engine_dir / MANIFEST),
        "seed": seed,
        "requests": hashlib.sha256(json.dumps([astuple(r) for r in requests]).encode()).hexdigest(),
        **{name: value for name, value in vars(options).items() if name in ANSWER_OPTIONS and name != "threads"},
    }
    with closing(_Answers(output, run)) as answers:
        resumed = len(answers.places)
        todo = [request for request in requests if request.custom_id not in answers.places]
        if todo:

            def answered(row: Row) -> None:
                answers.append(row)
                progress("requests", len(answers.places), len(requests))

            opened = _engines(engine_dir, options, replicas, len(todo)) if replicas else _engine(engine_dir, options)
            with opened as engines:
                _run(_spread(engines, todo, _REQUESTS_PER_SLOT * slots, answered))
        return answers.finish([request.custom_id for request in requests], resumed)


def read_requests(path: Path, seed: int) -> list[OfflineRequest]:
    """The requests of a file. Raises UsageError that names the first line that is none.

    A line is a line of OpenAI's batch files (`custom_id`, `url`, `body`), or a body alone: an object with `messages` or
    `prompt`, and `custom_id` if wanted, which else is the line's number. A body without a seed gets one that follows
    from `seed` and the line's number, so that an answer depends neither on the others nor on where it is computed.
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
    except (ValueError, RecursionError) as error:
        raise UsageError(f"no JSON: {error}") from error
    if not isinstance(row, dict):
        raise UsageError(f"a JSON object is expected, not {shown(row)}")
    custom_id, body = row.pop("custom_id", str(number)), row.get("body", row)
    if not isinstance(custom_id, str) or not isinstance(body, dict):
        raise UsageError(f"custom_id must be a text and body an object, not {shown(custom_id)} and {shown(body)}")
    check_text("custom_id", custom_id)
    urls: list[Any] = [url for field, url in _URLS.items() if field in row] if body is row else [row.get("url")]
    if len(urls) != 1 or urls[0] not in _URLS.values():
        either, known = " or ".join(_URLS), " or ".join(_URLS.values())
        raise UsageError(f"either {either}, or a body with the url {known} is expected, not {shown(row)}")
    if body.get("stream"):
        raise UsageError("stream cannot be had in a file; leave it out")
    if body.get("seed") is None:
        body["seed"] = int.from_bytes(hashlib.sha256(f"{seed}:{number}".encode()).digest()[:4], "big")
    return OfflineRequest(custom_id, urls[0], json.dumps(body))


async def _spread(
    engines: Mapping[Ask, Starting], todo: Sequence[OfflineRequest], each: int, answered: Callable[[Row], None]
) -> None:
    """Answer the requests, `each` at a time by an engine, until the last one is answered or one fails. `engines`: how
    to ask each, and how to wait until it can be. `answered` gets the answers as they come."""
    left, count = iter(todo), 0

    async def work(ask: Ask, starting: Starting) -> None:
        nonlocal count
        await starting()
        for request in left:
            answered(await ask(request))
            count += 1

    workers = [asyncio.ensure_future(work(*engine)) for engine in engines.items() for _ in range(each)]
    pending = {*workers}
    try:
        while count < len(todo):  # the worker of the last answer ends with it; another engine may never be there
            done, pending = await asyncio.wait(pending, return_when=FIRST_COMPLETED)
            for worker in done:
                worker.result()
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


class _Engine:
    """An engine with the server's application, which answers requests on the event loop that calls it."""

    def __init__(self, engine_dir: Path, options: ServeOptions) -> None:
        _, self._app = open_app(engine_dir, options)

    async def answer(self, request: OfflineRequest) -> Row:
        received = [{"type": "http.request", "body": request.body.encode(), "more_body": False}]
        sent: list[Any] = []

        async def receive() -> Any:
            return received.pop() if received else await asyncio.Future()

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": request.url, "raw_path": request.url.encode(), "query_string": b"", "root_path": "",
            "headers": [(b"content-type", b"application/json")], "client": None, "server": None,
        }  # fmt: skip
        await self._app(scope, receive, send)
        status, body = sent[0]["status"], b"".join(message.get("body", b"") for message in sent)
        if status >= 500:
            raise EngineError(f"request {request.custom_id}: {body.decode(errors='replace')}")
        answer = json.loads(body)
        response = {"status_code": status, "request_id": answer.get("id", ""), "body": answer}
        name = request.custom_id
        return {"id": f"batch_req_{name}", "custom_id": name, "response": response, "error": None}

    def close(self) -> None:
        self._app.close()


@contextmanager
def _engine(engine_dir: Path, options: ServeOptions) -> Iterator[dict[Ask, Starting]]:
    with closing(_Engine(engine_dir, options)) as engine:
        yield {engine.answer: partial(asyncio.sleep, 0)}  # it is there


@contextmanager
def _engines(
    engine_dir: Path, options: ServeOptions, replicas: ReplicaOptions, requests: int
) -> Iterator[dict[Ask, Starting]]:
    """Engines as Ray's actors, no more than there are requests. One that is lost is started again, with its work."""
    import ray

    from ddtree_trt.replicas.deployment import connected, resources_per_replica, threads_of

    with connected() as started:
        backend, ranks = load_manifest(engine_dir).backend, options.ranks
        cpus, gpus = resources_per_replica(backend, replicas, ranks, check=started)
        actor: Any = ray.remote(_Engine).options(
            num_cpus=cpus, num_gpus=gpus, max_concurrency=1000, max_restarts=3, max_task_retries=3
        )
        options = replace(options, threads=threads_of(options, cpus))
        engines = [actor.remote(engine_dir, options) for _ in range(min(replicas.most, requests))]
        try:
            yield {engine.answer.remote: engine.__ray_ready__.remote for engine in engines}
        except ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[-1]
            raise EngineError(f"an engine failed: {reason}; the answers that are there are kept") from error


def _run(work: Coroutine[Any, Any, None]) -> None:
    """Run it to its end; in a notebook, whose event loop runs already, on a thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(work)
    else:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(asyncio.run, work).result()


class _Answers:
    """`OUTPUT.part`: a line that says what the answers follow from, then the answers, in the order they came."""

    def __init__(self, output: Path, run: Mapping[str, object]) -> None:
        """The answers that an interrupted run has left. Raises UsageError for an output or answers of another run."""
        self._output = output
        self.places: dict[str, int] = {}  # where the answers begin, by `custom_id`
        if output.exists():
            raise UsageError(f"{output} is there already; remove it or choose another --output-file")
        self._part, self._whole = (output.with_name(output.name + end) for end in _ENDS)
        with self._disk_errors():
            self._part.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._part.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"another run writes {output}; wait for it or choose another --output-file") from None
        self._file.seek(0)
        end = 0
        for line in self._file:
            if not line.endswith(b"\n"):  # of a run that was killed while it wrote this
                break
            try:
                row = dict(json.loads(line))
                custom_id = row["custom_id"] if end else ""
            except (ValueError, KeyError, TypeError) as error:
                problem = f"{self._part} is damaged at byte {end}"
                raise UsageError(f"{problem}; cut it off there, or remove the file") from error
            if end:
                self.places[custom_id] = end
            elif row != run:
                if self._file.seek(0, os.SEEK_END) == len(line):  # it came to no answer
                    break
                name = next(name for name in {**run, **row} if row.get(name) != run.get(name))
                raise UsageError(
                    f"{self._part} has answers of a run with another {name} ({row.get(name)}, here {run.get(name)}); "
                    "go on with that one, or remove the file"
                )
            end += len(line)
        self._file.truncate(end)
        if not end:
            self._write(run)

    def append(self, answer: Mapping[str, Any]) -> None:
        """Add an answer. Raises DDTreeError where the disk does not take it."""
        place = self._file.seek(0, os.SEEK_END)
        self._write(answer)
        self.places[answer["custom_id"]] = place

    def _write(self, row: Mapping[str, Any]) -> None:
        with self._disk_errors():
            self._file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
            self._file.flush()

    def finish(self, order: Sequence[str], resumed: int) -> OfflineResult:
        """Write the output in this order, and remove the part. Raises as `append` does."""
        found: Counter[str] = Counter()
        with self._disk_errors():
            with self._whole.open("wb") as file:
                for custom_id in order:
                    self._file.seek(self.places[custom_id])
                    line = self._file.readline()
                    file.write(line)
                    response = json.loads(line)["response"]
                    found["refused"] += response["status_code"] != 200
                    found["tokens"] += response["body"].get("usage", {}).get("completion_tokens", 0)
                file.flush()
                os.fsync(file.fileno())
            self._whole.replace(self._output)
            self._part.unlink()
        return OfflineResult(len(order), found["refused"], found["tokens"], resumed)

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            advice = "choose another --output-file"
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                advice = "free some space, then the same command goes on with what is there"
            raise DDTreeError(f"cannot write {self._output}: {error.strerror}; {advice}") from error

    def close(self) -> None:
        self._file.close()
