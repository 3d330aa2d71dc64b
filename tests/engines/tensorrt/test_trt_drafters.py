"""Autoregressive drafters on the TensorRT engine over fake device memory, beside the ONNX Runtime engine."""

from collections.abc import Iterator
from typing import Any

import pytest
from checkpoints import make_target
from engine_builds import PACKAGED
from fake_trt_engine import FORMS, PROMPTS, Lowerings, Machine, generate, installed

from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.runtime.llm import LLM

# Of an autoregressive drafter: other shapes, one layer, a head that is not its embedding.
OTHER: dict[str, Any] = {"vocab_size": 2048, "hidden_size": 48, "num_layers": 1}
OTHER |= {"head_dim": 64, "num_heads": 2, "num_kv_heads": 1}
LIMITS = Limits(max_seq_len=256, max_batch=3, max_tree_budget=40, prefill_chunk=32)


@pytest.fixture(scope="module", params=[("itself", "native"), ("another network", "plugin")], ids=", ".join)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LLM, LLM, Machine]]:
    """The packaged target, drafted for by itself or by another network: on TensorRT, on ONNX Runtime, the machine."""
    kind, form = request.param
    folder, target = tmp_path_factory.mktemp("pair"), PACKAGED / "target"
    drafter = target
    if kind != "itself":
        drafter = make_target(folder / "drafter", tokenizer=False, tied=False, seed=3, max_positions=512, **OTHER)
    given: dict[str, Any] = {n: getattr(LIMITS, n) for n in ("max_seq_len", "max_batch", "max_tree_budget")}
    compile_engine(BuildRequest(target="x", checkpoint=target, drafter=drafter, output=folder / "ort", **given))
    lowerings = Lowerings(folder, target, drafter, folder / "ort", LIMITS, "fp32", FORMS[form])
    with installed(lowerings.machine()) as machine, LLM(folder / "ort", threads=1) as reference:
        machine.store_profile()
        with LLM(machine.directory) as llm:
            yield llm, reference, machine
        assert not machine.cuda.leaks


@pytest.mark.parametrize(
    ("length", "options"), [(3, {}), (4, {"temperature": 1.0, "top_p": 0.95, "seed": 3})], ids=["greedy", "drawn"]
)
def test_rounds_are_those_of_the_onnxruntime_engine(pair: Any, length: int, options: dict[str, Any]) -> None:
    """Slots of different lengths; more prompts than slots, so that a slot starts behind what it held."""
    options = {"method": "draft-model", "tree_budget": length, **options}
    found, expected = (generate(llm, [*PROMPTS, PROMPTS[0]], **options) for llm in pair[:2])
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in expected]
    assert [o.metrics.acceptance_lengths for o in found] == [o.metrics.acceptance_lengths for o in expected]
