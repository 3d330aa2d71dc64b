"""What stops a TensorRT build: one line that says why, an old engine untouched, no new one left behind."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_drafter, make_pair, make_target
from fake_cuda import cudaError_t
from quantized import quantize
from tensorrt_builds import DIMS, Machine, build, refused

from ddtree_trt.build.backends.base import BuilderOptions
from ddtree_trt.build.backends.tensorrt import plans as tensorrt_profiles
from ddtree_trt.build.backends.tensorrt.backend import TensorRtBuild
from ddtree_trt.build.graph.lowering_tensorrt import NativeGraph
from ddtree_trt.drafters.dflash.dims import DFlashDims
from ddtree_trt.errors import BuildError, DDTreeError, MissingDependency, UsageError
from ddtree_trt.plugins import ABI


@pytest.fixture
def mine(tmp_path: Path) -> dict[str, Any]:
    """A pair that is parsed and compiled quickly."""
    target, drafter = make_pair(tmp_path / "pair", **DIMS)
    return {"target": "mine", "checkpoint": target, "drafter": drafter}


# Plugins, through the fake


def test_a_library_tensorrt_does_not_take(
    with_plugins: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(with_plugins.fake, "_load_library", lambda path: None)
    refused(tmp_path, BuildError, "does not take the plugin library", "ddtree::DDTreeAttention version 1")


def test_a_plugin_that_was_substituted(with_plugins: Machine, tmp_path: Path) -> None:
    assert with_plugins.fake is not None
    with_plugins.fake.substitutes = 2
    refused(tmp_path, BuildError, "the target has 6 DDTreeAttention nodes, TensorRT made 4 plugin layers")


@pytest.mark.parametrize("state", ["of another GPU", "damaged"])
def test_a_timing_cache_that_cannot_be_used(with_plugins: Machine, tmp_path: Path, state: Any) -> None:
    assert with_plugins.fake is not None
    with_plugins.fake.timing_cache = state
    refused(tmp_path, BuildError, "refuses the timing cache", "delete the file")


# What TensorRT refuses, in its own words


@pytest.mark.rtx
def test_a_graph_the_parser_refuses(
    machine: Machine, mine: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def swiglu(g: NativeGraph, gate: str, up: str, out: str) -> str:
        return g.op("BitwiseAnd", [gate, up], [out])

    monkeypatch.setattr(NativeGraph, "swiglu", swiglu)
    words = ["TensorRT 11.4.0.106 cannot parse the target: node 'model.layers.0.mlp.swiglu' (BitwiseAnd): ", "[Error"]
    refused(tmp_path, BuildError, *words, **mine)


@pytest.mark.rtx
def test_a_network_the_builder_refuses(
    machine: Machine, mine: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tensorrt_profiles.profile
    monkeypatch.setattr(
        tensorrt_profiles,
        "profile",
        lambda inputs, sizes: {n: shapes for n, shapes in whole(inputs, sizes).items() if n != "tree_mask"},
    )
    refused(tmp_path, BuildError, "cannot build the target: ", "tree_mask", "profile", **mine)


def test_a_builder_that_does_not_start(machine: Machine, tmp_path: Path) -> None:
    def broken(logger: Any) -> None:
        logger.log(machine.module.ILogger.Severity.ERROR, "CUDA initialization failure with error: 35")
        raise TypeError("pybind11::init(): factory function returned nullptr")

    machine.module.Builder = broken
    refused(tmp_path, BuildError, "builder does not start: CUDA initialization failure with error: 35")


@pytest.mark.rtx
def test_ctrl_c_while_tensorrt_works(machine: Machine, mine: dict[str, Any], tmp_path: Path) -> None:
    def interrupted(stage: str, done: int, total: int) -> None:
        if stage.startswith("build target") and done:
            raise KeyboardInterrupt

    engine = tmp_path / "engines" / "e"
    engine.parent.mkdir()
    with pytest.raises(KeyboardInterrupt):
        build(engine, interrupted, **mine)
    assert list(engine.parent.iterdir()) == []


# Machines and pairs that cannot be used: refused before any work

PLUGIN: dict[str, Any] = {"attention": "plugin"}
NO_DRIVER = {"cudaGetDeviceCount": cudaError_t.cudaErrorInsufficientDriver}


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda m: None, MissingDependency, "libddtree_plugins.so is not built"),
        (
            lambda m: m.plugins.write_bytes(b"ddtree-plugin-abi=99;"),
            MissingDependency,
            f"ABI 99, this version needs {ABI}",
        ),
        (
            lambda m: sys.modules.update({"cuda.bindings.runtime": None}),  # type: ignore[dict-item]
            MissingDependency,
            "cannot import cuda.bindings",
        ),
        (lambda m: setattr(m.module, "__version__", "11.0.0.1"), MissingDependency, "needs 11.1 or newer below 12"),
        (lambda m: setattr(m.module, "__version__", "12.0.0.1"), MissingDependency, "TensorRT 12.0.0.1 is installed"),
        (
            lambda m: m.cuda.fail.update(NO_DRIVER),
            BuildError,
            "cudaGetDeviceCount failed with cudaErrorInsufficientDriver",
        ),
        (lambda m: setattr(m.cuda, "count", 0), BuildError, "CUDA sees none"),
        (lambda m: setattr(m.cuda, "sm", 75), BuildError, "compute capability 7.5, engines need 8.0 or newer"),
    ],
)
def test_machines(
    machine: Machine, tmp_path: Path, change: Callable[[Machine], object], error: type[DDTreeError], words: str
) -> None:
    """`machine` takes back what is done to `sys.modules`."""
    change(machine)
    refused(tmp_path, error, words, **(PLUGIN if "ABI" in words or "built" in words else {}))


def test_pairs_without_kernels(with_plugins: Machine, tmp_path: Path) -> None:
    machine, target = with_plugins, make_target(tmp_path / "target", **DIMS)
    autoregressive = make_target(tmp_path / "ar", head_dim=16, max_positions=512, tokenizer=False)
    mine = {"target": "mine", "checkpoint": target, "drafter": autoregressive}
    words = ["heads of 16 values have no kernel", "use --attention native"]
    refused(tmp_path / "1", UsageError, *words, **PLUGIN, **mine)
    machine.cuda.sm = 86
    fp8: dict[str, Any] = {**mine, "checkpoint": quantize(make_target(tmp_path / "fp8", **DIMS))}
    fp8["drafter"] = make_drafter(tmp_path / "dflash", **DIMS)
    refused(tmp_path / "3", UsageError, "FP8, which needs compute capability 8.9 or newer", "has 8.6", **fp8)
    int4 = quantize(make_target(tmp_path / "int4", **DIMS), "W4A16_AWQ")
    build(tmp_path / "4", **{**fp8, "checkpoint": int4})
    small = {"drafter": make_drafter(tmp_path / "drafter", head_dim=16, max_positions=512)}
    refused(tmp_path / "2", UsageError, *words, **PLUGIN, **{**mine, **small})


def test_what_the_plugin_lacks_takes_native_attention(with_plugins: Machine) -> None:
    """It is refused by name, and what chooses for the user takes TensorRT's own layers."""
    plain = DFlashDims(96, 32, 2, 4, 2, 64, 48, 1e-6, 1e4, 512, 6, 3, (0, 1), 2)
    target, with_plugin, either = (plain, *(TensorRtBuild(BuilderOptions(attention=a)) for a in ("plugin", "auto")))
    with_plugin.check((target, plain), "bf16")
    assert either.attention((target, plain)) == "plugin"
    for pair, words in (
        ((target, replace(plain, windows=(3, 0))), "the drafter's sliding windows have no kernel; "),
        ((replace(plain, head_dim=32), plain), "heads of 32 values have no kernel.*"),
    ):
        with pytest.raises(UsageError, match=f"{words}use --attention native"):
            with_plugin.check(pair, "bf16")
        either.check(pair, "bf16")
        assert either.attention(pair) == "native"
