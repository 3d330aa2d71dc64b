"""No test depends on the machine's speed: none reads a clock, and what waits for something has a generous limit."""

from __future__ import annotations

import ast
from pathlib import Path

from hypothesis import settings

TESTS = Path(__file__).resolve().parents[1]
CLOCKS = {"perf_counter", "perf_counter_ns", "process_time", "thread_time", "monotonic", "monotonic_ns", "time"}
WAITING = {"support/pacing.py", "support/servers/triton_clients.py"}  # where conditions are waited for, with a limit
LEAST_TIMEOUT_S = 120


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
    """Calls that give up after less than the least limit: `timeout=` of clients, processes and pytest."""
    return [
        ast.unparse(node)[:80]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for given in [k.value for k in node.keywords if k.arg == "timeout"]
        + (node.args[:1] if ast.unparse(node.func).endswith(("mark.timeout", ".settimeout")) else [])
        if isinstance(given, ast.Constant) and isinstance(given.value, (int, float)) and given.value < LEAST_TIMEOUT_S
    ]


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
    tree = ast.parse("import time\nstart = time.perf_counter()\nfuture.result(timeout=5)\nx.settimeout(1)\n")
    assert clocks_read(tree) == {"perf_counter"} and len(short_timeouts(tree)) == 2


def test_examples_have_no_deadline() -> None:
    assert settings().deadline is None
