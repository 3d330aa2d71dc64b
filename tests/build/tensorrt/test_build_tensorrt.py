"""The TensorRT build, end to end: native attention through the real builder of TensorRT for RTX, our plugin through a
recording fake of the builder over the real bindings; a fake of the GPU."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_drafter, make_pair, make_target
from fake_cuda import cudaError_t
from hypothesis import given
from hypothesis import strategies as st
from plugin_libraries import ROOT, glue, lean_python
from quantized import quantize
from safetensors.torch import load_file
from tensorrt_builds import DIMS, Machine, build, refused

from ddtree_trt import plugins
from ddtree_trt.artifact.files import sha256_file
from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.artifact.verify import rebuild_command
from ddtree_trt.build.backends.base import BuilderOptions
from ddtree_trt.build.backends.tensorrt import plans as tensorrt_profiles
from ddtree_trt.build.backends.tensorrt.backend import TensorRtBuild
from ddtree_trt.build.checkpoint.reader import load_checkpoint
from ddtree_trt.build.graph.lowering_tensorrt import NativeGraph
from ddtree_trt.drafters.dflash.dims import DFlashDims
from ddtree_trt.errors import BuildError, DDTreeError, MissingDependency, UsageError
from ddtree_trt.models.decoder import EMBEDDING, HEAD
from ddtree_trt.plugins import ABI, library

SMALL: dict[str, Any] = {**DIMS, "num_layers": 1}
TOOLCHAIN = {"tensorrt": "11.4.0.106", "cuda": "13.0", "driver": "13.1", "sm": "90", "gpu": "NVIDIA H100 80GB HBM3"}
PLANS = {"target.plan", "drafter.plan", "compaction.plan"}
TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"}


def test_the_engine_directory_of_the_tiny_pair(with_plugins: Machine, tmp_path: Path) -> None:
    engine, notes = tmp_path / "engines" / "tiny", list[str]()
    manifest = build(engine, notice=notes.append)
    assert "attention: our plugin, libddtree_plugins.so" in notes
    assert (manifest.backend, manifest.precision, manifest.attention) == ("tensorrt", "bf16", "plugin")
    assert manifest.toolchain.items() >= TOOLCHAIN.items()
    assert manifest.plugin == {
        "name": "DDTreeAttention",
        "version": "1",
        "namespace": "ddtree",
        "abi": str(plugins.ABI),
        "sha256": sha256_file(with_plugins.plugins),
    }
    assert set(manifest.files) - TOKENIZER == {*PLANS, "shared.safetensors", "examples.json"}
    assert {p.name for p in engine.iterdir()} == {*manifest.files, "manifest.json"}
    for network in ("target", "drafter"):  # the head is an input of its own also where it is the embedding
        assert manifest.tensors[network]["inputs"][-2:] == ["embedding", "lm_head"]
    assert "tree_mask" not in manifest.tensors["drafter"]["inputs"]
    assert with_plugins.fake is not None
    planes = 2 * manifest.target_dims.num_layers
    (shapes,) = (p.shapes for (p,) in with_plugins.fake.named("IBuilderConfig.add_optimization_profile")[2:])
    assert [dims[0] for dims in shapes["past_cache"]] == [1, 1, planes], "the builder tries the plugin on one plane"
    assert "--backend tensorrt --precision bf16 --output" in rebuild_command(engine, manifest)
    assert list(engine.parent.iterdir()) == [engine]


@pytest.mark.rtx
def test_an_engine_without_our_library(machine: Machine, tmp_path: Path) -> None:
    target, drafter = make_pair(tmp_path / "pair", tied=False, **SMALL)
    notes, seen = list[str](), list[tuple[str, int, int]]()
    manifest = build(
        tmp_path / "e",
        lambda *call: seen.append(call),
        notes.append,
        target="mine",
        checkpoint=target,
        drafter=drafter,
        max_batch=3,
        max_tree_budget=100,
    )
    (line,) = [note for note in notes if note.startswith("attention: ")]
    assert line.startswith("attention: native, TensorRT's own layers; our plugin is left out: native library")
    assert (manifest.attention, manifest.plugin) == ("native", None)
    assert manifest.toolchain.items() >= TOOLCHAIN.items()
    assert set(manifest.files) - TOKENIZER == {*PLANS, "shared.safetensors"}
    assert min(manifest.files[name].size for name in PLANS) > 10_000
    assert "slot_ids" not in manifest.tensors["target"]["inputs"] + manifest.tensors["drafter"]["inputs"]
    assert manifest.tensors["compaction"]["inputs"][:3] == ["past_len", "keep", "past_key.0"]
    assert "--attention native" in rebuild_command(tmp_path / "e", manifest)

    recorded, block, rows = machine.recorded, manifest.drafting.dims.block_size, manifest.limits.cache_rows
    assert recorded is not None and len(recorded.profiles) == 2
    shapes = recorded.shapes(0, 0)
    assert shapes["token_ids"] == ((1, 1), (1, 64), (3, 256)), "trees of up to 101 tokens, and prompts"
    assert shapes["tree_mask"] == ((1, 1, 8), (1, 64, 8), (3, 256, 8))
    assert shapes["rows"] == ((1,), (64,), (768,))
    assert shapes["past_key.0"] == ((1, 1, rows, 64), (1, 1, rows, 64), (3, 1, rows, 64))
    shapes = recorded.shapes(1, 1)
    assert shapes["positions"] == ((1, 1 + block), (1, block + block // 2), (3, 256 + block))
    assert recorded.networks[2].num_inputs == 2 + 2 * manifest.target_dims.num_layers
    flags = machine.module.BuilderFlag
    assert [config.get_flag(flags.TF32) for config in recorded.configs] == [True, True, False]
    for config in recorded.configs:
        assert config.get_flag(flags.DISTRIBUTIVE_INDEPENDENCE)
        assert config.max_aux_streams == 0
    for network in recorded.networks:
        tensors = [network.get_input(i) for i in range(network.num_inputs)]
        assert {tensor.allowed_formats for tensor in tensors} == {1 << int(machine.module.TensorFormat.LINEAR)}
    for stage in (*(f"build {n}: Building engine" for n in ("target", "drafter", "compaction")), "write shared tables"):
        done = [(d, t) for s, d, t in seen if s == stage]
        assert done == sorted(done) and done[-1][0] == done[-1][1], stage
        assert len(done) >= 2
    stored, checkpoint = load_file(tmp_path / "e" / "shared.safetensors"), load_checkpoint(target)
    assert set(stored) == {"embedding", "lm_head"}
    for name, source in (("embedding", EMBEDDING), ("lm_head", HEAD)):
        assert stored[name].dtype == torch.bfloat16
        assert torch.equal(stored[name], torch.tensor(checkpoint.tensor(source)).to(torch.bfloat16))


@pytest.mark.rtx
def test_an_autoregressive_drafter(machine: Machine, tmp_path: Path) -> None:
    """A plan like the target's, with the target's shapes and no tapped states, and tables of its own."""
    target, drafter = make_target(tmp_path / "target", **SMALL), tmp_path / "drafter"
    make_target(drafter, tokenizer=False, tied=False, seed=3, **{**DIMS, "hidden_size": 48, "num_layers": 1})
    manifest = build(tmp_path / "e", target="mine", checkpoint=target, drafter=drafter)
    assert manifest.drafter_kind == "autoregressive"
    tensors = manifest.tensors["drafter"]
    assert tensors["inputs"][-4:] == ["past_key.0", "past_value.0", "embedding", "lm_head"]
    assert tensors["outputs"] == ["present_key.0", "present_value.0", "logits", "choices"]
    assert "taps" not in manifest.tensors["target"]["outputs"]
    recorded = machine.recorded
    assert recorded is not None
    sizes = recorded.shapes(0, 0), recorded.shapes(1, 1)
    assert all(sizes[0][name] == shape for name, shape in sizes[1].items())
    stored = load_file(tmp_path / "e" / "shared.safetensors")
    assert set(stored) == {"embedding", "drafter.embedding", "drafter.lm_head"}
    for name, path, source in (
        ("embedding", target, EMBEDDING),
        ("drafter.embedding", drafter, EMBEDDING),
        ("drafter.lm_head", drafter, HEAD),
    ):
        assert torch.equal(stored[name], torch.tensor(load_checkpoint(path).tensor(source)).to(torch.bfloat16))


LEAN = """
import os, sys
from pathlib import Path
import tensorrt_lean_bindings as lean

from ddtree_trt.device.libraries import load_plugins, make_log
from ddtree_trt.errors import BuildError

log = make_log(lean)
library, other = map(Path, sys.argv[1:])
try:
    load_plugins(lean, log, other, BuildError)
except BuildError as error:
    print(error)
for _ in range(2):
    load_plugins(lean, log, library, BuildError)
ours = [c.name for c in lean.get_plugin_registry().all_creators if c.plugin_namespace == "ddtree"]
print(*sorted(ours), flush=True)
os._exit(0)  # TensorRT's objects have no order to be destroyed in without a driver
"""


def test_the_plugins_are_loaded_into_a_real_registry(tmp_path: Path) -> None:
    """The registry of the lean runtime, which needs no GPU: a library that is none, then ours, once."""
    path = library.FOLDER / library.PLUGINS
    if not path.is_file():
        path = glue() / "libddtree_emulated_plugins.so"
    (tmp_path / "other.so").write_bytes(b"not a library")
    command = [lean_python(), "-c", LEAN, str(path), str(tmp_path / "other.so")]
    run = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=500
    )
    assert run.returncode == 0, run.stdout + run.stderr
    refusal, ours = run.stdout.splitlines()[-2:]
    assert "does not take the plugin library" in refusal and "other.so" in refusal
    assert ours == "DDTreeAttention DDTreeKVCompact"


@given(st.builds(Limits, st.integers(2, 300), max_tree_budget=st.integers(0, 4000)))
def test_profiles_rise_and_none_is_larger_than_a_cache(limits: Limits) -> None:
    """The plugin refuses a T that could not fit."""
    target, drafter = tensorrt_profiles.target_sizes(limits), tensorrt_profiles.drafter_sizes(limits, 16)
    assert all(list(sizes) == sorted(sizes) for sizes in (*target.values(), *drafter.values()))
    assert max(target["T"][2], drafter["C+block"][2]) <= limits.cache_rows


# What stops a build: one line that says why, an old engine untouched, no new one left behind


@pytest.fixture
def mine(tmp_path: Path) -> dict[str, Any]:
    """A pair that is parsed and compiled quickly."""
    target, drafter = make_pair(tmp_path / "pair", **DIMS)
    return {"target": "mine", "checkpoint": target, "drafter": drafter}


def test_a_library_that_is_not_taken(with_plugins: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(with_plugins.fake, "_load_library", lambda path: None)
    refused(tmp_path, BuildError, "does not take the plugin library", "ddtree::DDTreeAttention version 1")


def test_a_plugin_that_was_substituted(with_plugins: Machine, tmp_path: Path) -> None:
    assert with_plugins.fake is not None
    with_plugins.fake.substitutes = 2
    refused(tmp_path, BuildError, "the target has 6 DDTreeAttention nodes, TensorRT made 4 plugin layers")


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
