"""The published DDTree code from a local checkout: its autoregressive, DFlash and DDTree loops."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ddtree_trt.bench.contender import Outcome, Request
from ddtree_trt.bench.pairs.checkpoints import pretrained
from ddtree_trt.bench.peers.base import PeerContext
from ddtree_trt.bench.peers.hf import device_for
from ddtree_trt.bench.reference import adapted_libraries, commit_of, forced_acceptance, import_published
from ddtree_trt.bench.settings import BLOCK_CHAIN, SINGLE_TOKENS, Case
from ddtree_trt.errors import MissingDependency, install_with
from ddtree_trt.runtime.decoding.methods import AUTOREGRESSIVE, DDTREE, DFLASH
from ddtree_trt.runtime.stats import ROUND_STAGES

PEER = "ddtree-reference"


class ReferencePeer:
    """Both networks under the published loops, in the engine's precision and with PyTorch SDPA attention.

    The published loops do not time the first draft, which reads the prompt; it is in `decode_s` here, as in our own
    figures, and missing from their `draft` stage. They cut tokens past a stop from the output, and not their time.
    """

    def __init__(self, context: PeerContext, checkout: str) -> None:
        path = Path(checkout)
        self._published = import_published(path)
        self._commit = commit_of(path)
        try:
            import torch
            import transformers
        except ImportError as error:
            raise MissingDependency(
                f"--peer {PEER} needs PyTorch and transformers ({error}); {install_with('torch')}"
            ) from error
        self._torch = torch
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(context.threads)
        self._device, self._dtype = device_for(context), getattr(torch, context.dtype)
        directories = context.checkpoints()
        options = {"dtype": self._dtype, "attn_implementation": "sdpa"}
        target = transformers.AutoModelForCausalLM.from_pretrained(**pretrained(directories.target), **options)
        drafter = self._published.ddtree.DFlashDraftModel.from_pretrained(str(directories.drafter), **options)
        self._target, self._drafter = target.eval().to(self._device), drafter.eval().to(self._device)
        self._forced = context.settings.forced_acceptance
        self._banned = context.unusable_tokens
        # Its own default; without a compiler it warns and continues in Python.
        self._published.ddtree.maybe_enable_cpp_compact(True)
        # Acceptance cannot be forced in its chain.
        chains = [SINGLE_TOKENS, BLOCK_CHAIN] if self._forced is None else [SINGLE_TOKENS]
        trees = [c for c in context.settings.cases("dflash") if c.method == DDTREE.name and c.budget != "auto"]
        self.cases = tuple(Case(case.method, case.budget, PEER) for case in (*chains, *trees))

    def describe(self) -> dict[str, str]:
        return {
            "commit": self._commit,
            "torch": self._torch.__version__,
            "device": self._device,
            "dtype": str(self._dtype),
            "threads": str(self._torch.get_num_threads()),
            "cpp_compact": str(self._published.ddtree.load_cpp_compact_module() is not None).lower(),
        }

    def run(self, case: Case, prompt_ids: Sequence[int], request: Request) -> Outcome:
        torch, block = self._torch, self._drafter.block_size
        torch.manual_seed(request.seed)
        options: dict[str, Any] = {
            "model": self._drafter,
            "target": self._target,
            "input_ids": torch.tensor([list(prompt_ids)], device=self._device),
            "mask_token_id": self._drafter.mask_token_id,
            "max_new_tokens": request.max_tokens,
            "block_size": 1 if case.method == AUTOREGRESSIVE.name else block,
            "stop_token_ids": list(request.stop_token_ids) or None,
            "temperature": request.temperature,
        }
        with ExitStack() as stack:
            stack.enter_context(adapted_libraries())
            if self._forced is not None:
                stack.enter_context(forced_acceptance(self._published, self._forced, self._banned))
            if case.method == DDTREE.name:
                result = self._published.ddtree.ddtree_generate(**options, tree_budget=case.budget)
            else:
                result = self._published.dflash.dflash_generate(**options)
        return Outcome(
            output_tokens=result.num_output_tokens,
            first_token_s=result.time_to_first_token,
            decode_s=result.round_timestamps[-1] if result.round_timestamps else 0.0,
            token_ids=tuple(result.output_ids[0, len(prompt_ids) :].tolist()),
            acceptance_lengths=tuple(result.acceptance_lengths),
            mean_budget=float({AUTOREGRESSIVE.name: 0, DFLASH.name: block - 1}.get(case.method, case.budget or 0)),
            stage_s={stage: result.stage_times.get(stage, 0.0) for stage in ROUND_STAGES},
        )

    def close(self) -> None:
        self._target = self._drafter = None
