"""workbench/quality.py: an engine compared with another over text."""

import re
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import make_pair
from engine_builds import build_engine
from numerics import Truth

from workbench import quality

TOKENS = np.random.default_rng(0).integers(0, 90, 70)


def test_figures_are_those_of_pytorch(tmp_path: Path) -> None:
    """Two networks that differ, by torch's own functions over transformers' logits."""
    first, second = (make_pair(tmp_path / name, num_layers=layers) for name, layers in (("a", 2), ("b", 3)))
    engines = [build_engine(*pair, pair[0].parent / "engine") for pair in (first, second)]
    with closing(engines[0]) as engine, closing(engines[1]) as reference:
        found = quality.compare(engine, reference, TOKENS.tolist(), 32)
    windows = torch.from_numpy(TOKENS[:64]).view(2, 32)
    logits = [torch.stack([torch.tensor(Truth(p[0], (0,))(w)[0]) for w in windows.numpy()]) for p in (first, second)]
    ours, theirs = (rows.log_softmax(-1) for rows in logits)
    kl_div, nll_loss = torch.nn.functional.kl_div, torch.nn.functional.nll_loss
    assert found.tokens == 64
    expected = float(kl_div(ours, theirs, log_target=True, reduction="sum")) / 64
    assert found.divergence == pytest.approx(expected, rel=1e-3) and expected > 0.01
    assert found.same_best == float((ours.argmax(-1) == theirs.argmax(-1)).float().mean())
    for perplexity, rows in ((found.perplexity, ours), (found.reference_perplexity, theirs)):
        loss = nll_loss(rows[:, :-1].reshape(-1, rows.shape[-1]), windows[:, 1:].reshape(-1))
        assert perplexity == pytest.approx(float(loss.exp()), rel=1e-3)


def test_the_command_prints_what_it_found(tiny_engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quality.main(tiny_engine, tiny_engine, tokens=64, window=32, threads=1)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "64 tokens: divergence 0.0000 nats a token, same best token 100.0%"
    assert re.fullmatch(r"perplexity (\S+), of the reference \1", lines[1])
