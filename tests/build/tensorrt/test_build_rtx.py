"""`build --backend tensorrt-rtx` through the command line: plans that the real builder wrote, without a GPU."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from build_faults import assert_refused
from checkpoints import make_drafter, make_pair, make_target
from command_line import Cli
from quantized import quantize
from tensorrt_builds import DIMS

from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.artifact.verify import rebuild_command, verify_files
from ddtree_trt.build.backends.base import BuilderOptions
from ddtree_trt.build.backends.tensorrt import backend as rtx
from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.device.buffers import ALIGNMENT, CacheShape
from ddtree_trt.device.gpus import KINDS
from ddtree_trt.device.libraries import import_tensorrt
from ddtree_trt.errors import MissingDependency, UsageError

PLANS = ("target.plan", "drafter.plan", "compaction.plan")
RTX = ["--backend", "tensorrt-rtx"]
SMALL: dict[str, Any] = {**DIMS, "num_layers": 1}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rtx, "find_gpus", lambda: ())


@pytest.fixture
def pair(tmp_path: Path) -> list[object]:
    """The options that name a pair that is compiled quickly."""
    target, drafter = make_pair(tmp_path / "pair", **SMALL)
    return ["--target", "mine", "--checkpoint", target, "--drafter", drafter, "--max-batch", 2]


@pytest.mark.rtx
def test_the_packaged_pair(cli: Cli, tmp_path: Path) -> None:
    """The whole command: built, verified and shown."""
    engine = tmp_path / "engines" / "tiny"
    code, out, err = cli("build", "--target", "tiny", *RTX, "--output", engine)
    assert code == 0, err
    assert out.startswith(f"built {engine}: tensorrt-rtx bf16, ")
    assert "latencies are measured when the engine is first opened on a GPU that it is for" in err
    manifest = load_manifest(engine)
    verify_files(engine, manifest)
    assert (manifest.backend, manifest.precision, manifest.attention) == ("tensorrt-rtx", "bf16", "native")
    for name in PLANS:
        assert manifest.files[name].size > 100_000
    assert manifest.toolchain["tensorrt-rtx"] == import_tensorrt(rtx=True).__version__
    assert manifest.toolchain["gpus"] == "sm80 sm86 sm89 sm120 sm121", "all that have bf16"
    assert set(manifest.tensors) == {"target", "drafter", "compaction"}

    code, out, err = cli("inspect", engine)
    assert code == 0, err
    assert "tensorrt-rtx bf16 engine" in out and "every file verified" in out
    assert "none, attention is native" in out and "gpus sm80 sm86 sm89 sm120 sm121" in out


@pytest.mark.rtx
def test_gpus_that_are_named(cli: Cli, pair: list[object], tmp_path: Path) -> None:
    engine = tmp_path / "engines" / "mine"
    given = ["--gpu", "sm89", "--gpu", "sm120", "--gpu", "sm89", "--precision", "fp16"]
    code, _, err = cli("build", *pair, *RTX, "--output", engine, *given)
    assert code == 0, err
    manifest = load_manifest(engine)
    assert manifest.precision == "fp16"
    assert all(p.is_file() for p in engine.iterdir()), "no graphs"
    code, out, err = cli("build", *pair, *RTX, *given, "--dry-run", "--json")
    assert code == 0, err
    assert json.loads(out)["limits"] == vars(manifest.limits), "with the rows that align slots"
    for dims in (manifest.target_dims, manifest.drafter_dims):
        assert CacheShape.of(dims, manifest.limits, 2).slot_bytes % ALIGNMENT == 0, "a slot's address is bound"
    assert manifest.toolchain["gpus"] == "sm89 sm120"
    words = "--backend tensorrt-rtx --precision fp16 --gpu sm89 --gpu sm120 --output"
    assert words in rebuild_command(engine, manifest)


def kinds(*names: str) -> str:
    build = rtx.RtxBuild(BuilderOptions(gpus=names))
    checkpoint: Any = type("Plain", (), {"quantization": None})
    return " ".join(build.kinds_for(checkpoint))


def test_the_kinds_an_engine_is_for() -> None:
    assert kinds() == "sm80 sm86 sm89 sm120 sm121" and kinds("sm120", "sm89", "sm120") == "sm120 sm89"


def test_kinds_are_those_of_the_product() -> None:
    real = {name for name in vars(import_tensorrt(rtx=True).ComputeCapability) if name.startswith("SM")}
    assert {name.upper() for name in KINDS} | {"SM75"} == real


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--gpu", "sm90"], ["--gpu sm90", "does not serve", "use --backend tensorrt"]),
        (["--gpu", "sm75"], ["--gpu sm75 is too old", "use --backend torch"]),
        (["--precision", "fp32"], ["computes in bf16, fp16"]),
    ],
)
def test_refusals(cli: Cli, tmp_path: Path, options: list[str], words: list[str]) -> None:
    engine = tmp_path / "engines" / "e"
    for more in ((), ("--dry-run",)):
        assert_refused(cli("build", "--target", "tiny", *RTX, *options, "--output", engine, *more), 2, *words)
    assert not engine.parent.exists()


def test_a_quantised_target_needs_gpus_that_multiply_it(tmp_path: Path) -> None:
    target, drafter = make_target(tmp_path / "fp8", **DIMS), make_drafter(tmp_path / "dflash", **DIMS)
    request = BuildRequest(
        target="mine",
        checkpoint=quantize(target),
        drafter=drafter,
        backend="tensorrt-rtx",
        output=tmp_path / "e",
        gpus=("sm89", "sm86"),
    )
    with pytest.raises(UsageError, match=r"FP8, which needs compute capability 8.9 or newer, and sm86 has 8.6"):
        compile_engine(request)
    assert not request.destination.exists()


def test_another_release(monkeypatch: pytest.MonkeyPatch) -> None:
    product: Any = type(sys)("tensorrt_rtx")
    product.__version__ = version = "1.6.1.120"
    monkeypatch.setattr(rtx, "import_tensorrt", lambda **_: product)
    with pytest.raises(MissingDependency, match=rf"RTX {version} is installed, the build needs 1.7 or newer below 2"):
        _ = rtx.RtxBuild(BuilderOptions()).module
