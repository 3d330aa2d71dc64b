"""Record the output of the published DDTree code on the tiny pair, as golden traces for our own tests.

    git clone https://github.com/liranringel/ddtree ../ddtree
    python -m workbench golden --reference ../ddtree

Nothing of the published code is kept here: it is imported from that checkout and runs unchanged on the CPU, in float32
with PyTorch SDPA. Stand-ins replace only what it requires of its environment: a CUDA device to synchronise with, two
packages that it imports and does not need here, and a cache that can be cropped to a length.

How the traces count. Prefill yields one token, the first bonus token. A round with acceptance length a commits a tokens
to the cache, that bonus token first, and yields the next one: 1 + sum(acceptance_lengths) tokens after all rounds. The
published loop looks for a stop token or the length limit only between rounds, and does not take back from its lengths
what it then cuts from its output. `surplus` is the number of tokens cut, all of them from the last round:

    len(output_ids) = 1 + sum(acceptance_lengths) - surplus      and      0 <= surplus <= acceptance_lengths[-1].

So an implementation that counts nothing past the end has acceptance_lengths[-1] - surplus in its last round. Where that
is 0 the output was complete before that round (prefill gave a stop token, or max_new_tokens were reached exactly): the
published loop ran it all the same.

`stable` is true where another correct implementation must agree. It is false where float64 gives another trace, so that
a near tie decides, and where the published buffer, max_new_tokens + 1 + budget long, cut a draft block at its end.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import platform
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any
from unittest.mock import patch

import tokenizers
import torch
import transformers
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from ddtree_trt.errors import UsageError
from ddtree_trt.runtime.decoding.methods import DDTREE, DFLASH, METHODS
from workbench.options import Output

REPOSITORY = "https://github.com/liranringel/ddtree"
ROOT = Path(__file__).resolve().parent.parent
PAIR = ROOT / "ddtree_trt/assets/tiny"
OUTPUT = ROOT / "tests/decoding/golden/ddtree_reference.json"
PROMPTS = 10
BUDGETS = (7, 16, 64)
MAX_NEW_TOKENS = 128

Record = dict[str, Any]


def import_published(path: Path) -> tuple[ModuleType, ModuleType]:
    """The modules `ddtree` and `dflash` of a checkout. Raises UsageError where it is none."""
    if not (path / "ddtree.py").is_file():
        raise UsageError(f"--reference: expected a checkout at {path}; get one with: git clone {REPOSITORY}")
    stand_ins = {"loguru": ModuleType("loguru"), "datasets": ModuleType("datasets")}
    vars(stand_ins["loguru"])["logger"] = logging.getLogger(__name__)
    vars(stand_ins["datasets"]).update(dict.fromkeys(("load_dataset", "Features", "Sequence", "Value")))
    sys.path.insert(0, str(path.resolve()))
    for name in stand_ins:  # transformers must not find a `datasets` that is a stand-in
        sys.modules[name], stand_ins[name] = stand_ins[name], sys.modules.get(name)  # type: ignore[assignment]
    try:
        return importlib.import_module("ddtree"), importlib.import_module("dflash")
    finally:
        sys.path.pop(0)
        for name, before in stand_ins.items():
            del sys.modules[name]
            if before is not None:
                sys.modules[name] = before


def crop(cache: Any, length: int, native: Any = DynamicCache.crop) -> None:
    """Keep the first `length` tokens, as before transformers 5, which takes the number of tokens to remove."""
    if (excess := cache.get_seq_length() - length) > 0:
        native(cache, -excess)


class Reference:
    """The pair under the published loops, in one precision, at temperature 0."""

    def __init__(self, ddtree: ModuleType, dflash: ModuleType, dtype: torch.dtype) -> None:
        self.ddtree, self.dflash = ddtree, dflash
        options = {"dtype": dtype, "attn_implementation": "sdpa"}
        self.tokenizer = AutoTokenizer.from_pretrained(PAIR / "tokenizer")
        self.target = AutoModelForCausalLM.from_pretrained(PAIR / "target", **options).eval()
        self.drafter = ddtree.DFlashDraftModel.from_pretrained(PAIR / "drafter", **options).eval()

    def encode(self, prompt: str) -> list[int]:
        message = [{"role": "user", "content": prompt}]
        text = self.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def greedy(self, prompt_ids: list[int]) -> list[int]:
        ids = torch.tensor([prompt_ids])
        limits = {"max_new_tokens": MAX_NEW_TOKENS, "eos_token_id": self.tokenizer.eos_token_id}
        output = self.target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **limits)
        return output[0, len(prompt_ids) :].tolist()

    def trace(self, prompt_ids: list[int], method: str, budget: int) -> Record:
        """The record of one request. A chain's budget must be the L draft positions of a block."""
        block = self.drafter.block_size
        tree = METHODS[method].branches
        result = (self.ddtree.ddtree_generate if tree else self.dflash.dflash_generate)(
            model=self.drafter,
            target=self.target,
            input_ids=torch.tensor([prompt_ids]),
            mask_token_id=self.drafter.mask_token_id,
            max_new_tokens=MAX_NEW_TOKENS,
            block_size=block,
            stop_token_ids=[self.tokenizer.eos_token_id],
            temperature=0.0,
            **({"tree_budget": budget} if tree else {}),
        )
        output, lengths = result.output_ids[0, len(prompt_ids) :].tolist(), result.acceptance_lengths
        surplus = 1 + sum(lengths) - len(output)
        assert 0 <= surplus <= lengths[-1], f"not counted as documented: {lengths} for {len(output)} tokens"
        whole = sum(lengths[:-1]) + block <= MAX_NEW_TOKENS + 1 + budget
        return {"output_ids": output, "acceptance_lengths": lengths, "surplus": surplus, "stable": whole}


def record(modules: tuple[ModuleType, ModuleType], prompts: list[Record]) -> tuple[Record, list[Record]]:
    """(settings, a trace for every prompt, method and budget). Adds token ids and greedy output to the prompts."""
    single, double = (Reference(*modules, dtype) for dtype in (torch.float32, torch.float64))
    block, eos = single.drafter.block_size, single.tokenizer.eos_token_id
    traces = []
    for index, row in enumerate(prompts):
        ids = row["prompt_ids"] = single.encode(row["prompt"])
        row["greedy_ids"] = single.greedy(ids)
        for method, budget in [(DFLASH.name, block - 1), *((DDTREE.name, budget) for budget in BUDGETS)]:
            trace = single.trace(ids, method, budget)
            if trace["output_ids"] != row["greedy_ids"]:
                raise UsageError(
                    f"{method} at budget {budget} on {row['prompt']!r} is not greedy; near tie? Choose others"
                )
            trace["stable"] &= trace == double.trace(ids, method, budget)
            traces.append({"prompt": index, "method": method, "budget": budget} | trace)
    return {"block_size": block, "eos_token_id": eos, "max_new_tokens": MAX_NEW_TOKENS, "temperature": 0.0}, traces


def main(reference: Annotated[Path, typer.Option(help=f"a checkout of {REPOSITORY}")], output: Output = OUTPUT) -> None:
    modules = import_published(reference)
    commit = subprocess.check_output(
        ["git", "-C", str(reference), "describe", "--always", "--abbrev=40", "--dirty"], text=True
    )
    torch.set_num_threads(1)  # two wait for each other on a busy machine, and take four times as long
    transformers.utils.logging.disable_progress_bar()
    # PROMPTS of the lines, divided among the domains and evenly spaced within each.
    rows = [json.loads(line) for line in (PAIR / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    domains, prompts = list(dict.fromkeys(row["domain"] for row in rows)), list[Record]()
    for i, domain in enumerate(domains):
        own, share = [row for row in rows if row["domain"] == domain], len(range(i, PROMPTS, len(domains)))
        prompts += [{"domain": domain, "prompt": own[j * len(own) // share]["prompt"]} for j in range(share)]
    with patch.object(DynamicCache, "crop", crop), patch.object(torch.cuda, "synchronize", lambda *_: None):
        settings, traces = record(modules, prompts)
    command = "python -m workbench golden --reference ../ddtree"
    weights = [PAIR / name / "model.safetensors" for name in ("target", "drafter")]
    libraries = {module.__name__: module.__version__ for module in (torch, transformers, tokenizers)}
    document = {
        "schema_version": 1,
        "about": "Traces of the published DDTree code. workbench/golden.py says what the fields count.",
        "regenerate": [f"git clone {REPOSITORY} ../ddtree", f"git -C ../ddtree checkout {commit.strip()}", command],
        "source": {"repository": REPOSITORY, "commit": commit.strip()},
        "versions": {"python": platform.python_version()} | libraries,
        "sha256": {str(p.relative_to(PAIR)): hashlib.sha256(p.read_bytes()).hexdigest() for p in weights},
        "settings": settings,
        "prompts": prompts,
        "traces": traces,
    }
    lines = []  # lists take one line an item, so that a diff shows the cases that changed
    for key, value in document.items():
        items = [json.dumps(item, ensure_ascii=False) for item in value] if isinstance(value, list) else []
        text = "[\n    " + ",\n    ".join(items) + "\n  ]" if items else json.dumps(value)
        lines.append(f'  "{key}": {text}')
    output.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    for method, budget in dict.fromkeys((t["method"], t["budget"]) for t in traces):
        own = [t for t in traces if (t["method"], t["budget"]) == (method, budget)]
        rounds, tokens = (sum(f(t["acceptance_lengths"]) for t in own) for f in (len, sum))
        print(f"{method:7}{budget:4}{tokens / rounds:8.3f} tokens a round, {sum(t['stable'] for t in own)} stable")
