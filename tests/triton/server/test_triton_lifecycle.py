"""Starting, reloading and stopping: each test has a server of its own."""

from __future__ import annotations

import re
import signal
import sys
import threading
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from triton_clients import WAIT_S, ask, eventually, generate, grpc_stream, metric, text, values

from ddtree_trt import LLM, SamplingParams
from ddtree_trt.triton.export import export_triton
from tools.triton_server import TritonServer

PROMPT = "def fib(n):"
SAMPLING: dict[str, Any] = {"max_tokens": 1900, "ignore_eos": True, "method": "ar"}


@pytest.fixture(scope="module")
def truth(llm: LLM) -> str:
    return llm.generate(PROMPT, SamplingParams(**SAMPLING))[0].outputs[0].text


class Stream(threading.Thread):
    """A client whose stream has begun; `text` is whole when it has been joined."""

    def __init__(self, server: TritonServer) -> None:
        super().__init__()
        self._server, self.text, self._begun = server, "", threading.Event()
        self.start()
        assert self._begun.wait(WAIT_S)

    def run(self) -> None:
        with grpc_stream(self._server, "tiny", values("tiny", PROMPT, stream=True, **SAMPLING)) as responses:
            for response in responses():
                self.text += text([response])
                self._begun.set()


def test_a_stopping_server_lets_streams_finish(tiny_engine: Path, tmp_path: Path, truth: str) -> None:
    export_triton(tiny_engine, tmp_path, "tiny", link=True)
    server = TritonServer(tmp_path)
    try:
        server.start()
        stream = Stream(server)
        server.signal(signal.SIGTERM)
        stream.join()
        assert stream.text == truth
        assert server.wait() == 0
        assert "Signal (11)" not in server.log
    finally:
        server.kill()


HOSTILE = ['{"seed": 1' + "0" * 400 + "}", "[" * 100_000, '{"seed": "' + "[" * 100_000 + '"}', '{"\\ud800": 1}']


def test_hostile_requests_touch_neither_the_others_nor_the_end(tiny_engine: Path, tmp_path: Path, truth: str) -> None:
    export_triton(tiny_engine, tmp_path, "tiny", link=True)
    server = TritonServer(tmp_path)

    def attack(text: str) -> set[str]:
        bodies = [{"text_input": PROMPT, "sampling_parameters": text}] * 60
        answers = [generate(server, "tiny", body) for body in bodies]
        assert {status for status, _ in answers} == {400}
        return {answer["error"] for _, answer in answers}

    try:
        server.start()
        stream = Stream(server)
        with ThreadPoolExecutor(len(HOSTILE)) as pool:
            errors = {error for found in pool.map(attack, HOSTILE) for error in found}
        stream.join()
        assert stream.text == truth
        assert len(errors) == len(HOSTILE)
        for error in errors:
            assert len(error) < 1000 and "Traceback" not in error and str(tmp_path) not in error and ".py" not in error
        assert generate(server, "tiny", {"text_input": PROMPT, "max_tokens": 4})[0] == 200
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert "Signal (11)" not in server.log
    finally:
        server.kill()


def test_unloading_waits_and_the_model_can_come_back(tiny_engine: Path, tmp_path: Path, truth: str) -> None:
    export_triton(tiny_engine, tmp_path, "tiny", link=True)
    with TritonServer(tmp_path, ["--model-control-mode=explicit", "--load-model=tiny"]) as server:
        stream = Stream(server)
        server.get("/v2/repository/models/tiny/unload", method="POST")
        stream.join()
        assert stream.text == truth
        assert eventually(lambda: server.index()["tiny"].get("reason") == "unloaded")
        with pytest.raises(urllib.error.HTTPError):
            server.get("/v2/models/tiny/ready")
        assert metric(server, "ddtree_slots", "tiny") == 0
        server.get("/v2/repository/models/tiny/load", method="POST", timeout=WAIT_S)
        assert metric(server, "ddtree_slots", "tiny") > 0
        assert text(ask(server, "tiny", values("tiny", PROMPT, stream=True, **SAMPLING))) == truth


def test_instances_share_the_requests(tiny_engine: Path, tmp_path: Path, llm: LLM) -> None:
    export_triton(tiny_engine, tmp_path, "tiny", link=True, instances=2)
    sampling: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
    truth = llm.generate(PROMPT, SamplingParams(**sampling))[0].outputs[0].text
    with TritonServer(tmp_path) as server:
        with ThreadPoolExecutor(4) as pool:
            request = values("tiny", PROMPT, stream=True, **sampling)
            texts = list(pool.map(lambda _: text(ask(server, "tiny", request)), range(12)))
        assert texts == [truth] * 12
        assert eventually(lambda: metric(server, "ddtree_requests_total", "tiny") == 12)
        ended = [metric(server, "ddtree_requests_total", "tiny", instance=f"tiny_0_{i}") for i in (0, 1)]
        assert min(ended) > 0


def test_the_readmes_environment_recipe_works(tiny_engine: Path, tmp_path: Path) -> None:
    """Under a python3 without our packages the model says what is missing, and EXECUTION_ENV_PATH brings it."""
    export_triton(tiny_engine, tmp_path, "bare", link=True)
    model = export_triton(tiny_engine, tmp_path, "own-environment", link=True)
    recipe = re.search(r"<<'END'\n(.*?)END\n", (model / "README.md").read_text(), re.DOTALL)
    assert recipe is not None
    with (model / "config.pbtxt").open("a") as config:
        config.write(recipe[1].replace("/opt/ddtree-env", sys.prefix))
    with TritonServer(tmp_path, python=Path(sys.base_prefix) / "bin") as server:
        index = server.index()
        assert "cannot import ddtree-trt: No module named 'ddtree_trt'" in index["bare"]["reason"]
        assert index["own-environment"]["state"] == "READY"
        assert generate(server, "own-environment", {"text_input": PROMPT, "max_tokens": 4})[0] == 200
