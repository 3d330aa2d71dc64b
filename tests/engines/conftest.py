"""Two ranks for the engines that want them."""

from collections.abc import Iterator

import pytest
from ranks import TwoRanks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoRanks]:
    ranks = TwoRanks(tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()
