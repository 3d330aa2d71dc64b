"""Options of replicas: what is refused, and what each replica gets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import in_this_process

from ddtree_trt.errors import UsageError, install_with
from ddtree_trt.replicas.options import ReplicaOptions

pytest.importorskip("ray", reason="the extra [ray] is not installed")

from ddtree_trt.replicas import cluster, deployment
from ddtree_trt.serve.options import ServeOptions


def test_ranges() -> None:
    assert ReplicaOptions(3).most == 3 and ReplicaOptions(1, max_replicas=4).most == 4
    for wrong in ({"replicas": 0}, {"replicas": 2, "max_replicas": 1}, {"cpus_per_replica": -1}):
        with pytest.raises(UsageError):
            ReplicaOptions(**wrong)


def test_wrong_calls_are_explained_in_one_line(tiny_engine: Path, capfd: pytest.CaptureFixture[str]) -> None:
    call = in_this_process(capfd)
    assert call("serve", tiny_engine, "--max-replicas", "2") == (2, "", "error: --max-replicas needs --replicas\n")
    assert call("run-batch", tiny_engine, "-i", "a", "-o", "b", "--gpus-per-replica", "1")[2] == (
        "error: --gpus-per-replica needs --replicas\n"
    )
    code, _, error = call("serve", tiny_engine, "--replicas", "2", "--stall-timeout", "60")
    assert code == 2 and error.startswith("error: --stall-timeout cannot be had with --replicas")
    code, _, error = call("serve", tiny_engine.parent / "none", "--replicas", "2")
    assert code == 1 and error.startswith("error: no engine at ")


def test_without_the_extra_the_command_names_it(tiny_engine: Path) -> None:
    script = (
        "import sys; sys.modules['ray'] = None\nfrom ddtree_trt.cli import app\n"
        f"app(['serve', {str(tiny_engine)!r}, '--replicas', '2'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    expected = f"error: this needs the Python package ray; {install_with('ray')}\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", expected)


def test_what_a_replica_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    def machines(*resources: dict[str, float]) -> None:
        nodes = [{"Alive": True, "Resources": r} for r in resources]
        monkeypatch.setattr("ray.nodes", lambda: [*nodes, {"Alive": False, "Resources": {"CPU": 99.0}}])

    machines({"CPU": 16.0}, {"CPU": 8.0, "GPU": 2.0})
    of = cluster.resources_per_replica
    assert of("onnxruntime", ReplicaOptions(2)) == (12.0, 0.0)
    assert of("onnxruntime", ReplicaOptions(1)) == (16.0, 0.0), "no more than one machine has"
    assert of("onnxruntime", ReplicaOptions(1, max_replicas=5)) == (4.0, 0.0)
    assert of("torch", ReplicaOptions(2)) == (12.0, 1.0)
    assert of("torch", ReplicaOptions(2), ranks=2) == (12.0, 2.0)
    assert of("tensorrt", ReplicaOptions(2, cpus_per_replica=0.5, gpus_per_replica=0.25)) == (0.5, 0.25)
    machines({"CPU": 2.0})
    assert of("torch", ReplicaOptions(4)) == (0.5, 0.0)
    assert of("torch", ReplicaOptions(4), check=True)
    with pytest.raises(UsageError, match=r"2 replicas of 2 CPUs need 4, and this machine has 2; .*--cpus-per-replica"):
        of("onnxruntime", ReplicaOptions(2, cpus_per_replica=2), check=True)
    with pytest.raises(UsageError, match="1 GPUs need 1, and this machine has 0"):
        of("tensorrt", ReplicaOptions(1), check=True)


def test_the_application_of_ray_s_own_commands(tiny_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(deployment, "application", lambda *arguments: made.append(arguments))
    deployment.app({"engine_dir": str(tiny_engine), "replicas": "2", "drain_timeout_s": "5", "api_key": "k"})
    assert made == [(tiny_engine, ServeOptions(drain_timeout_s=5.0, api_key="k"), ReplicaOptions(2))]
    for wrong, complaint in (
        ({}, "engine_dir"),
        ({"engine_dir": "x", "port": "8001"}, "port"),  # Ray's own
        ({"engine_dir": "x", "colour": "red"}, "colour"),
        ({"engine_dir": "x", "replicas": "two"}, "replicas"),
        ({"engine_dir": "x", "replicas": "0"}, "replicas must be from 1"),
    ):
        with pytest.raises(UsageError, match=complaint):
            deployment.app(wrong)
