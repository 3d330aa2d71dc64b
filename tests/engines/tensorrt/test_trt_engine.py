"""The TensorRT engine without TensorRT or a GPU: what it says, over fake device memory, on the graphs it would run.

See `fake_cuda` and `fake_trt_engine`. Nothing here says anything of TensorRT's own numbers or of a GPU.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import make_pair
from fake_trt_engine import FORMS, PLUGIN, PROMPTS, RTX, Form, Lowerings, build_trt_engine, generate, installed

from ddtree_trt.device import buffers
from ddtree_trt.runtime.llm import LLM


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in outputs]


METHODS: list[dict[str, Any]] = [{"method": "ar"}, {"method": "dflash"}, {"method": "ddtree", "tree_budget": 40}]


@pytest.fixture(scope="module")
def reference(small_engine: Path) -> Iterator[LLM]:
    with LLM(small_engine, threads=1) as llm:
        yield llm


@pytest.mark.parametrize("options", METHODS, ids=lambda o: "-".join(map(str, o.values())))
def test_output_is_that_of_the_onnxruntime_engine(running: Any, reference: LLM, options: dict[str, Any]) -> None:
    """Slots of different lengths share every pass; the same drafts are accepted, for the same numbers come out."""
    llm, _ = running
    prompts = [*PROMPTS, PROMPTS[0]]  # one more than there are slots
    found, expected = generate(llm, prompts, **options), generate(reference, prompts, method="ar")
    assert tokens(found) == tokens(expected)
    expected = generate(reference, prompts, **options)
    assert [o.metrics.acceptance_lengths for o in found] == [o.metrics.acceptance_lengths for o in expected]


@pytest.mark.parametrize("method", ["ar", "ddtree"])
def test_draws_are_those_of_the_onnxruntime_engine(running: Any, reference: LLM, method: str) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "seed": 3, "logprobs": 2, "method": method}
    options |= {"tree_budget": 16} if method == "ddtree" else {}
    found, expected = (generate(llm, PROMPTS, **options) for llm in (running[0], reference))
    assert tokens(found) == tokens(expected)
    ours, theirs = ([entry.logprob for entry in o[0].outputs[0].logprobs or ()] for o in (found, expected))
    assert ours
    np.testing.assert_allclose(ours, theirs, atol=1e-3)


@pytest.mark.parametrize("form", [PLUGIN, RTX], ids=["plugin", "TensorRT for RTX"])
def test_half_precision(small_engine: Path, tmp_path: Path, form: Form) -> None:
    """Two bytes an element, as on a GPU: the same loop, lossless against itself."""
    lowerings = Lowerings.packaged(tmp_path, small_engine, form, "fp16")
    with installed(lowerings.machine()) as machine:
        machine.store_profile()
        with LLM(machine.directory) as llm:
            plain = generate(llm, PROMPTS, method="ar")
            tree = generate(llm, PROMPTS, method="ddtree", tree_budget=16)
        assert tokens(tree) == tokens(plain)
        assert sum(o.metrics.mean_acceptance_length for o in tree) > 1.4 * len(tree)
        assert not machine.cuda.leaks


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_logits_keep_what_float32_sums(form: Form, tied: bool, tmp_path: Path) -> None:
    """In half precision too: the head's products and sums are float32, though its inputs are rounded. Large logits of
    different tokens, a half's step apart or less, stay apart."""
    pair = make_pair(tmp_path / "pair", tied=tied, head_dim=64, num_heads=2, num_kv_heads=1)
    engine = build_trt_engine(*pair, tmp_path / "e", form=form, precision="fp16", max_batch=1)
    head = engine._loaded.addresses[buffers.HEAD], engine._loaded.layout.sizes[buffers.HEAD]
    table = engine.device.api.device.view(*head).view(np.float32).reshape(engine.manifest.target_dims.table)
    # Two tokens whose rows differ by the last bit of one value, and large logits, where halves have steps of 2⁻⁶.
    table *= 64
    table[-1] = table[7]
    table[-1, 0] = np.nextafter(table[7, 0].astype(np.float16), np.float16(np.inf))
    said = engine.prefill(0, np.arange(3, 12), rows="all", taps=True)
    logits = np.asarray(said.logits)
    rounded = logits.astype(np.float16).astype(np.float32)
    assert np.abs(logits).max() > 16
    assert (logits != rounded).mean() > 0.9, "logits that went through halves"
    assert (logits[:, 7] != logits[:, -1]).all()
    assert (rounded[:, 7] == rounded[:, -1]).any(), "these rows are not near enough to tell"
    np.testing.assert_array_equal(said.choices, logits.argmax(-1))
