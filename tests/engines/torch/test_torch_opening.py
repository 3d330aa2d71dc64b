"""What the PyTorch engine needs of the machine and of its files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


PRODUCTS = [f"allow_{kind}_reduced_precision_reduction" for kind in ("bf16", "fp16")]
PRODUCTS += ["allow_tf32", "allow_fp16_accumulation"]


@pytest.fixture
def products() -> Iterator[Any]:
    """PyTorch's settings of matrix products on a GPU, all loose."""
    settings = torch.backends.cuda.matmul
    before = {name: getattr(settings, name) for name in PRODUCTS}
    for name in PRODUCTS:
        setattr(settings, name, True)
    yield settings
    for name, value in before.items():
        setattr(settings, name, value)


def test_sums_of_products_stay_single_on_a_gpu(directory: Path, products: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening on a GPU turns off what PyTorch leaves on: sums of a product's parts in half precision."""
    built = load_manifest(directory)
    TorchEngine.open(directory, built).close()
    assert all(getattr(products, name) for name in PRODUCTS)  # a CPU engine leaves the process alone
    monkeypatch.setattr("ddtree_trt.runtime.engines.torch.engine.choose_device", lambda: torch.device("cuda"))
    monkeypatch.setattr("ddtree_trt.runtime.engines.torch.engine.check_device", lambda *_: None)
    monkeypatch.setattr("ddtree_trt.runtime.engines.torch.engine.read_weights", lambda *_: {})
    with pytest.raises((AssertionError, RuntimeError)):  # there is no GPU to go on with
        TorchEngine.open(directory, built)
    assert not any(getattr(products, name) for name in PRODUCTS)


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
