"""How much Python a round is, which no busy machine changes."""

from __future__ import annotations

import pytest

from workbench.host import CASES, python_calls

# Of a slot, where 64 share what a round calls once.
MOST = {"ar": 12, "16 nodes": 27, "auto": 49}


@pytest.mark.parametrize("case", CASES)
def test_a_slot_of_a_round_takes_few_python_calls(case: str) -> None:
    assert python_calls(64, CASES[case]) <= MOST[case]
    assert python_calls(1, CASES[case]) <= MOST[case] + 80, "what a round calls once"


@pytest.mark.parametrize("case", CASES)
def test_a_slot_of_a_round_on_the_device_takes_fewer(case: str) -> None:
    assert python_calls(64, CASES[case], device=True) <= (30 if case == "auto" else 12)
