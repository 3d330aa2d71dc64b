"""How much Python a round is, which no busy machine changes."""

import pytest

from workbench.host import CASES, python_calls

# Of a slot, where 64 share what a round calls once: by stages, and on the device.
MOST = {"ar": (12, 8), "16 nodes": (21, 8), "auto": (30, 15)}


@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_slot_of_a_round_takes_few_python_calls(case: str, device: bool) -> None:
    most = MOST[case][device]
    assert python_calls(64, CASES[case], device=device) <= most
    assert python_calls(1, CASES[case], device=device) <= most + 85, "what a round calls once"
