"""The suite itself: no test depends on the machine's speed, and its processes share what is built once."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypothesis import settings
from sharing import WORKER_BYTES, build_once, free_bytes, run_folder, worker_count

TESTS = Path(__file__).resolve().parents[1]
CLOCKS = {"perf_counter", "perf_counter_ns", "process_time", "thread_time", "monotonic", "monotonic_ns", "time"}
WAITING = {"support/pacing.py", "support/servers/triton_clients.py"}  # where conditions are waited for, with a limit
LEAST_TIMEOUT_S = 120
HTTPX_CALLS = {"get", "post", "stream", "Client", "AsyncClient"}  # 5 s unless told


def clocks_read(tree: ast.AST) -> set[str]:
    """Clocks of the module `time` that are named, other than as the name of something to replace."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in CLOCKS and ast.unparse(node.value) == "time"
    } | {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "time"
        for alias in node.names
        if alias.name in CLOCKS
    }


def short_timeouts(tree: ast.AST) -> list[str]:
    """Calls that give up after less than the least limit: the timeouts of clients, processes, threads and pytest."""
    return [ast.unparse(node)[:80] for node in ast.walk(tree) if isinstance(node, ast.Call) and gives_up_early(node)]


def gives_up_early(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    given = [k.value for k in call.keywords if k.arg == "timeout"]
    if name in HTTPX_CALLS and not given and ast.unparse(call.func) == f"httpx.{name}":
        return True
    given += call.args[1:2] if name == "wait_for" else []
    given += call.args[:1] if name in ("join", "result", "settimeout", "timeout", "wait") else []
    numbers = [g.value for g in given if isinstance(g, ast.Constant) and isinstance(g.value, (int, float))]
    return any(number < LEAST_TIMEOUT_S for number in numbers)


def test_tests_read_no_clock_and_give_up_late() -> None:
    found = {}
    for path in TESTS.rglob("*.py"):
        place = path.relative_to(TESTS).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        clocks = set() if place in WAITING else clocks_read(tree)
        if wrong := [*clocks, *short_timeouts(tree)]:
            found[place] = wrong
    assert found == {}


def test_both_are_found() -> None:
    short = ["future.result(timeout=5)", "x.settimeout(1)", "thread.join(60)", "asyncio.wait_for(x, 60)"]
    short += ["httpx.get(url)", "httpx.Client(base_url=url)"]
    long = ["httpx.get(url, timeout=WAIT_S)", "thread.join(120)", "process.wait()", "','.join(texts)"]
    tree = ast.parse("\n".join(["import time", "start = time.perf_counter()", *short, *long]))
    assert clocks_read(tree) == {"perf_counter"} and short_timeouts(tree) == short


def test_examples_have_no_deadline() -> None:
    assert settings().deadline is None


@pytest.mark.parametrize(
    ("cores", "workers_memory_holds", "expected"), [(2, 9, 2), (16, 5, 5), (1, 9, 1), (8, 0, 1), (64, 64, 64)]
)
def test_a_worker_per_core_as_far_as_memory_reaches(cores: int, workers_memory_holds: int, expected: int) -> None:
    assert worker_count(cores, workers_memory_holds * WORKER_BYTES + 5) == expected


def test_free_memory_is_what_the_kernel_says(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:       24000000 kB\nMemAvailable:   16000000 kB\nHugePages_Free:  0\n")
    assert free_bytes(tmp_path / "meminfo") == 16_000_000 * 1024
    assert free_bytes() > 0


def test_workers_of_a_run_share_a_folder(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path_factory.getbasetemp()
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw7")
    assert run_folder(tmp_path_factory) == own.parent
    monkeypatch.delenv("PYTEST_XDIST_WORKER")
    assert run_folder(tmp_path_factory) == own


def test_what_is_built_once_is_copied_for_everyone(tmp_path_factory: pytest.TempPathFactory) -> None:
    """And a build that failed is made again. The name is the test's own: no other may ask for what it builds."""
    built = []

    def build(directory: Path) -> None:
        directory.mkdir()
        built.append(directory)
        if len(built) == 1:
            raise RuntimeError("scripted")
        (directory / "weights.bin").write_text("as built")

    name = f"shared-{tmp_path_factory.getbasetemp().name}"
    with pytest.raises(RuntimeError, match="scripted"):
        build_once(tmp_path_factory, name, build)
    for _ in range(2):
        copy = build_once(tmp_path_factory, name, build)
        assert (copy / "weights.bin").read_text() == "as built"
        (copy / "weights.bin").write_text("changed by one")
    assert len(built) == 2
