"""The TensorRT build, end to end: the real bindings, a recording fake of the builder behind them, and of the GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import make_pair, make_target
from plugin_libraries import lean_python
from quantized import ALGORITHMS, quantize
from real_tensorrt import ROOT, cuda_names
from safetensors.torch import load_file
from tensorrt_builds import DIMS, ENGINE_MODULE, Machine, build

from ddtree_trt import plugins
from ddtree_trt.artifact.files import sha256_file
from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.artifact.rebuild import rebuild_command
from ddtree_trt.build.backends.base import BuilderOptions
from ddtree_trt.build.backends.tensorrt import profiles as tensorrt_profiles
from ddtree_trt.build.checkpoint.reader import load_checkpoint
from ddtree_trt.models.decoder import EMBEDDING, HEAD
from ddtree_trt.plugins import library


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    (tmp_path / "native").mkdir()
    yield Machine(tmp_path / "native", monkeypatch)
    sys.modules.pop(ENGINE_MODULE, None)  # it holds the fake


def test_the_fake_gpu_has_nothing_cuda_has_not(machine: Machine) -> None:
    assert {name for name in vars(machine.cuda) if name.startswith("cuda")} <= cuda_names()


def test_the_engine_directory_of_the_tiny_pair(machine: Machine, tmp_path: Path) -> None:
    engine = tmp_path / "engines" / "tiny"
    manifest = build(engine)
    assert (manifest.backend, manifest.precision) == ("tensorrt", "bf16")
    wanted = {"tensorrt": "11.4.0.106", "cuda": "13.0", "driver": "13.1", "sm": "90", "gpu": "NVIDIA H100 80GB HBM3"}
    assert wanted.items() <= manifest.toolchain.items()
    assert manifest.plugin == {
        "name": "DDTreeAttention",
        "version": "1",
        "namespace": "ddtree",
        "abi": str(plugins.ABI),
        "sha256": sha256_file(machine.plugins),
    }
    tokenizer = {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert set(manifest.files) - tokenizer <= {
        "target.plan",
        "drafter.plan",
        "shared.safetensors",
        "chat_template.jinja",
    }
    assert {p.name for p in engine.iterdir()} == {*manifest.files, "manifest.json"}
    assert (engine / "target.plan").read_bytes().startswith(b"plan of token_ids")
    assert manifest.tensors["target"]["inputs"][:6] == [
        *("token_ids", "positions", "slot_ids", "past_len", "tree_mask", "rows")
    ]
    for network in ("target", "drafter"):  # the head is an input of its own also where it is the embedding
        assert manifest.tensors[network]["inputs"][-2:] == ["embedding", "lm_head"]
    assert "tree_mask" not in manifest.tensors["drafter"]["inputs"]
    assert manifest.tensors["drafter"]["outputs"][-2:] == ["log_probs", "candidates"]
    assert "--backend tensorrt --precision bf16" in rebuild_command(engine, manifest)
    timings = engine.parent / "tensorrt-11.4.0.106-sm90.timing"
    assert sorted(engine.parent.iterdir()) == sorted([engine, timings]) and timings.read_bytes() == b"learnt timings"


def test_what_tensorrt_is_asked_for(machine: Machine, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    manifest = build(tmp_path / "e", lambda *call: seen.append(call), max_batch=3, max_tree_budget=100)
    limits, block = manifest.limits, manifest.dflash.block_size
    fake, real = machine.tensorrt, machine.tensorrt.real
    assert fake.named("Builder.create_network") == [(0,), (0,)]
    assert fake.named("ITensor.allowed_formats =") and set(fake.named("ITensor.allowed_formats =")) == {(1,)}
    assert int(real.TensorFormat.LINEAR) == 0
    shapes = fake.named("IOptimizationProfile.set_shape")
    assert len(shapes) == 2 * 6 + 2 * 5
    assert ("tree_mask", (1, 1, 8), (1, 64, 8), (3, 101, 8)) in shapes[:6]
    assert ("rows", (1,), (64,), (303,)) in shapes[:6]
    assert ("token_ids", (1, 1), (1, 256), (3, 256)) in shapes[6:12]
    assert ("rows", (1,), (1,), (768,)) in shapes[6:12]
    assert ("taps", (1, 1, 576), (1, block // 2, 576), (3, block, 576)) in shapes[12:17]
    assert ("positions", (1, 1 + block), (1, block + block // 2), (3, 2 * block)) in shapes[12:17]
    assert ("positions", (1, 1 + block), (1, 256 + block), (3, 256 + block)) in shapes[17:]
    assert limits.max_tokens_per_pass == 256
    assert fake.named("IBuilderConfig.builder_optimization_level =") == []
    assert fake.named("IBuilderConfig.set_memory_pool_limit") == []
    assert fake.named("IBuilderConfig.set_flag") == [(real.BuilderFlag.TF32,)] * 2
    assert len(fake.named("IPluginRegistry.load_library")) == 1
    for stage in ("build target: Building Engine", "build drafter: Building Engine", "write shared tables"):
        done = [(d, t) for s, d, t in seen if s == stage]
        assert done == sorted(done) and done[-1][0] == done[-1][1], stage
        assert len(done) >= 2


def test_the_timing_cache_of_one_build_serves_the_next(machine: Machine, tmp_path: Path) -> None:
    build(tmp_path / "a")
    build(tmp_path / "b")
    given = machine.tensorrt.named("IBuilderConfig.create_timing_cache")
    assert given == [(b"",), *[(b"learnt timings",)] * 3]


def test_options_reach_the_builder(machine: Machine, tmp_path: Path) -> None:
    manifest = build(tmp_path / "e", builder=BuilderOptions(5, 512, inspect=True), precision="fp16")
    fake = machine.tensorrt
    assert fake.named("IBuilderConfig.builder_optimization_level =") == [(5,)] * 2
    pool = fake.real.MemoryPoolType.WORKSPACE
    assert fake.named("IBuilderConfig.set_memory_pool_limit") == [(pool, 512 << 20)] * 2
    detailed = fake.real.ProfilingVerbosity.DETAILED
    assert fake.named("IBuilderConfig.profiling_verbosity =") == [(detailed,)] * 2
    assert json.loads((tmp_path / "e" / "target.layers.json").read_text()) == {"Layers": []}
    assert {"target.layers.json", "drafter.layers.json"} <= set(manifest.files)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_the_tables_both_engines_read(machine: Machine, tmp_path: Path, precision: str, dtype: torch.dtype) -> None:
    target, drafter = make_pair(tmp_path / "pair", tied=False, **DIMS)
    manifest = build(tmp_path / "e", target="mine", checkpoint=target, drafter=drafter, precision=precision)
    stored, checkpoint = load_file(tmp_path / "e" / "shared.safetensors"), load_checkpoint(target)
    assert set(stored) == {"embedding", "lm_head"}
    for name, source in (("embedding", EMBEDDING), ("lm_head", HEAD)):
        assert stored[name].dtype == dtype
        assert torch.equal(stored[name], torch.tensor(checkpoint.tensor(source)).to(dtype))
    for network in ("target", "drafter"):
        assert manifest.tensors[network]["inputs"][-2:] == ["embedding", "lm_head"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_quantised_checkpoint(machine: Machine, tmp_path: Path, algorithm: str) -> None:
    target, drafter = make_pair(tmp_path / "pair", **DIMS)
    manifest = build(tmp_path / "e", target="mine", checkpoint=quantize(target, algorithm), drafter=drafter)
    assert manifest.precision == "bf16"


def test_an_autoregressive_drafter(machine: Machine, tmp_path: Path) -> None:
    """A plan like the target's, with the target's shapes and no tapped states, and tables of its own."""
    target, drafter = make_target(tmp_path / "target", **DIMS), tmp_path / "drafter"
    make_target(drafter, tokenizer=False, tied=False, seed=3, **{**DIMS, "hidden_size": 48, "num_layers": 1})
    manifest = build(tmp_path / "e", target="mine", checkpoint=target, drafter=drafter)
    assert manifest.drafter_kind == "autoregressive"
    inputs, outputs = manifest.tensors["drafter"]["inputs"], manifest.tensors["drafter"]["outputs"]
    assert inputs == [*manifest.tensors["target"]["inputs"][:6], "past_key.0", "past_value.0", "embedding", "lm_head"]
    assert outputs == ["present_key.0", "present_value.0", "logits", "choices"]
    assert "taps" not in manifest.tensors["target"]["outputs"]
    shapes = machine.tensorrt.named("IOptimizationProfile.set_shape")
    assert len(shapes) == 4 * 6 and shapes[:12] == shapes[12:]
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

from ddtree_trt.device.tensorrt_library import load_plugins, make_log
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
        pytest.skip(f"skipped: {library.PLUGINS} is not built (`make plugins`)")
    (tmp_path / "other.so").write_bytes(b"not a library")
    command = [lean_python(), "-c", LEAN, str(path), str(tmp_path / "other.so")]
    run = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=500
    )
    assert run.returncode == 0, run.stdout + run.stderr
    refusal, ours = run.stdout.splitlines()[-2:]
    assert "does not take the plugin library" in refusal and "other.so" in refusal
    assert ours == "DDTreeAttention"


# Profiles


def test_profiles_cover_every_limit() -> None:
    for limits in (Limits(), Limits(max_tree_budget=0, max_batch=1), Limits(max_tree_budget=4000, prefill_chunk=64)):
        for sizes in (*tensorrt_profiles.target_sizes(limits), *tensorrt_profiles.drafter_sizes(limits, 16)):
            assert all(smallest <= tuned <= largest for smallest, tuned, largest in sizes.values())
            assert sizes["N"][2] == limits.max_batch
        verify, prefill = tensorrt_profiles.target_sizes(limits)
        assert verify["T"][2] == 1 + limits.max_tree_budget and prefill["T"][2] == limits.prefill_chunk
        draft, context = tensorrt_profiles.drafter_sizes(limits, 16)
        assert draft["C"][2] == 16 and context["C"][2] == max(limits.prefill_chunk, 16)
        assert np.subtract(context["C+block"], context["C"]).tolist() == [16, 16, 16]


@pytest.mark.parametrize("budget", [0, 256])
def test_no_profile_is_larger_than_a_cache(budget: int) -> None:
    """The plugin refuses a T that could not fit."""
    for length in (2, 12, 300):
        limits = Limits(max_seq_len=length, max_tree_budget=budget)
        for sizes in tensorrt_profiles.target_sizes(limits):
            assert sizes["T"][2] <= limits.cache_rows
        for sizes in tensorrt_profiles.drafter_sizes(limits, 16):
            assert sizes["C"][0] <= sizes["C"][1] <= sizes["C"][2]
            assert sizes["C+block"][2] <= limits.cache_rows
