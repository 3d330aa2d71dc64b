"""What takes Ray longer: engines that are started as requests queue, Ray's own commands, and a killed offline run."""

from __future__ import annotations

import concurrent.futures
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from offline_requests import ROWS, by_generate, requests_file, texts
from pacing import WAIT_S, wait_for
from ray_replicas import Replicas, private_cluster, processes
from serving import LONG

from ddtree_trt.replicas.offline import map_prompts
from ddtree_trt.replicas.options import ReplicaOptions

pytestmark = pytest.mark.slow


def test_more_engines_are_started_as_requests_queue_and_a_second_signal_ends_them(tiny_engine: Path) -> None:
    options = ("--replicas", "1", "--max-replicas", "2", "--target-ongoing-requests", "1", "--cpus-per-replica", "0.5")
    with private_cluster(), Replicas(tiny_engine, *options) as server:
        assert "(1 to 2 replicas of 8 slots" in server.ready
        with concurrent.futures.ThreadPoolExecutor(4) as pool:

            def ask(_: int) -> None:
                while len(server.figures()) < 2:
                    httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", **LONG}, timeout=WAIT_S)

            list(pool.map(ask, range(4)))
        assert len(server.figures()) == 2
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            body = {"prompt": "x", "stream": True, "n": 8, **LONG}  # takes longer than the two signals
            stream = pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=WAIT_S)
            wait_for(lambda: sum(server.running().values()) > 0)
            server.terminate()
            wait_for(lambda: httpx.get(f"{server.url}/health", timeout=WAIT_S).status_code == 503)
            server.terminate()
            last = stream.result().text.rstrip().splitlines()[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert server.wait()[0] == 0


def test_an_engine_that_cannot_be_opened_is_tried_once_and_says_why(tiny_engine: Path, tmp_path: Path) -> None:
    engine = shutil.copytree(tiny_engine, tmp_path / "engine")
    (engine / "target.onnx").write_bytes(b"x")
    with private_cluster() as names, Replicas(engine, "--replicas", "1", "--cpus-per-replica", "0.5") as server:
        code, errors = server.wait()
        (log,) = Path(names["RAY_TMPDIR"]).glob("ray/session_2*/logs/serve/controller_*.log")
        assert log.read_text().count("the replica will be stopped") == 1
    assert code == 1 and errors.splitlines()[-1].startswith(f"error: {engine}/target.onnx has 1 bytes")
    assert "Traceback" not in errors


def test_a_configuration_file_of_ray_serve(tiny_engine: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = tmp_path / "serve.yaml"
    config.write_text(
        f"""
http_options: {{host: 127.0.0.1, port: {port}}}
applications:
  - name: tiny
    route_prefix: /
    import_path: ddtree_trt.replicas.deployment:app
    args: {{engine_dir: {tiny_engine}, replicas: 1, cpus_per_replica: 0.5, api_key: secret}}
"""
    )
    url, key = f"http://127.0.0.1:{port}", {"Authorization": "Bearer secret"}

    def serves() -> bool:
        try:
            return httpx.get(f"{url}/v1/models", headers=key, timeout=WAIT_S).status_code == 200
        except httpx.HTTPError:
            return False

    with private_cluster():
        command = [str(Path(sys.executable).with_name("serve")), "run", str(config)]
        process = subprocess.Popen(command, env={**os.environ, "RAY_ADDRESS": "local"})
        try:
            wait_for(lambda: serves() or process.poll() is not None)
            assert httpx.get(f"{url}/v1/models", headers=key, timeout=WAIT_S).json()["data"][0]["id"] == "tiny"
            assert httpx.get(f"{url}/v1/models", timeout=WAIT_S).json()["error"]["code"] == "invalid_api_key"
        finally:
            process.terminate()
            process.wait(WAIT_S)


def test_an_offline_run_whose_engine_is_killed(
    tiny_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
