"""The suite itself: no test depends on the machine's speed."""

from __future__ import annotations

import ast
from pathlib import Path

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
