"""Engines compiled by a real TensorRT on a real GPU: `make test-trt`. Skipped, with the reason, everywhere else."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddtree_trt.artifact import tensors as names
from ddtree_trt.artifact.manifest import Manifest, load_manifest
from ddtree_trt.build.backends.tensorrt.backend import Machine
from ddtree_trt.plugins import library

# Slow: a build searches for kernels.
pytestmark = [pytest.mark.trt, pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture
def manifest(built: Path) -> Manifest:
    return load_manifest(built)


@pytest.fixture(params=["target", "drafter"])
def engine(request: pytest.FixtureRequest, built: Path, machine: Machine) -> Iterator[tuple[str, Any]]:
    """A plan, loaded again from its file."""
    import tensorrt as trt

    logger = trt.Logger(trt.Logger.ERROR)
    registry = trt.get_plugin_registry()
    if not any(creator.plugin_namespace == "ddtree" for creator in registry.all_creators):
        registry.load_library(str(library.find(library.PLUGINS)))
    runtime = trt.Runtime(logger)
    engine = runtime.deserialize_cuda_engine((built / f"{request.param}.plan").read_bytes())
    assert engine is not None
    yield request.param, engine
    del engine


def test_the_plan_has_the_names_shapes_and_types_of_the_contract(engine: tuple[str, Any], manifest: Manifest) -> None:
    import tensorrt as trt

    network, plan = engine
    tensors = [plan.get_tensor_name(i) for i in range(plan.num_io_tensors)]
    assert sorted(tensors) == sorted(manifest.tensors[network]["inputs"] + manifest.tensors[network]["outputs"])
    half = {"bf16": trt.DataType.BF16, "fp16": trt.DataType.HALF}[manifest.precision]
    single = {names.LOGITS, names.LOG_PROBS}
    for tensor in tensors:
        wide = tensor.startswith(("past_key", "past_value", "present", names.TAPS, names.EMBEDDING, names.HEAD))
        expected = half if wide else trt.DataType.FLOAT if tensor in single else trt.DataType.INT32
        if network == "drafter" and tensor.startswith(("past_key", "past_value", "present")):
            expected = trt.DataType.BF16  # a block drafter's own type, also in an engine of fp16
        assert plan.get_tensor_dtype(tensor) == expected, tensor
    dims, limits = manifest.target_dims, manifest.limits
    assert tuple(plan.get_tensor_shape(names.EMBEDDING)) == (dims.vocab_size, dims.hidden_size)
    cache = (limits.max_batch, dims.num_kv_heads, limits.cache_rows, dims.head_dim)
    assert tuple(plan.get_tensor_shape("past_key.0")) == tuple(plan.get_tensor_shape("present_key.0")) == cache
