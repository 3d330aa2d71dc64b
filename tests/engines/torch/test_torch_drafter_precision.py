"""A block drafter keeps a range that fp16 does not have: in an engine of fp16 it is in bf16."""

from pathlib import Path

import numpy as np
import torch
from checkpoints import make_drafter, make_target
from dflash_truth import DFlash
from drafts import marginals
from numerics import Truth
from safetensors.torch import load_file, save_file

from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.runtime.engines.base import DraftRequest, VerifyRequest
from ddtree_trt.runtime.engines.torch.engine import TorchEngine
from ddtree_trt.runtime.engines.torch.weights import read_weights
from ddtree_trt.runtime.tree import token_chain

CPU = torch.device("cpu")
DOWN = "layers.0.mlp.down_proj.weight"
LARGE = 1e6  # times the MLP's output: a residual stream that is beyond what fp16 holds, and that the last norm scales


def build(path: Path, precision: str) -> Path:
    """An engine of a drafter with a large residual stream."""
    target = make_target(path / "target", dtype="bf16")
    drafter = make_drafter(path / "drafter")
    weights = load_file(drafter / "model.safetensors")
    weights[DOWN] *= LARGE
    save_file(weights, drafter / "model.safetensors")
    request = BuildRequest("pair", target, drafter, "torch", precision, output=path / precision)  # type: ignore[arg-type]
    compile_engine(request)
    return path / precision


def test_an_fp16_engines_drafter_is_in_bf16(tmp_path: Path) -> None:
    directory = build(tmp_path, "fp16")
    manifest = load_manifest(directory)
    weights = read_weights(directory, manifest, CPU)
    types = {name.split(".")[0]: tensor.dtype for name, tensor in weights.items()}
    assert types == {"target": torch.float16, "drafter": torch.bfloat16}
    engine = TorchEngine(manifest, weights, CPU)
    dims = manifest.drafting.dims
    truth = Truth(tmp_path / "target", dims.tap_layers)
    dflash = DFlash(tmp_path / "drafter", dims, truth)
    tokens = np.random.default_rng(2).integers(0, 90, 20)
    engine.prefill(0, tokens, rows="none", taps=True)
    for _ in range(2):
        draft = marginals(engine.draft([DraftRequest(0, 7, 8, dims.draft_length)])[0])
        expected = dflash(truth(tokens.tolist())[1], 7)
        error = np.abs(draft.log_probs - np.take_along_axis(expected, draft.token_ids, axis=-1))
        assert error.max() < 0.1 * expected.std()
        engine.verify([VerifyRequest(0, token_chain(tokens[:6]))])  # more than the drafter's buffer holds
        engine.commit(0, np.arange(6, dtype=np.int32), taps=True)
        tokens = np.concatenate([tokens, tokens[:6]])
