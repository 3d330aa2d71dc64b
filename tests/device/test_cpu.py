"""The processor as this process may use it."""

from __future__ import annotations

import os

import pytest

from ddtree_trt.device.cpu import read_cpu, usable_cores


def test_cores_are_those_of_this_process_where_the_system_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5, 7} if process == 0 else set(), raising=False)
    assert usable_cores() == read_cpu().cores == 3


def test_without_a_word_of_the_system_they_are_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert usable_cores() == read_cpu().cores == 6
