"""Each cause of low acceptance, built into a pair, is what `ddtree-trt check` names."""

import dataclasses
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import DRAFTER_EXTRA, TARGET_DIMS, make_drafter, make_target, write_weights

from ddtree_trt.bench.measure import Session, load_prompts
from ddtree_trt.bench.settings import Case, CheckSettings
from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.check.findings import CAUSES, CheckReport, ContextBin, DraftingFinding, describe
from ddtree_trt.check.run import check_engine
from ddtree_trt.drafters.dflash.dims import DFlashDims
from ddtree_trt.drafters.registry import checkpoint_shapes
from ddtree_trt.drafters.tapped import FC
from ddtree_trt.errors import EngineError
from ddtree_trt.models.decoder import EMBEDDING, TransformerDims


@pytest.fixture(autouse=True)
def drafter_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether methods are lossless is the matter of other tests."""
    monkeypatch.setattr(
        "ddtree_trt.check.run.engine_cases", lambda manifest, budgets: [Case("ar"), Case("dflash"), Case("ddtree", 64)]
    )


def checked(engine: Path, **changes: Any) -> CheckReport:
    values = {"engine": str(engine), "limit": 3, "max_tokens": 32, "seeds": 0}
    return check_engine(CheckSettings(**{**values, **changes}))


@pytest.fixture
def long_prompts(tmp_path: Path) -> str:
    """Prompts of one topic, and longer ones whose topic changed some hundred tokens before their end."""
    ids = [[8 + i] * 60 for i in range(4)] + [[8 + i] * 400 + [20 + i] * 150 for i in range(4)]
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps({"token_ids": each}) + "\n" for each in ids))
    return str(path)


def test_a_window_that_is_ignored(tmp_path: Path, long_prompts: str) -> None:
    report = checked(build_majority(tmp_path), prompts=(long_prompts,), limit=8)
    assert report.drafting is not None and report.passed
    short, *longer = report.drafting.by_context
    assert (short.longest, short.accepted) == (128, 7.0)
    assert [bin.accepted for bin in longer] == [0.0] * len(longer)
    (hint,) = report.drafting.hints
    assert hint.startswith("drafts fail past 128 tokens of context: a window that is ignored")
    assert any(hint in line for line in describe(report))


def test_an_overflow_of_half_precision(tmp_path: Path, long_prompts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the target: in fp16 engines block drafters are computed in bf16. PyTorch computes in halves on a CPU, too."""
    monkeypatch.setattr("ddtree_trt.runtime.engines.torch.engine.check_device", lambda *_: None)
    engine = build_majority(tmp_path, gain=100, backend="torch", precision="fp16")
    with pytest.raises(EngineError, match=r"logits are not finite; .* with --precision bf16 or fp32"):
        checked(engine, prompts=(long_prompts,), limit=2)


def test_rounds_are_those_of_the_chain(tiny_engine: Path) -> None:
    """Each behind its context, without the last ones, which could not accept a whole block."""
    found = checked(tiny_engine, limit=1, max_tokens=64).drafting
    with closing(Session(tiny_engine)) as session:
        (prompt,) = (session.codec.encode(p.opening) for p in load_prompts(("tiny",), 1))
        lengths = session.run(prompt, Case("dflash"), max_tokens=64)[0].metrics.acceptance_lengths
    starts = [len(prompt) + sum(lengths[:i]) for i in range(len(lengths))]
    assert found is not None and (found.case, found.length) == ("dflash", 15)
    assert found.contexts == tuple(s for i, s in enumerate(starts) if i == 0 or s - len(prompt) + 15 < sum(lengths))
    assert found.accepted == tuple(n - 1 for n in lengths)[: len(found.accepted)] and found.tau > 3
    assert checked(tiny_engine, limit=1, max_tokens=1).drafting is None, "no round was needed"


@pytest.mark.parametrize(("accepted", "past"), [((5, 5, 1), 256), ((5, 1, 1), 128), ((5, 1, 4), None), ((5,), None)])
def test_drafts_fail_past_a_context_where_no_longer_one_works(accepted: tuple[int, ...], past: int | None) -> None:
    lengths = [100 << i for i in range(len(accepted)) for _ in range(12)]
    found = DraftingFinding("dflash", tuple(lengths), tuple(a for a in accepted for _ in range(12)), 8, low=False)
    assert found.by_context == tuple(ContextBin(128 << i, 12, float(a)) for i, a in enumerate(accepted))
    assert found.fails_past == past


def test_without_a_reason_of_its_own_the_usual_causes_are_named() -> None:
    found = DraftingFinding("dflash", (8,) * 12, (1,) * 12, 15, low=True)
    assert found.hints == [f"usual cause: {cause}" for cause in CAUSES]
    assert dataclasses.replace(found, low=False).hints == []
    strange = dataclasses.replace(found, accepted=(0,) * 12)
    assert strange.hints and not set(strange.hints) & set(found.hints)


# The pair, made by hand


WIDTH = 64  # of the vocabulary and of the states
MASK = WIDTH - 1  # its row of the embedding is zero
SHAPE: dict[str, Any] = {"vocab_size": WIDTH, "hidden_size": WIDTH, "num_kv_heads": 4, "max_positions": 1024}
DRAFTER: dict[str, Any] = {"num_layers": 1, "tap_layers": (0,), "block_size": 8, "mask_token_id": MASK}


def build_majority(path: Path, *, gain: float = 0.0, config: dict[str, Any] | None = None, **build: Any) -> Path:
    """The engine of the pair under `path`.

    `gain` is a factor in the target's first MLP, whose inner values become about 64 times its square and are then
    scaled down to nothing. `config` has entries of the drafter's config.json, `build` fields of the BuildRequest.
    """
    target_dims = TransformerDims(**{**vars(TARGET_DIMS), **SHAPE})
    target = make_target(path / "target", **SHAPE)
    weights = _silent(target_dims)
    weights[EMBEDDING] = 4 * np.eye(WIDTH, dtype=np.float32)
    weights[EMBEDDING][MASK] = 0
    for name in ("gate_proj", "up_proj"):
        weights[f"model.layers.0.mlp.{name}.weight"][0] = gain
    weights["model.layers.0.mlp.down_proj.weight"][:, 0] = 1e-9
    write_weights(target, weights, dtype="fp32", shards=1)

    shape = {**SHAPE, **DRAFTER}
    drafter = make_drafter(path / "drafter", config=config, **shape)
    weights = _silent(DFlashDims(**{**vars(TARGET_DIMS), **DRAFTER_EXTRA, **shape}))
    weights[FC] = np.eye(WIDTH, dtype=np.float32)
    for name in weights:
        if "v_proj" in name or "o_proj" in name:
            weights[name] = 0.2 * np.eye(WIDTH, dtype=np.float32)
    write_weights(drafter, weights, dtype="fp32", shards=1)
    engine = path / "engine"
    compile_engine(BuildRequest(target="mine", checkpoint=target, drafter=drafter, output=engine, **build))
    return engine


def _silent(dims: TransformerDims) -> dict[str, np.ndarray]:
    """The weights of a network whose layers add nothing to the residual stream."""
    shapes = checkpoint_shapes(dims, tied=True)
    return {name: (np.ones if "norm" in name else np.zeros)(shape, np.float32) for name, shape in shapes.items()}
