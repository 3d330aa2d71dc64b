"""The shortlist of tokens that a drafter drafts from."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.train_drafter.shortlist import count_tokens, most_frequent


def test_the_shortlist_has_the_most_frequent_tokens(tmp_path: Path) -> None:
    counts = torch.tensor([0, 5, 2, 2, 9, 0, 2])
    assert most_frequent(counts, 3).tolist() == [1, 2, 4], "of equally frequent tokens the lower"
    assert most_frequent(counts, 3, always=[6]).tolist() == [1, 4, 6]
    assert most_frequent(counts, 7).tolist() == list(range(7))
    for size in (0, 8):
        with pytest.raises(SystemExit, match="1 to 7"):
            most_frequent(counts, size)
    with pytest.raises(SystemExit, match="no shards"):
        count_tokens(tmp_path, 7)
