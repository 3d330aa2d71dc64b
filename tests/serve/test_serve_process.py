"""`ddtree-trt serve` as a process: its start, its log, its signals, its end, and a crowd."""

import concurrent.futures
import json
import re
import signal
import socket
import sys
import time
from pathlib import Path

import httpx
import pytest
from command_line import Cli
from dictation import QWEN3_CODER, with_template
from pacing import WAIT_S, wait_for
from serving import LONG, ProcessServer, events_of, metrics

from ddtree_trt.errors import install_with
from ddtree_trt.serve.playground.routes import PAGE
from workbench import soak

ROOT = Path(__file__).resolve().parents[2]


def streamed(client: httpx.Client, **fields: object) -> str:
    response = client.post("/v1/completions", json={"prompt": "def fib(n):", "stream": True, **LONG, **fields})
    assert response.status_code == 200
    return response.text


def under_way_at(client: httpx.Client) -> float:
    """How many sequences run or wait."""
    figures = metrics(client)
    return figures["vllm:num_requests_running"] + figures["vllm:num_requests_waiting"]


def test_the_ready_line_the_options_and_a_line_for_every_request(tiny_engine: Path, tmp_path: Path) -> None:
    template = tmp_path / "tools.jinja"
    template.write_text((ROOT / "examples" / "tools.jinja").read_text())
    options = ["--served-model-name", "my/tiny", "--max-waiting", "7", "--threads", "1", "--request-log"]
    options += ["--chat-template", str(template)]
    key = {"Authorization": "Bearer secret"}
    with ProcessServer(tiny_engine, *options, env={"DDTREE_API_KEY": "secret"}) as server:
        assert server.ready.rstrip("\n") == (
            "serving my/tiny: tiny, onnxruntime fp32, 1 thread; 8 slots of 2048 tokens, 7 may wait; a key is needed; "
            f"/v1, /health and /metrics on {server.url}"
        )
        with httpx.Client(base_url=server.url, timeout=WAIT_S, headers=key) as client:
            assert client.get("/v1/models", headers={"Authorization": ""}).status_code == 401
            model = client.get("/v1/models/my/tiny").json()
            assert model["id"] == "my/tiny" and model["max_model_len"] == 2048
            assert {client.get(path).status_code for path in PAGE} == {404}, "without --playground"
            page = client.get("/metrics").text
            assert 'vllm:num_requests_running{engine="0",model_name="my/tiny"} 0.0' in page
            tool = {"type": "function", "function": {"name": "weather"}}
            asked = {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "max_tokens": 20, "n": 2}
            chat = client.post("/v1/chat/completions", json={**asked, "tools": [tool]})
            stream = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 3, "stream": True})
            assert client.post("/v1/completions", json={"prompt": 5}).status_code == 400
            wait_for(lambda: metrics(client)["vllm:num_requests_running"] == 0)
        server.terminate()
        code, log = server.wait()
    usage = chat.json()["usage"]
    figures = rf"{usage['prompt_tokens']} prompt tokens, 0 cached, {usage['completion_tokens']} new"
    speed = r"first after \d+\.\d{3} s, \d+\.\d tokens/s, \d+\.\d a round; (stop|length)"
    date = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"
    first, second = log.splitlines()
    assert code == 0 and re.fullmatch(rf"{date} {chat.json()['id']}: {figures}, {speed}(, stop)?", first), first
    assert re.fullmatch(rf"{date} {stream.headers['x-request-id']}-0: .* 3 new, {speed}", second), second


def test_sigterm_under_load_finishes_what_runs_and_exits_0(tiny_engine: Path, tmp_path: Path) -> None:
    hold = tmp_path / "hold"

    def answer(number: int) -> str:
        """The same greedy text, streamed or whole."""
        stream = streamed(client, max_tokens=60, method="auto", stream=number % 2 == 0)
        assert ("[DONE]" in stream) is (number % 2 == 0)
        return "".join(event["choices"][0]["text"] for event in events_of(stream) or [json.loads(stream)])

    with (
        ProcessServer(tiny_engine, "--drain-timeout", str(WAIT_S), hold=hold) as server,
        httpx.Client(base_url=server.url, timeout=WAIT_S) as client,
        concurrent.futures.ThreadPoolExecutor(16) as pool,
    ):
        assert "8 slots" in server.ready
        expected = answer(0)
        hold.touch()
        under_way = pool.map(answer, range(16))
        wait_for(lambda: under_way_at(client) == 16)
        server.terminate()
        wait_for(lambda: client.get("/health").status_code == 503)
        late = client.post("/v1/completions", json={"prompt": "x"})  # on a connection that is already open
        assert late.status_code == 503 and late.headers["connection"] == "close" and late.headers["retry-after"]
        assert late.json()["error"]["code"] == "shutting_down"
        hold.unlink()
        assert [*under_way] == [expected] * 16
        assert server.wait() == (0, "")


def test_a_second_signal_ends_at_once(tiny_engine: Path, tmp_path: Path) -> None:
    """The request under way would take more than a minute, and is not waited for."""
    hold = tmp_path / "hold"
    hold.touch()
    with (
        ProcessServer(tiny_engine, "--drain-timeout", "3600", hold=hold, hold_s=0.05) as server,
        httpx.Client(base_url=server.url, timeout=WAIT_S) as client,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        stream = pool.submit(streamed, client)
        wait_for(lambda: metrics(client)["vllm:num_requests_running"] == 1)
        server.process.send_signal(signal.SIGINT)
        wait_for(lambda: client.get("/health").status_code == 503)
        server.process.send_signal(signal.SIGTERM)
        assert events_of(stream.result())[-1]["error"]["code"] == "shutting_down"
        assert server.wait()[0] == 0


STUCK = {
    "a thread": "from ddtree_trt.runtime.text.codec import TextCodec as Held; name = 'encode'",
    "the event loop": "from ddtree_trt.serve.service import Service as Held; name = 'check_model'",
}


@pytest.mark.parametrize(("stuck", "signals"), [("a thread", 1), ("the event loop", 2)])
def test_a_server_that_does_not_come_back_ends_when_its_time_is_up(
    tiny_engine: Path, tmp_path: Path, stuck: str, signals: int
) -> None:
    begun = tmp_path / "begun"
    code = f"{STUCK[stuck]}\nimport pathlib, time\nfrom ddtree_trt.serve import server\n"
    code += "server._END_S = 1\n"
    code += f"setattr(Held, name, lambda *_: (pathlib.Path({str(begun)!r}).touch(), time.sleep(36000)))"
    drain = "0.5" if signals == 1 else "36000"
    with (
        ProcessServer(tiny_engine, "--drain-timeout", drain, code=code) as server,
        httpx.Client(base_url=server.url, timeout=WAIT_S) as client,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        pending = pool.submit(client.post, "/v1/completions", json={"prompt": "x"})
        wait_for(begun.exists)
        for _ in range(signals):
            server.terminate()
            time.sleep(0.2)  # two of the same that wait to be handled are one
        exit_code, errors = server.wait()
        assert exit_code == 1 and "most recent call first" in errors
        if stuck == "a thread":
            assert pending.result().json()["error"]["code"] == "shutting_down"
        else:
            assert isinstance(pending.exception(), httpx.TransportError)


def test_wrong_calls_are_explained_in_one_line(tiny_engine: Path, tmp_path: Path, cli: Cli) -> None:
    none = tmp_path / "none"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        answer = cli("serve", tiny_engine, "--port", port)
    advice = "Address already in use; choose another with --port"
    assert answer == (2, "", f"error: cannot listen on 127.0.0.1 port {port}: {advice}\n")
    code, out, error = cli("serve", none, "--port", "0")
    assert (code, out) == (1, "") and error.startswith("error: no engine at ") and error.count("\n") == 1
    code, out, error = cli("serve", tiny_engine, "--host", "no.such.host.invalid")
    assert (code, out) == (2, "") and error.startswith("error: cannot listen on no.such.host.invalid: ")
    answer = cli("serve", tiny_engine, "--max-replicas", "2")
    assert answer == (2, "", "error: --max-replicas needs --replicas\n")
    code, out, error = cli("serve", tiny_engine, "--api-key", "")
    assert (code, out) == (2, "") and "API key" in error
    reason = "cannot be read (No such file or directory); give a Jinja template"
    answer = cli("serve", tiny_engine, "--chat-template", none)
    assert answer == (2, "", f"error: --chat-template {none} {reason}\n")


def test_without_the_extra_the_command_names_it(tiny_engine: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ddtree_trt.serve.server", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    missing = f"error: this needs the Python package uvicorn; {install_with('serve')}\n"
    assert cli("serve", tiny_engine, "--port", "0") == (1, "", missing)


def test_a_crowd_of_clients(tiny_engine: Path, tmp_path: Path) -> None:
    engine = with_template(tiny_engine, tmp_path / "engine", QWEN3_CODER)
    report = soak.run(str(engine), concurrency=16, seconds=1, prompts=2)
    assert report.failures() == []
    assert report.tokens > 0 and set(report.requests) == set(soak.KINDS)
    assert json.loads(report.to_json())["requests"] == report.requests
    assert report.most_running <= 8
