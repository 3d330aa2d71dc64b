"""The torch half of a build: what lies in the weight file."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import BY_SWITCHES, make_pair, make_target
from safetensors.torch import load_file

from ddtree_trt.artifact import files as artifact
from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.artifact.verify import verify_files
from ddtree_trt.artifact.weight_layout import stored_weights
from ddtree_trt.build.backends.torch import backend as torch_build
from ddtree_trt.build.checkpoint.reader import load_checkpoint
from ddtree_trt.build.choice import resolve_precision
from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.errors import BuildError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def build(pair: tuple[Path, Path], engine: Path, **options: Any) -> Manifest:
    request = BuildRequest(
        target="mine", checkpoint=pair[0], drafter=pair[1], output=engine, backend="torch", **options
    )
    return compile_engine(request)


@pytest.mark.parametrize("kind", ["dflash", "dflash-untied", "autoregressive", *BY_SWITCHES])
@pytest.mark.parametrize("precision", DTYPES)
def test_weights_are_the_checkpoints(tmp_path: Path, kind: str, precision: Any) -> None:
    """Every tensor of both checkpoints, once, in the engine's precision, joined where the layout joins; a block
    drafter's in bf16 where that is fp16."""
    if kind in BY_SWITCHES:
        pair = make_pair(tmp_path, family=BY_SWITCHES[kind])
    elif kind == "autoregressive":
        pair = make_target(tmp_path / "t"), make_target(tmp_path / "d", tied=False, num_layers=1, tokenizer=False)
    else:
        pair = make_pair(tmp_path, tied=kind == "dflash")
    manifest = build(pair, tmp_path / "engine", precision=precision)
    verify_files(tmp_path / "engine", manifest)
    assert (manifest.backend, manifest.precision, manifest.tensors) == ("torch", precision, {})
    stored = load_file(tmp_path / "engine" / artifact.TORCH_WEIGHTS)
    checkpoints = {"target": load_checkpoint(pair[0]), "drafter": load_checkpoint(pair[1])}
    layout = stored_weights(
        manifest.target_dims,
        manifest.drafter_dims,
        target_tied=checkpoints["target"].tie_word_embeddings,
        drafter_tied=checkpoints["drafter"].tie_word_embeddings,
    )
    assert sorted(stored) == sorted(w.name for w in layout)
    used = Counter((w.network, s) for w in layout for s in w.sources)
    assert used == Counter((n, s) for n, c in checkpoints.items() for s in c.tensors)
    for weight in layout:
        parts = [torch.tensor(checkpoints[weight.network].tensor(s)) for s in weight.sources]
        in_bf16 = precision == "fp16" and weight.network == "drafter" and kind != "autoregressive"
        expected = torch.cat(parts).view(weight.shape).to(torch.bfloat16 if in_bf16 else DTYPES[precision])
        assert torch.equal(stored[weight.name], expected), weight.name


def test_weights_too_large_for_fp16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = make_pair(tmp_path)
    checkpoint = type(load_checkpoint(pair[0]))
    tensor = checkpoint.tensor
    monkeypatch.setattr(checkpoint, "tensor", lambda self, name: tensor(self, name) * 1e6)
    with pytest.raises(BuildError, match=r"embed_tokens.weight has weights up to .*fp16 cannot hold.*--precision bf16"):
        build(pair, tmp_path / "engine", precision="fp16")
    assert not (tmp_path / "engine").exists()
    assert build(pair, tmp_path / "engine", precision="bf16").precision == "bf16"


def test_auto_is_bf16_where_there_is_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for there, precision in ((False, "fp32"), (True, "bf16")):
        control = tmp_path / f"nvidiactl-{there}"
        if there:
            control.touch()
        monkeypatch.setattr(torch_build, "_GPU_CONTROL", control)
        assert resolve_precision(torch_build.TorchBuild(), "auto") == precision
