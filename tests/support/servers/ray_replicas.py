"""Engines on a Ray cluster of this machine: `ddtree-trt serve --replicas` as a process, and what a test does to it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest
import ray
from pacing import WAIT_S, wait_for
from prometheus_client.parser import text_string_to_metric_families
from serving import ProcessServer

from ddtree_trt.replicas.deployment import APPLICATION, connected


@contextlib.contextmanager
def private_cluster() -> Iterator[dict[str, str]]:
    """Environment variables under which a process starts a cluster of its own, whatever runs on this machine."""
    # Not in pytest's folders, whose names are too long for the sockets in it.
    folders = tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True)
    with folders as folder, pytest.MonkeyPatch.context() as patch:
        names = {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": "local"}
        names["RAY_AUTH_MODE"] = "disabled"
        for name, value in names.items():
            patch.setenv(name, value)
        yield names


def processes(title: str) -> list[int]:
    """Processes of the private cluster whose title begins so."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            title_fits = (process / "cmdline").read_bytes().startswith(title.encode())
            if title_fits and os.environ["RAY_TMPDIR"].encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
    return found


class Replicas(ProcessServer):
    """Engines behind one address."""

    def __enter__(self) -> Replicas:
        return self

    def figures(self) -> dict[str, dict[str, float]]:
        """Samples without other labels, by name, of each engine."""
        found: dict[str, dict[str, float]] = {}
        page = httpx.get(f"{self.url}/metrics", timeout=WAIT_S).text
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if {*sample.labels} <= {"replica", "model_name", "engine"} and "replica" in sample.labels:
                    found.setdefault(sample.labels["replica"], {})[sample.name] = sample.value
        return {name: figures for name, figures in found.items() if "ddtree_slots" in figures}

    def running(self) -> dict[str, float]:
        """Sequences that run, by engine."""
        return {name: figures["vllm:num_requests_running"] for name, figures in self.figures().items()}

    def kill(self, replica: str) -> None:
        """Kill an engine's process."""
        # Only for as long as it takes: Ray ends a process that is connected to a cluster which ends.
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_ADDRESS", self._cluster())
            with connected() as started:
                assert not started
                actor = ray.get_actor(f"SERVE_REPLICA::{APPLICATION}#Engine#{replica}", namespace="serve")
                ray.kill(actor, no_restart=True)

    def _cluster(self) -> str:
        """The address of the cluster."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        for child in " ".join(task.read_text() for task in tasks).split():
            command = Path(f"/proc/{child}/cmdline").read_text().split("\0")
            for address in [word for word in command if word.startswith("--gcs-address=")]:
                return address.removeprefix("--gcs-address=")
        raise AssertionError("the server has started no cluster")

    def key_of(self, other_than: str = "") -> tuple[str, str]:
        """An `X-Session-Id` and the engine that its requests go to."""
        for number in range(64):
            before = self._tokens()
            body, headers = {"prompt": "x", "max_tokens": 1}, {"X-Session-Id": str(number)}
            httpx.post(f"{self.url}/v1/completions", json=body, headers=headers, timeout=WAIT_S).raise_for_status()
            wait_for(partial(self._moved, before))
            (moved,) = self._moved(before)
            if moved != other_than:
                return str(number), moved
        raise AssertionError("every key leads to one engine")

    def _tokens(self) -> dict[str, float]:
        return {name: figures["vllm:generation_tokens_total"] for name, figures in self.figures().items()}

    def _moved(self, before: dict[str, float]) -> list[str]:
        """The engines that have finished requests since."""
        return [name for name, tokens in self._tokens().items() if tokens > before.get(name, 0.0)]
