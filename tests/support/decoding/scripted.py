"""An engine that plays by a script: the protocol of `runtime.engine` over distributions a test can write down.

The target is a table or a list of tokens to say, the drafter anything from the target's own marginals to its worst
enemy. The engine checks what the loop asks of it, spoils what it lent out at its next pass, and logs every call.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, cast

import numpy as np
from scripted_models import Array, Bilinear, Drafter, Linked, Target

from ddtree_trt.artifact.manifest import Limits, Manifest
from ddtree_trt.drafters.dflash.dims import DFlashDims
from ddtree_trt.models.decoder import TransformerDims
from ddtree_trt.runtime.decoding.budget.policy import FixedBudget
from ddtree_trt.runtime.decoding.methods import METHODS, resolve_method
from ddtree_trt.runtime.decoding.sampling import Sampler
from ddtree_trt.runtime.engines.base import DeviceRounds, Draft, DraftRequest, Engine, LogitRows, Verdict, VerifyRequest
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.scheduler import Scheduler
from ddtree_trt.runtime.sequence import Sequence as Completion
from ddtree_trt.runtime.text.codec import TextCodec, TextStream
from ddtree_trt.runtime.tree import Marginals, TokenTree, token_chain
from workbench.options import bare_manifest

Kind = Literal["dflash", "autoregressive"]


# The engine


@dataclass(frozen=True)
class Call:
    verb: str
    slots: tuple[int, ...]
    tokens: int  # in the target pass or the draft; of the longest slot


@dataclass
class _Slot:
    tokens: list[int] = field(default_factory=list)
    known: int = 0  # tokens whose states the drafter has
    tree: TokenTree | None = None  # verified and not committed


class ScriptedEngine:
    """See the module. `fail` is called before every verb's work with (verb, slots) and may raise."""

    threads = 1
    rounds: DeviceRounds | None = None
    buckets: Sequence[int] | None = None
    inexact: str | None = "it is scripted"
    mixes = False

    def __init__(
        self, target: Target, drafter: Drafter, *, kind: Kind = "dflash", block_size: int = 4, **limits: int
    ) -> None:
        self.target, self.drafter, self.kind = target, drafter, kind
        sizes = {"max_seq_len": 64, "max_batch": 4, "max_tree_budget": 64, "prefill_chunk": 8, **limits}
        self.manifest = make_manifest(target.vocab_size, kind, block_size, Limits(**sizes))
        self.calls: list[Call] = []
        self.fail: Callable[[str, tuple[int, ...]], None] = lambda verb, slots: None
        self._slots = [_Slot() for _ in range(sizes["max_batch"])]
        self._lent: list[Array] = []

    def length(self, slot: int) -> int:
        return len(self._slots[slot].tokens)

    def draftable(self, slot: int, length: int) -> int:
        return min(length, self._slots[slot].known)

    def unseen(self, slot: int) -> int:
        return 0

    def restorable(self, slot: int, length: int) -> int:
        return length

    def truncate(self, slot: int, length: int) -> None:
        state = self._slots[slot]
        assert 0 <= length <= len(state.tokens)
        del state.tokens[length:]
        state.known = min(state.known, length)
        state.tree = None

    def prefill(self, slot: int, token_ids: Array, *, rows: LogitRows, taps: bool) -> Verdict:
        size = len(token_ids)
        assert token_ids.dtype == np.int64
        assert 0 < size <= self.manifest.limits.prefill_chunk
        (verdict,) = self._pass("prefill", [VerifyRequest(slot, token_chain(token_ids), rows=rows)])
        self._keep(slot, np.arange(size), taps)
        return verdict

    def verify(self, requests: Sequence[VerifyRequest]) -> list[Verdict]:
        slots = [r.slot for r in requests]
        assert slots == sorted(set(slots))
        return self._pass("verify", requests)

    def _pass(self, verb: str, requests: Sequence[VerifyRequest]) -> list[Verdict]:
        limits = self.manifest.limits
        for array in self._lent:
            array.fill(-1 if array.dtype == np.int64 else np.nan)
        self._lent = []
        self._log(verb, [r.slot for r in requests], max(len(r.tree) for r in requests))
        verdicts = []
        for request in requests:
            state, tree = self._slots[request.slot], request.tree
            assert len(tree) <= limits.max_tokens_per_pass
            assert len(state.tokens) + len(tree) <= limits.cache_rows
            assert len(state.tokens) < limits.max_seq_len
            logits = self.target.logits(state.tokens, tree)
            choices = logits.argmax(1)
            state.tree = tree
            self._lent += [logits, choices]
            first = request.first_row
            verdicts.append(Verdict(choices[first:], logits[first:]))
        return verdicts

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        if requests:
            self._log("draft", [r.slot for r in requests], max(r.length for r in requests))
        return [self._draft(r) for r in requests]

    def _draft(self, request: DraftRequest) -> Draft:
        state, kind = self._slots[request.slot], self.manifest.drafting
        assert state.known == len(state.tokens), "drafting needs the states of every committed token"
        context = [*state.tokens, request.bonus_token]
        if kind.block_size:
            if isinstance(self.drafter, Linked | Bilinear):
                return Draft(self.drafter.candidates(context, kind.longest_draft, request.top_k))
            return Draft(Marginals(*_most_probable(self.drafter.block(context, kind.longest_draft), request.top_k)))
        rows, drawn = [], []
        for depth in range(request.length):
            rows.append(_most_probable(self.drafter.block(context, 1), request.top_k))
            drawn.append(request.draw(rows[-1][0][0], rows[-1][1][0], depth))
            context.append(drawn[-1].token)
        log_probs, token_ids = (np.concatenate(part) for part in zip(*rows, strict=True))
        return Draft(Marginals(log_probs, token_ids), tuple(drawn))

    def commit(self, slot: int, path: Array, *, taps: bool) -> None:
        self._log("commit", [slot], len(path))
        tree = self._slots[slot].tree
        assert tree is not None, "a commit follows a verification"
        assert path[0] == 0
        assert tree.parents[path[1:]].tolist() == path[:-1].tolist(), "a path goes from parent to child"
        self._keep(slot, path, taps)

    def _keep(self, slot: int, path: Array, taps: bool) -> None:
        state = self._slots[slot]
        assert state.tree is not None
        if taps:
            assert state.known == len(state.tokens), "states before these were not kept"
            state.known += len(path)
        state.tokens += state.tree.token_ids[path].tolist()
        state.tree = None

    def _log(self, verb: str, slots: Sequence[int], tokens: int) -> None:
        self.calls.append(Call(verb, tuple(slots), tokens))
        self.fail(verb, tuple(slots))

    def warm_up(self, progress: object = None) -> None:
        self._log("warm_up", [], 0)

    def synchronize(self) -> None:
        self._log("synchronize", [], 0)

    def close(self) -> None:
        pass


def make_manifest(vocab_size: int, kind: Kind, block_size: int, limits: Limits) -> Manifest:
    shape = (vocab_size, 8, 1, 1, 1, 8, 8, 1e-6, 1e4, limits.max_seq_len)
    target = TransformerDims(*shape)
    block = DFlashDims(*shape, block_size=block_size, mask_token_id=0, tap_layers=(0,), num_target_layers=1)
    return bare_manifest("scripted", target, block if kind == "dflash" else target, limits)


def _most_probable(probs: Array, k: int) -> tuple[Array, Array]:
    """log_probs float32 and token_ids int32, both [L, K], of marginals [L, V]."""
    ids = np.argsort(-probs, axis=1, kind="stable")[:, :k]
    with np.errstate(divide="ignore"):
        return np.log(np.take_along_axis(probs, ids, 1)).astype(np.float32), ids.astype(np.int32)


# Running it


_LETTERS = [chr(97 + t) for t in range(4096)]
_letter = _LETTERS.__getitem__
CHAIN = 4  # γ of an autoregressive drafter


class Letters:
    """A codec for tiny vocabularies: token 0 is "a", token 1 "b", …"""

    letter, bytes = [0], frozenset[int]()

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, keep: object = ()) -> str:
        return "".join(map(_letter, token_ids))


def completion(
    engine: Engine,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    codec: Letters | TextCodec | None = None,
    eos: Sequence[int] = (),
    index: int = 0,
    sampler: type[Sampler] = Sampler,
) -> Completion:
    """A sequence as `requests` makes it; where it would choose budgets by costs, whole blocks or chains of CHAIN."""
    manifest, stops = engine.manifest, frozenset(() if params.ignore_eos else eos)
    params = replace(params, method=resolve_method(params.method, manifest.drafter_kind).name)
    fixed = params.tree_budget
    budget = METHODS[params.method].default_budget(manifest.drafting) if fixed == "auto" else fixed
    if budget is None:
        budget = manifest.drafting.longest_draft if manifest.drafting.block_size else CHAIN
    return Completion(
        index=index,
        prompt=list(prompt),
        params=params,
        eos_ids=stops,
        capacity=manifest.limits.max_seq_len,
        sampler=sampler(
            params, manifest.target_dims.vocab_size, list(prompt), stops | set(params.stop_token_ids), index
        ),
        stream=TextStream(
            cast(TextCodec, codec or Letters()),
            params.stop,
            skip_special_tokens=params.skip_special_tokens,
            keep_stop=params.include_stop_str_in_output,
        ),
        budget=FixedBudget(budget),
        why_host="a scripted engine has no rounds of its own",
    )


def finish(scheduler: Scheduler, completions: Sequence[Completion]) -> None:
    """Add the completions and step until all are done; raises what ended one."""
    for c in completions:
        scheduler.add(c)
    while not all(c.finished for c in completions):
        scheduler.step()
    for c in completions:
        if c.error is not None:
            raise c.error


def generate(engine: ScriptedEngine, prompt: Sequence[int], params: SamplingParams, batch: int = 1) -> list[list[int]]:
    completions = [completion(engine, prompt, params, index=i) for i in range(batch)]
    finish(Scheduler(engine), completions)
    return [c.output for c in completions]
