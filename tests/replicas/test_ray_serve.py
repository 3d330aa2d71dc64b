"""Two engines behind one address, by Ray Serve: a real process, real clients, and an engine that is killed."""

import concurrent.futures
import contextlib
import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from offline_requests import ROWS, by_generate, requests_file, texts
from pacing import WAIT_S, wait_for
from prometheus_client.parser import text_string_to_metric_families
from ray_replicas import Replicas, private_cluster, processes
from serving import LONG

from ddtree_trt import LLM, SamplingParams
from ddtree_trt.replicas.offline import map_prompts
from ddtree_trt.serve.options import ReplicaOptions

STREAM = {"prompt": "def fib(n):", "stream": True, **LONG}
LONG_TEXT = 400
QUESTION = "There are 8 trays on the table, each with 41 plates. What is the total number of plates?"


@pytest.fixture(scope="module")
def served(tiny_engine: Path) -> Iterator[Replicas]:
    """Two engines of half a processor each, so that two processors have room for more."""
    options = "--replicas 2 --cpus-per-replica 0.5 --max-waiting 40 --playground --access-log".split()
    options += ["--drain-timeout", str(WAIT_S)]
    with private_cluster(), Replicas(tiny_engine, *options) as server:
        assert "2 replicas of 8 slots" in server.ready, server.process.communicate()
        yield server
        server.terminate()
        server.process.wait(WAIT_S)


@pytest.fixture
def client(served: Replicas) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=WAIT_S) as client:
        yield client


@pytest.fixture(scope="module")
def long_text(tiny_engine: Path) -> str:
    with LLM(tiny_engine) as llm:
        params = SamplingParams(**{**LONG, "max_tokens": LONG_TEXT})
        return llm.generate([STREAM["prompt"]], params)[0].outputs[0].text


def events(client: httpx.Client, body: dict[str, Any], begun: list[str] | None = None, session: str = "") -> list[str]:
    """The events of a stream; each is added to `begun` when it comes."""
    lines = [] if begun is None else begun
    with client.stream("POST", "/v1/completions", json=body, headers={"X-Session-Id": session}) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line:
                lines.append(line.removeprefix("data: "))
    return lines


def text(lines: list[str]) -> str:
    assert lines[-1] == "[DONE]"
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])


def test_the_answers_are_the_engine_s(served: Replicas, client: httpx.Client, tiny_engine: Path) -> None:
    import openai

    messages: Any = [{"role": "user", "content": QUESTION}]
    with LLM(tiny_engine) as llm:
        expected = llm.generate([messages], SamplingParams(max_tokens=60))[0].outputs[0].text
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as openai_client:
        answer = openai_client.chat.completions.create(model="tiny", messages=messages, max_tokens=60)
        parts = openai_client.chat.completions.create(model="tiny", messages=messages, max_tokens=60, stream=True)
        assert answer.choices[0].message.content == expected
        assert "".join(part.choices[0].delta.content or "" for part in parts) == expected
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert client.get("/health").json() == {"status": "ok"}
    plain = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
    assert len(plain.headers.get_list("x-request-id")) == 1
    assert client.get("/playground").headers["content-type"] == "text/html; charset=utf-8"
    watched = client.post("/playground/rounds", json={"messages": messages, "max_tokens": 60})
    *records, done = [line.removeprefix("data: ") for line in watched.text.splitlines() if line]
    assert done == "[DONE]" and "".join(json.loads(record)["text"] for record in records) == expected


def refusals(client: httpx.Client) -> dict[str, float]:
    """The refusals that the metrics count, by status, of all engines."""
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            if sample.name == "ddtree_requests_refused_total":
                found[sample.labels["status"]] += sample.value  # type: ignore[assignment]  # a number
    return dict(found)


def test_errors_are_the_server_s(served: Replicas, client: httpx.Client) -> None:
    def refused(path: str, body: bytes) -> tuple[int, str | None]:
        answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
        return answer.status_code, answer.json()["error"]["code"]

    before = refusals(client)
    assert refused("/v1/completions", b"{") == (400, "invalid_json")
    assert refused("/v1/completions", b'{"prompt": "x", "colour": 1}') == (400, "unknown_parameter")
    assert refused("/v1/nothing", b"{}") == (404, None)
    assert refused("/v1/completions", b" " * (5 << 20)) == (413, "body_too_large")
    with contextlib.ExitStack() as streams:  # each has more than half of the sequences that an engine takes
        many = {**STREAM, "prompt": ["x"] * 30}
        codes = [200]
        while codes[-1] == 200:
            answer = streams.enter_context(client.stream("POST", "/v1/completions", json=many))
            codes.append(answer.status_code)
        assert codes[-1] == 429 and len(codes) <= 4 and int(answer.headers["retry-after"]) >= 1
    wait_for(lambda: sum(served.running().values()) == 0)
    counted = {status: count - before.get(status, 0) for status, count in refusals(client).items()}
    assert counted == {"400": 2, "404": 1, "413": 1, "429": 1}


def test_a_conversation_stays_with_its_engine(served: Replicas, client: httpx.Client) -> None:
    """Its later turns find the earlier ones in a slot's cache; other conversations go to the other engine, too."""
    first = served.key_of()
    assert first != served.key_of(other_than=first[1])
    for number in range(6):
        turns = [{"role": "user", "content": f"{number}: {QUESTION}"}]
        for _ in range(2):
            headers, body = {"X-Session-Id": f"chat {number}"}, {"messages": turns, "max_tokens": 40}
            answer = client.post("/v1/chat/completions", json=body, headers=headers).json()
            turns += [answer["choices"][0]["message"], {"role": "user", "content": "And in words?"}]
            turns = [{"role": m["role"], "content": m["content"]} for m in turns]
        usage = answer["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 20, usage


def test_a_client_that_leaves_frees_its_slot(served: Replicas, client: httpx.Client) -> None:
    with client.stream("POST", "/v1/completions", json=STREAM) as response:
        lines = response.iter_lines()
        next(lines)
        assert sum(served.running().values()) == 1
    wait_for(lambda: sum(served.running().values()) == 0)


def test_an_engine_killed_in_mid_stream(served: Replicas, client: httpx.Client, long_text: str) -> None:
    """Its stream breaks off; one of the other engine, and later requests, know nothing of it."""
    lost_key, lost = served.key_of()
    kept_key, kept = served.key_of(other_than=lost)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        # Eight sequences of 1900 tokens: far more than is made until the engine has been killed.
        begun: list[str] = []
        ended = pool.submit(events, client, {**STREAM, "n": 8}, begun, lost_key)
        whole = pool.submit(events, client, {**STREAM, "max_tokens": LONG_TEXT}, None, kept_key)
        wait_for(lambda: bool(begun))
        assert served.running()[lost] > 0
        served.kill(lost)
        assert ended.exception() is not None or ended.result()[-1] != "[DONE]"
        assert text(whole.result()) == long_text
    # The key's requests go to the other engine at once, and a new engine takes the place of the lost one.
    wait_for(lambda: bool(events(client, {**STREAM, "max_tokens": 1}, None, lost_key)))
    wait_for(lambda: len(served.running()) == 2 and lost not in served.running())
    assert kept in served.running()


def test_one_page_has_the_figures_of_all_engines(served: Replicas, client: httpx.Client) -> None:
    assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 3}).status_code == 200
    wait_for(lambda: any(figures["vllm:generation_tokens_total"] for figures in served.figures().values()))
    page = client.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(page)}
    for name in ("generation_tokens", "prompt_tokens"):
        found = [s for s in families[f"vllm:{name}"].samples if s.name == f"vllm:{name}_total"]
        assert len({s.labels["replica"] for s in found}) == len(found) == 2 and sum(s.value for s in found) > 0
        assert all((s.labels["model_name"], s.labels["engine"]) == ("tiny", "0") for s in found)
    assert families["vllm:time_to_first_token_seconds"].type == "histogram"


def test_sigterm_lets_requests_finish(served: Replicas, client: httpx.Client, long_text: str) -> None:
    """The last test of this module's cluster."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(events, client, {**STREAM, "max_tokens": LONG_TEXT}) for _ in range(8)]
        wait_for(lambda: sum(served.running().values()) > 0)
        served.terminate()
        wait_for(lambda: client.get("/health").status_code == 503)
        refusal = client.post("/v1/completions", json={"prompt": "x"})
        assert refusal.json()["error"]["code"] == "shutting_down" and refusal.status_code == 503
        assert {text(stream.result()) for stream in streams} == {long_text}
    code, log = served.wait()
    assert code == 0 and "POST / 200" in log, log[-2000:]


# What takes Ray longer: engines that are started as requests queue, Ray's own commands, and a killed offline run


pytestmark = pytest.mark.slow


def test_an_engine_that_cannot_be_opened_is_tried_once_and_says_why(tiny_engine: Path, tmp_path: Path) -> None:
    engine = shutil.copytree(tiny_engine, tmp_path / "engine")
    (engine / "target.onnx").write_bytes(b"x")
    with private_cluster() as names, Replicas(engine, "--replicas", "1", "--cpus-per-replica", "0.5") as server:
        code, errors = server.wait()
        (log,) = Path(names["RAY_TMPDIR"]).glob("ray/session_2*/logs/serve/controller_*.log")
        assert log.read_text().count("the replica will be stopped") == 1
    assert code == 1 and errors.splitlines()[-1].startswith(f"error: {engine}/target.onnx has 1 bytes")
    assert "Traceback" not in errors


def test_offline_run_whose_engine_is_killed(tiny_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the killed engine had under way is answered by another, and every request once."""
    source, output = requests_file(tmp_path), tmp_path / "out.jsonl"
    killed: list[int] = []

    def kill_one(stage: str, done: int, total: int) -> None:
        if not killed:
            killed.append(processes("ray::_Engine")[0])
            os.kill(killed[0], signal.SIGKILL)

    monkeypatch.setenv("RAY_ADDRESS", "local")
    with private_cluster():
        result = map_prompts(
            tiny_engine, source, output, replicas=ReplicaOptions(2, cpus_per_replica=0.5), progress=kill_one
        )
    assert killed and (result.rows, result.refused, result.resumed) == (ROWS, 1, 0)
    assert texts(output) == by_generate(tiny_engine, source)
