"""Memory plans: arithmetic on dimensions, held against what engines really take, and what `--dry-run` makes of it."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import edit_json, make_pair
from hypothesis import given
from hypothesis import strategies as st
from quantized import ALGORITHMS, GROUP, quantize
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from ddtree_trt.artifact.backends import BackendName
from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.build.checkpoint.reader import load_checkpoint
from ddtree_trt.build.compile import BuildRequest, DryRun, dry_run
from ddtree_trt.cli import app
from ddtree_trt.device import buffers as places
from ddtree_trt.device.buffers import ALIGNMENT, CacheShape, Layout, tensorrt_buffers, with_aligned_slots
from ddtree_trt.device.gpus import Gpu
from ddtree_trt.device.memory import MemoryPlan, plan_engine
from ddtree_trt.drafters.dflash.dims import DFlashDims
from ddtree_trt.errors import BuildError
from ddtree_trt.models.decoder import TransformerDims

# The shapes in the config.json files of Qwen/Qwen3-8B and of its drafter at z-lab.
TARGET = TransformerDims(151936, 4096, 36, 32, 8, 128, 12288, 1e-6, 1e6, 40960)
DRAFTER = DFlashDims(151936, 4096, 5, 32, 8, 128, 12288, 1e-6, 1e6, 40960, 16, 151669, (1, 9, 17, 25, 33), 36)
LIMITS = Limits(max_seq_len=4096, max_batch=4)
BACKENDS: tuple[BackendName, ...] = ("onnxruntime", "torch", "tensorrt")


def test_the_cache_of_a_known_model() -> None:
    """147,456 bytes a token in bfloat16 (2 · 36 layers · 8 heads · 128 · 2 bytes) and the drafter's 20,480."""
    plan = plan_engine("tensorrt", "bf16", TARGET, DRAFTER, LIMITS, 18_000_000_000)
    assert plan.kv_bytes_per_slot == (147_456 + 20_480) * (4096 + 257)
    assert plan.kv_bytes_all_slots == 4 * plan.kv_bytes_per_slot
    assert plan.place == "GPU"


dims = st.builds(
    lambda heads, size, layers: TransformerDims(96, 32, layers, heads, heads, size, 48, 1e-6, 1e4, 512),
    *(st.sampled_from(values) for values in ((1, 2, 3), (8, 16, 64), (1, 5))),
)
limits = st.builds(
    Limits,
    max_seq_len=st.integers(2, 400),
    max_batch=st.integers(1, 9),
    max_tree_budget=st.integers(0, 300),
    prefill_chunk=st.integers(1, 256),
)


@given(dims, limits, st.sampled_from((2, 4)))
def test_planes_begin_where_tensorrt_takes_them(dims: TransformerDims, limits: Limits, size: int) -> None:
    """With no slot more behind a plane than that takes."""
    cache = CacheShape.of(dims, limits, size)
    assert cache.plane_bytes % ALIGNMENT == 0
    assert cache.stored_slots >= cache.slots
    for fewer in range(cache.slots, cache.stored_slots):
        assert fewer * cache.slot_bytes % ALIGNMENT
    assert cache.total_bytes >= cache.planes * cache.slots * cache.slot_bytes


@given(st.dictionaries(st.text(), st.integers(0, 10_000), min_size=1))
def test_a_layout_keeps_buffers_apart(sizes: dict[str, int]) -> None:
    layout = Layout.of(sizes)
    spans = sorted((layout.offsets[name], layout.offsets[name] + size) for name, size in sizes.items())
    assert all(start % ALIGNMENT == 0 for start, _ in spans)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert spans[-1][1] <= layout.total_bytes < sum(sizes.values()) + ALIGNMENT * len(sizes)


def test_the_plan_is_the_sum_of_the_buffers() -> None:
    """`inspect` and the engine count the same things: what is not cache or table is the plan's buffers."""
    buffers = tensorrt_buffers(TARGET, DRAFTER, LIMITS, 2)
    plan = plan_engine("tensorrt", "bf16", TARGET, DRAFTER, LIMITS, 0)
    assert 2 * buffers[places.EMBEDDING] == buffers[places.HEAD] == 151936 * 4096 * 4  # logits are sums in float32
    caches = buffers[places.TARGET_KV] + buffers[places.DRAFTER_KV]
    assert caches == plan.kv_bytes_all_slots  # nothing behind these planes
    tables = buffers[places.EMBEDDING] + buffers[places.HEAD]
    assert plan.weights_bytes == buffers[places.HEAD]
    assert sum(buffers.values()) == tables + caches + plan.buffers_bytes
    assert buffers[places.LOGITS] == 4 * 257 * 151936 * 4


@given(dims, dims, limits, st.sampled_from((2, 4)))
def test_slots_of_native_attention_begin_where_tensorrt_takes_them(
    target: TransformerDims, drafter: TransformerDims, limits: Limits, size: int
) -> None:
    """By a chunk that is longer by as few rows as that takes; nothing else changes."""
    wider = with_aligned_slots(limits, (target, drafter), size)

    def aligned(limits: Limits) -> bool:
        return not any(CacheShape.of(d, limits, size).slot_bytes % ALIGNMENT for d in (target, drafter))

    assert aligned(wider) or limits.max_batch == 1
    assert dataclasses.replace(wider, prefill_chunk=limits.prefill_chunk) == limits
    assert (wider == limits) == (aligned(limits) or limits.max_batch == 1)
    rows = range(limits.max_tokens_per_pass + 1, wider.max_tokens_per_pass)
    assert not any(aligned(dataclasses.replace(limits, prefill_chunk=chunk)) for chunk in rows)


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in args])


@pytest.mark.parametrize("backend", BACKENDS)
def test_dry_run_writes_nothing(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On any machine, for every backend."""
    monkeypatch.chdir(tmp_path)
    shown = run("build", "--target", "tiny", "--backend", backend, "--dry-run", "--max-batch", 3)
    assert shown.exit_code == 0, shown.stderr
    assert shown.stdout.startswith(f"tiny: {backend} ")
    assert "for 3 slots at full length" in shown.stdout
    assert not list(tmp_path.iterdir())
    data = json.loads(run("build", "--target", "tiny", "--backend", backend, "--dry-run", "--json").stdout)
    assert data["limits"]["max_batch"] == Limits.max_batch
    assert data["memory"]["total_bytes"] > data["memory"]["kv_bytes_all_slots"] > 0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_dry_run_counts_quantised_weights_as_they_are_stored(algorithm: str, tmp_path: Path) -> None:
    """Where they stay as they are, which is in TensorRT's plans, except what is named as excluded."""
    target, drafter = make_pair(tmp_path / "pair")
    plain = BuildRequest(target="x", backend="tensorrt", checkpoint=target, drafter=drafter)
    on_cpu = dataclasses.replace(plain, backend="onnxruntime")
    before, before_on_cpu = (dry_run(request).memory.weights_bytes for request in (plain, on_cpu))
    quantize(target, algorithm)
    tensors = load_file(target / "model.safetensors")
    one_byte = (torch.float8_e4m3fn, torch.int8, torch.uint8)
    ours = {n: t for n, t in tensors.items() if not n.endswith(("input_scale", "k_scale"))}
    expected = sum(t.numel() * (1 if t.dtype in one_byte else 2) for t in ours.values())
    expected += 2 * load_checkpoint(drafter).num_values
    dims = load_checkpoint(target).dims
    head = 4 * dims.vocab_size * dims.hidden_size  # in float32 on the device, the embedding's values
    assert dry_run(plain).memory.weights_bytes == expected + head < before
    assert dry_run(on_cpu).memory.weights_bytes == before_on_cpu
    assert load_checkpoint(target).stored_bytes(2) == expected - 2 * load_checkpoint(drafter).num_values
    edit_json(
        target / "hf_quant_config.json",
        quantization={"quant_algo": algorithm, "group_size": GROUP, "exclude_modules": ["model.layers.*"]},
    )
    assert dry_run(plain).memory.weights_bytes == before


def gpu(monkeypatch: pytest.MonkeyPatch, mib: str) -> None:
    monkeypatch.setattr("ddtree_trt.build.compile.find_gpus", lambda: (Gpu("Pretended GPU", "580.1", f"{mib}", "9.0"),))


def big(**options: Any) -> MemoryPlan:
    limits = Limits(max_seq_len=4096, **options)
    return plan_engine("tensorrt", "bf16", TARGET, DRAFTER, limits, 18_000_000_000)


def test_what_cannot_fit_is_refused_with_what_does(monkeypatch: pytest.MonkeyPatch) -> None:
    available = 40 << 30
    would = DryRun("qwen3-8b", "tensorrt", "bf16", LIMITS, big(max_batch=64), available)
    with pytest.raises(BuildError, match=r"needs about \d+\.\d GB of the GPU's memory, which has 42.9 GB") as caught:
        would.check()
    slots = int(str(caught.value).split("--max-batch ")[1])
    assert big(max_batch=slots).total_bytes <= available < big(max_batch=slots + 2).total_bytes
    small = DryRun("qwen3-8b", "tensorrt", "bf16", LIMITS, big(max_batch=4), 10 << 30)
    with pytest.raises(BuildError, match="a smaller --max-seq-len, or a smaller pair"):
        small.check()
    DryRun("qwen3-8b", "tensorrt", "bf16", LIMITS, big(max_batch=4), None).check()
    gpu(monkeypatch, "1 MiB")
    shown = run("build", "--target", "tiny", "--backend", "tensorrt", "--dry-run")
    assert shown.exit_code == 1
    assert "of the GPU's memory, which has 0.0 GB" in shown.stderr
    gpu(monkeypatch, "unknown")
    assert run("build", "--target", "tiny", "--backend", "tensorrt", "--dry-run").exit_code == 0
