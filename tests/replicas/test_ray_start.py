"""Options of replicas, what each gets, and what does not start, by Ray's fault or the engine's: in one line."""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from command_line import Cli
from ray import serve

from ddtree_trt.errors import UsageError
from ddtree_trt.replicas import deployment
from ddtree_trt.serve.options import ReplicaOptions, ServeOptions

ADVICE = "; end what else keeps this machine busy and try again, else see /somewhere/ray/session_latest/logs\n"


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> Cli:
    monkeypatch.setenv("RAY_TMPDIR", "/somewhere")
    return cli


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What of Ray Serve was called, on a cluster that answers and does nothing."""
    calls: list[str] = []

    @contextlib.contextmanager
    def connected() -> Iterator[bool]:
        yield True

    monkeypatch.setattr(deployment, "connected", connected)
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": 2.0}}])
    monkeypatch.setattr(serve, "start", lambda **_: calls.append("start"))
    monkeypatch.setattr(serve, "shutdown", lambda: calls.append("shutdown"))
    return calls


async def nothing() -> None: ...


def raises(error: Exception) -> Any:
    def call(*_: object, **__: object) -> None:
        raise error

    return call


def test_ray_does_not_start(cli: Cli, tiny_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    answers = [ConnectionError("no cluster"), Exception("The current node timed out.\nMore of it.")]
    monkeypatch.setattr(ray, "init", lambda **_: raises(answers.pop(0))())
    expected = f"error: Ray did not start (Exception: The current node timed out.){ADVICE}"
    assert cli("serve", tiny_engine, "--replicas", "2", "--port", "0") == (1, "", expected)


@pytest.mark.parametrize(("usable", "given"), [(1, 1), (8, None)])
def test_replicas_share_the_cores_that_this_process_may_use(
    monkeypatch: pytest.MonkeyPatch, usable: int, given: int | None
) -> None:
    """Ray counts those of the machine, or of its container where that has fewer."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(usable)), raising=False)
    monkeypatch.setattr(ray, "init", lambda **options: asked.append(options))
    with deployment.connected():
        assert asked[0]["num_cpus"] == given


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "nonsense"])
def test_an_address_without_answer(cli: Cli, tiny_engine: Path, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself is not asked: it would try for minutes."""
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(ray, "init", raises(AssertionError("asked")))
    code, _, error = cli("serve", tiny_engine, "--replicas", "2", "--port", "0")
    assert code == 2 and error.startswith(f"error: no Ray cluster answers at RAY_ADDRESS={address}: ")


def test_ray_serve_starts_not(cli: Cli, tiny_engine: Path, ended: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy that was too slow for Ray, which is given longer than Ray's 5 s unless its user says."""
    given: dict[str, Any] = {}

    def start(**options: Any) -> None:
        given.update(options)
        raise ray.exceptions.ActorDiedError()

    monkeypatch.setattr(serve, "start", start)
    monkeypatch.setenv("RAY_SERVE_LOG_TO_STDERR", "1")
    code, _, error = cli("serve", tiny_engine, "--replicas", "2", "--port", "0")
    assert code == 1 and error.startswith("error: Ray Serve did not start (ActorDiedError: ") and error.endswith(ADVICE)
    assert error.count("\n") == 1 and ended == ["shutdown"]
    assert given["controller_options"]["runtime_env"]["env_vars"] == {
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        "RAY_SERVE_LOG_TO_STDERR": "1",
    }


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("ddtree_trt.errors.UsageError: no such option", (2, "error: no such option\n")),
        ("The worker died: SIGKILL", (1, f"error: the replicas did not start (RuntimeError: The worker died: SIGKILL)"
                                         f"{ADVICE}")),
    ],
)  # fmt: skip
def test_replicas_do_not_start(
    reason: str,
    expected: tuple[int, str],
    cli: Cli,
    tiny_engine: Path,
    ended: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine's own error is shown as it is, and has its own exit code."""
    message = f"The deployment failed to start 1 times in a row. Error:\nTraceback\n  File x\n{reason}\n"
    deployments = {"Engine": SimpleNamespace(message=message), "Ingress": SimpleNamespace(message="")}
    status = SimpleNamespace(applications={deployment.APPLICATION: SimpleNamespace(deployments=deployments)})
    monkeypatch.setattr(serve, "run", raises(RuntimeError("Deploying application failed")))
    monkeypatch.setattr(serve, "status", lambda: status)
    code, _, error = cli("serve", tiny_engine, "--replicas", "2", "--port", "0")
    assert (code, error) == expected and ended == ["start", "shutdown"]


def test_a_signal_right_after_the_ready_line_ends_it(
    cli: Cli, tiny_engine: Path, ended: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broadcast(name: str, *_: object) -> SimpleNamespace:
        ended.append(name)
        return SimpleNamespace(results_async=nothing)

    def ready(line: str, *, flush: bool) -> None:
        assert signal.getsignal(signal.SIGTERM) is not before, "Ray's handler ends the process"
        signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(serve, "run", lambda *_, **__: SimpleNamespace(broadcast=broadcast))
    monkeypatch.setattr(deployment, "print", ready, raising=False)
    assert cli("serve", tiny_engine, "--replicas", "2", "--port", "0") == (0, "", "")
    assert ended == ["start", "drain", "shutdown"] and signal.getsignal(signal.SIGTERM) is before


def test_wrong_calls_are_explained_in_one_line(tiny_engine: Path, cli: Cli) -> None:
    assert cli("serve", tiny_engine, "--max-replicas", "2") == (2, "", "error: --max-replicas needs --replicas\n")
    assert cli("run-batch", tiny_engine, "-i", "a", "-o", "b", "--gpus-per-replica", "1")[2] == (
        "error: --gpus-per-replica needs --replicas\n"
    )
    code, _, error = cli("serve", tiny_engine, "--replicas", "2", "--stall-timeout", "60")
    assert code == 2 and error.startswith("error: --stall-timeout cannot be had with --replicas")
    code, _, error = cli("serve", tiny_engine.parent / "none", "--replicas", "2")
    assert code == 1 and error.startswith("error: no engine at ")


def test_what_a_replica_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    def machines(*resources: dict[str, float]) -> None:
        nodes = [{"Alive": True, "Resources": r} for r in resources]
        monkeypatch.setattr("ray.nodes", lambda: [*nodes, {"Alive": False, "Resources": {"CPU": 99.0}}])

    machines({"CPU": 16.0}, {"CPU": 8.0, "GPU": 2.0})
    of = deployment.resources_per_replica
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
