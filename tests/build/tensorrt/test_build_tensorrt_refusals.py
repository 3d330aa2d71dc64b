"""What stops a TensorRT build: one line that says why, an old engine untouched, no new one left behind."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from checkpoints import make_drafter, make_target
from quantized import quantize
from real_tensorrt import ROOT, WrongCall, type_stubs
from tensorrt_builds import DIMS, ENGINE_MODULE, NO_DRIVER, SOURCE, SUCCESS, Machine, build, refused

from ddtree_trt.build.backends.base import BuilderOptions
from ddtree_trt.build.backends.tensorrt import profiles as tensorrt_profiles
from ddtree_trt.build.backends.tensorrt.machine import BELOW, LOWEST
from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.errors import BuildError, MissingDependency, UsageError


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    (tmp_path / "native").mkdir()
    yield Machine(tmp_path / "native", monkeypatch)
    sys.modules.pop(ENGINE_MODULE, None)  # it holds the fake


def test_missing_plugin_library(machine: Machine, tmp_path: Path) -> None:
    machine.plugins.unlink()
    refused(machine, tmp_path, MissingDependency, "libddtree_plugins.so is not built", "run `make plugins`")


def test_stale_plugin_library(machine: Machine, tmp_path: Path) -> None:
    machine.plugins.write_bytes(b"ddtree-plugin-abi=99;")
    refused(machine, tmp_path, MissingDependency, "plugin ABI 99, this version needs 2")


def test_a_library_tensorrt_does_not_take(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.tensorrt, "_load_library", lambda path: None)
    refused(machine, tmp_path, BuildError, "does not take the plugin library", "ddtree::DDTreeAttention version 1")


def test_a_plugin_that_was_substituted(machine: Machine, tmp_path: Path) -> None:
    machine.tensorrt.substitutes = 2
    refused(machine, tmp_path, BuildError, "the target has 6 DDTreeAttention nodes, TensorRT made 4 plugin layers")


def test_a_graph_the_parser_refuses(machine: Machine, tmp_path: Path) -> None:
    machine.tensorrt.parse_errors = [("model.layers.3.qkv.out", "MatMul", "no such thing")]
    words = ["cannot parse the target: node 'model.layers.3.qkv.out' (MatMul): no such thing", "UNSUPPORTED_NODE"]
    refused(machine, tmp_path, BuildError, *words)


def test_a_network_the_builder_refuses(machine: Machine, tmp_path: Path) -> None:
    machine.tensorrt.build_error = "Could not find any implementation\nfor node model.layers.0.attn"
    words = ["cannot build the target", "any implementation for node model.layers.0.attn"]
    refused(machine, tmp_path, BuildError, *words)


@pytest.mark.parametrize("state", ["of another GPU", "damaged"])
def test_a_timing_cache_that_cannot_be_used(machine: Machine, tmp_path: Path, state: Any) -> None:
    machine.tensorrt.timing_cache = state
    refused(machine, tmp_path, BuildError, "refuses the timing cache", "delete the file")


def test_a_builder_that_does_not_start(machine: Machine, tmp_path: Path) -> None:
    def broken(logger: Any) -> None:
        logger.log(machine.tensorrt.real.ILogger.Severity.ERROR, "CUDA initialization failure with error: 35")
        raise TypeError("pybind11::init(): factory function returned nullptr")

    machine.tensorrt.module.Builder = broken  # type: ignore[attr-defined]
    refused(machine, tmp_path, BuildError, "builder does not start: CUDA initialization failure with error: 35")


@pytest.mark.parametrize("missing", ["tree_mask", "positions", "all"])
def test_a_missing_profile(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """The fake refuses what TensorRT would: that the build passes above says that nothing is missing."""
    whole = tensorrt_profiles.profile

    def cut(inputs: Any, sizes: Any) -> Any:
        return {name: shapes for name, shapes in whole(inputs, sizes).items() if missing not in (name, "all")}

    monkeypatch.setattr(tensorrt_profiles, "profile", cut)
    refused(machine, tmp_path, BuildError, "cannot build the target: Dynamic input", "is missing dimensions")


def test_ctrl_c_while_tensorrt_works(machine: Machine, tmp_path: Path) -> None:
    def interrupted(stage: str, done: int, total: int) -> None:
        if stage.startswith("build target") and done:
            raise KeyboardInterrupt

    engine = tmp_path / "engines" / "e"
    engine.parent.mkdir()
    with pytest.raises(KeyboardInterrupt):
        build(engine, interrupted)
    assert list(engine.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("right", "wrong", "error"),
    [
        ("LayerType.PLUGIN_V3", "LayerType.PLUGIN_V4", AttributeError),
        ("parser.num_errors", "parser.error_count", AttributeError),
        ("network.get_layer(i).type", "network.layer(i).type", AttributeError),
        ("ignore_mismatch=False", "strict=True", WrongCall),
        ("config.add_optimization_profile(profile)", "config.add_optimization_profile(shapes)", WrongCall),
        ("profile.set_shape(tensor, smallest, tuned, largest)", "profile.set_shape(tensor, smallest)", WrongCall),
        ("config.progress_monitor = monitor", "config.monitor = monitor", AttributeError),
    ],
)
def test_a_name_tensorrt_has_not_is_seen(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right: str, wrong: str, error: type[Exception]
) -> None:
    """Seeded mistakes: the tests above could not pass with them."""
    source = SOURCE.read_text(encoding="utf-8")
    assert right in source
    if "num_errors" in right:
        machine.tensorrt.parse_errors = [("a", "b", "c")]
    module = ModuleType(ENGINE_MODULE)
    exec(compile(source.replace(right, wrong), SOURCE.name, "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, ENGINE_MODULE, module)
    with pytest.raises(error):
        build(tmp_path / "e")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_types_of_the_bindings(tmp_path: Path) -> None:
    """mypy over the file that speaks to TensorRT, with stubs made from the real bindings; and over wrong versions."""
    if shutil.which("mypy", path=str(Path(sys.executable).parent)) is None:
        pytest.skip("skipped: no mypy")
    wrong = {
        "parse_from_file(str(graph))": "parse_from_file(graph)",
        "trt.TensorFormat.LINEAR": "trt.TensorFormat.FLAT",
        "self._options.workspace_mib << 20)": "'1 GiB')",
        "network.num_layers": "network.layer_count",
        "trt.LayerInformationFormat.JSON": "trt.ProfilingVerbosity.DETAILED",
    }
    text = SOURCE.read_text(encoding="utf-8")
    for right, replacement in wrong.items():
        assert right in text
        text = text.replace(right, replacement)
    (tmp_path / "mistaken.py").write_text(text)
    options = (
        "--strict --no-error-summary --no-warn-unused-ignores --no-warn-unreachable --follow-imports=silent".split()
    )
    command = [
        sys.executable,
        "-m",
        "mypy",
        *options,
        "--cache-dir",
        str(ROOT / "build" / "tensorrt-bindings" / "mypy"),
    ]
    environment = {"MYPYPATH": f"{type_stubs()}:{ROOT}", "PATH": "/usr/bin"}
    run = subprocess.run([*command, str(SOURCE)], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    run = subprocess.run([*command, "mistaken.py"], env=environment, cwd=tmp_path, capture_output=True, text=True)
    pairs = zip(SOURCE.read_text(encoding="utf-8").splitlines(), text.splitlines(), strict=True)
    lines = {number for number, (right, changed) in enumerate(pairs, 1) if right != changed}
    said = {int(line.split(":")[1]) for line in run.stdout.splitlines() if ": error:" in line}
    assert lines == said and len(lines) == len(wrong), run.stdout


# Machines and pairs that cannot be used: refused before any work


def test_tensorrt_is_not_installed(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    refused(machine, tmp_path, MissingDependency, "cannot import tensorrt", "pip install '.[tensorrt]'")


def test_cuda_python_is_not_installed(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    refused(machine, tmp_path, MissingDependency, "cannot import cuda.bindings.runtime", "pip install")


@pytest.mark.parametrize("version", ["10.13.3.9", "11.0.0.1", "8.6.1", "12.0.0.1"])
def test_another_tensorrt(machine: Machine, tmp_path: Path, version: str) -> None:
    machine.tensorrt.module.__version__ = version  # type: ignore[attr-defined]
    refused(machine, tmp_path, MissingDependency, f"TensorRT {version} is installed", "needs 11.1 or newer below 12")


def test_the_extra_installs_what_the_build_takes() -> None:
    """One range of releases: pip must not fetch a TensorRT that is refused with the advice to run pip."""
    pyproject = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    extra = re.search(
        r'^tensorrt = \["tensorrt>=([\d.]+),<([\d.]+)", "cuda-python>=13,<14"\]$', pyproject, re.MULTILINE
    )
    assert extra is not None
    lowest, below = (tuple(map(int, part.split("."))) for part in extra.groups())
    assert (lowest, below) == (LOWEST, BELOW[:1])


def test_no_driver(machine: Machine, tmp_path: Path) -> None:
    machine.cuda.cudaGetDeviceCount = lambda: (NO_DRIVER, None)  # type: ignore[attr-defined]
    refused(machine, tmp_path, BuildError, "cudaGetDeviceCount failed with cudaErrorInsufficientDriver", "driver")


def test_no_gpu(machine: Machine, tmp_path: Path) -> None:
    machine.cuda.cudaGetDeviceCount = lambda: (SUCCESS, 0)  # type: ignore[attr-defined]
    refused(machine, tmp_path, BuildError, "CUDA sees none", "build on the machine with the GPU")


def test_an_old_gpu(machine: Machine, tmp_path: Path) -> None:
    machine.device.major, machine.device.minor = 7, 5
    refused(machine, tmp_path, BuildError, "compute capability 7.5, the kernels need 8.0 or newer")


def test_pairs_without_kernels(machine: Machine, tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", **DIMS)
    autoregressive = make_target(tmp_path / "ar", head_dim=16, max_positions=512, tokenizer=False)
    mine = {"target": "mine", "checkpoint": target, "drafter": autoregressive}
    refused(machine, tmp_path / "1", UsageError, "heads of 16 values have no kernel", **mine)
    machine.device.major, machine.device.minor = 8, 6
    fp8: dict[str, Any] = {**mine, "checkpoint": quantize(make_target(tmp_path / "fp8", **DIMS))}
    fp8["drafter"] = make_drafter(tmp_path / "dflash", **DIMS)
    refused(machine, tmp_path / "3", UsageError, "FP8, which needs compute capability 8.9 or newer", "has 8.6", **fp8)
    int4 = quantize(make_target(tmp_path / "int4", **DIMS), "W4A16_AWQ")
    build(tmp_path / "4", **{**fp8, "checkpoint": int4})
    small = {"drafter": make_drafter(tmp_path / "drafter", head_dim=16, max_positions=512)}
    refused(machine, tmp_path / "2", UsageError, "heads of 16 values have no kernel", **{**mine, **small})


def test_precisions(machine: Machine, tmp_path: Path) -> None:
    refused(machine, tmp_path, UsageError, "the tensorrt backend computes in bf16, fp16", precision="fp32")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (BuilderOptions(optimization_level=6), "--builder-optimization-level must be from 0 to 5, not 6"),
        (BuilderOptions(workspace_mib=0), "--builder-workspace-mib must be from 1 to 1048576, not 0"),
    ],
)
def test_options_out_of_range(machine: Machine, tmp_path: Path, options: BuilderOptions, words: str) -> None:
    refused(machine, tmp_path, UsageError, words, builder=options)


@pytest.mark.parametrize(
    ("options", "option"),
    [
        (BuilderOptions(optimization_level=3), "--builder-optimization-level"),
        (BuilderOptions(workspace_mib=64), "--builder-workspace-mib"),
        (BuilderOptions(inspect=True), "--builder-inspect"),
    ],
)
def test_options_are_tensorrts(tmp_path: Path, options: BuilderOptions, option: str) -> None:
    with pytest.raises(UsageError, match=rf"{option} is for --backend tensorrt, not for onnxruntime; leave it out"):
        compile_engine(BuildRequest(target="tiny", output=tmp_path / "e", builder=options))
    assert list(tmp_path.iterdir()) == []
