"""What the PyTorch engine needs of the machine and of its files."""

from pathlib import Path

import pytest
import torch
from checkpoints import make_pair
from engine_builds import build_torch_engine

from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.errors import ArtifactError, MissingDependency
from ddtree_trt.runtime.engines.load import open_engine
from ddtree_trt.runtime.engines.profile import fingerprint
from ddtree_trt.runtime.engines.torch import attention as torch_attention
from ddtree_trt.runtime.engines.torch.attention import scratch_memory
from ddtree_trt.runtime.engines.torch.engine import TorchEngine
from ddtree_trt.runtime.options import EngineOptions

# Refusals


def test_torch_missing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"pip install --editable '\.\[torch\]'"):
        open_engine(directory)


def test_fp16_needs_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"fp16, which is for GPUs.*--backend torch --precision fp32"):
        build_torch_engine(*make_pair(tmp_path), tmp_path / "engine", precision="fp16")


def test_kernels_missing_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Path:
        raise MissingDependency(f"{name} is not built")

    monkeypatch.setattr(torch_attention, "find", missing)
    monkeypatch.setattr(torch.ops, "ddtree", object())
    cuda, scratch = torch.device("cuda"), scratch_memory(0, torch.device("cpu"))
    with pytest.raises(MissingDependency, match="libddtree_torch"):
        torch_attention.attention_for(cuda, torch.bfloat16, 128, scratch)
    assert not torch_attention.attention_for(cuda, torch.float32, 128, scratch).kernels


def test_sums_of_products_stay_single_on_a_gpu(directory: Path) -> None:
    settings = torch.backends.cuda.matmul
    names = ["allow_tf32", "allow_fp16_accumulation"]
    names += [f"allow_{kind}_reduced_precision_reduction" for kind in ("bf16", "fp16")]
    before = {name: getattr(settings, name) for name in names}
    for name in names:
        setattr(settings, name, True)
    with pytest.raises((AssertionError, RuntimeError, KeyError)):  # there is no GPU, or no weight, to go on with
        TorchEngine(load_manifest(directory), {}, torch.device("cuda"))
    found = [getattr(settings, name) for name in names]
    for name, value in before.items():
        setattr(settings, name, value)
    assert not any(found)


def test_a_weight_file_of_another_model(tmp_path: Path) -> None:
    """What digests cannot see: a manifest and a weight file that both are whole and do not belong together."""
    pair = make_pair(tmp_path / "a")
    build_torch_engine(*pair, tmp_path / "engine").close()
    manifest = load_manifest(tmp_path / "engine")
    for changes in ({"num_layers": 2}, {"intermediate_size": 40}):
        dims = type(manifest.target_dims)(**{**vars(manifest.target_dims), **changes})
        other = type(manifest)(**{**vars(manifest), "target_dims": dims})
        with pytest.raises(ArtifactError, match="rebuild with: ddtree-trt build"):
            TorchEngine.open(tmp_path / "engine", other)


# Parts


def test_a_profile_is_of_one_device(engine: TorchEngine, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same engine directory may run on a CPU and on GPUs of several kinds."""
    monkeypatch.setattr("ddtree_trt.runtime.engines.torch.engine.device_name", lambda device: "some GPU")
    other = TorchEngine.open(directory, load_manifest(directory), EngineOptions(threads=1))
    assert fingerprint(engine.manifest, engine.threads) != fingerprint(other.manifest, engine.threads)
