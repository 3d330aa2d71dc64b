"""Ray takes signals over in the process that starts it: they are given back."""

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def signals_are_given_back() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
