"""An engine that plays by a script: the protocol of `runtime.engine` over distributions a test can write down.

The target is a table or a list of tokens to say, the drafter anything from the target's own marginals to its worst
enemy. The engine checks what the loop asks of it, spoils what it lent out at its next pass, and logs every call.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import numpy as np

from ddtree_trt.artifact.manifest import CheckpointIdentity, DrafterDims, Limits, Manifest, TransformerDims
from ddtree_trt.runtime.decoding.budget import FixedBudget
from ddtree_trt.runtime.decoding.methods import default_budget, resolve_method
from ddtree_trt.runtime.decoding.sampling import Sampler
from ddtree_trt.runtime.engines.base import Draft, DraftRequest, Engine, LogitRows, Verdict, VerifyRequest
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.scheduler import Scheduler
from ddtree_trt.runtime.sequence import Sequence as Completion
from ddtree_trt.runtime.text.codec import TextStream
from ddtree_trt.runtime.tree import TokenTree, token_chain

Array = np.ndarray
Kind = Literal["dflash", "autoregressive"]


# Targets


class Target(Protocol):
    vocab_size: int

    def logits(self, committed: Sequence[int], tree: TokenTree) -> Array:
        """float32 [T, V]: what follows each node of the tree behind the committed tokens."""


class MarkovTarget:
    """The next token depends on the last two; before the first token stands token 0."""

    def __init__(self, vocab_size: int = 6, seed: int = 0, spread: float = 1.5) -> None:
        self.vocab_size = vocab_size
        shape = (vocab_size, vocab_size, vocab_size)
        self.table = np.random.default_rng(seed).normal(0, spread, shape).astype(np.float32)
        self._probs = _softmax(self.table.astype(np.float64))

    def logits(self, committed: Sequence[int], tree: TokenTree) -> Array:
        before = tree.token_ids[tree.parents]
        before[0] = committed[-1] if committed else 0
        return self.table[before, tree.token_ids]

    def row(self, context: Sequence[int]) -> Array:
        """float32 [V]: logits of what follows the tokens."""
        return self.table[context[-2] if len(context) > 1 else 0, context[-1]]

    @functools.cache  # noqa: B019  a target lives as long as its test
    def marginals(self, before: int, last: int, length: int) -> Array:
        """float64 [length, V]: the true distribution of each of the tokens that follow."""
        pairs, rows = np.zeros(self.table.shape[:2]), []
        pairs[before, last] = 1
        for _ in range(length):
            triples = pairs[:, :, None] * self._probs
            pairs = triples.sum(0)
            rows.append(pairs.sum(0))
        return np.array(rows)


class SayingTarget:
    """Says the tokens of a script behind a prompt, then `end` for ever."""

    def __init__(self, script: Sequence[int], vocab_size: int, prompt_length: int = 1, end: int = 0) -> None:
        self.script, self.vocab_size, self.prompt_length, self.end = list(script), vocab_size, prompt_length, end

    def word(self, position: int) -> int:
        """The token at an absolute position."""
        index = position - self.prompt_length
        return self.script[index] if 0 <= index < len(self.script) else self.end

    def logits(self, committed: Sequence[int], tree: TokenTree) -> Array:
        rows = np.zeros((len(tree), self.vocab_size), np.float32)
        for row, depth in zip(rows, tree.depths.tolist(), strict=True):
            row[self.word(len(committed) + depth + 1)] = 10
        return rows


# Drafters


class Drafter(Protocol):
    def block(self, context: Sequence[int], length: int) -> Array:
        """float64 [length, V]: the marginals of the tokens that follow the context, which ends with the bonus token."""


@dataclass
class Good:
    """The target's own marginals at temperature 1."""

    target: MarkovTarget

    def block(self, context: Sequence[int], length: int) -> Array:
        return self.target.marginals(context[-2] if len(context) > 1 else 0, context[-1], length)


@dataclass
class Useless:
    """Knows nothing: every token is as likely as any other."""

    vocab_size: int

    def block(self, context: Sequence[int], length: int) -> Array:
        return np.full((length, self.vocab_size), 1 / self.vocab_size)


@dataclass
class Adversarial:
    """Sure of what the target thinks least likely, and sure that what it thinks most likely cannot be."""

    target: MarkovTarget

    def block(self, context: Sequence[int], length: int) -> Array:
        probs = Good(self.target).block(context, length)
        worst = 1 / (probs + 1e-3) ** 2
        worst[np.arange(length), probs.argmax(1)] = 0
        return worst / worst.sum(1, keepdims=True)


@dataclass
class Saying:
    """Drafts the script right for as many tokens as `lengths` says, round by round, and wrong from there on."""

    target: SayingTarget
    lengths: Callable[[], int]

    def block(self, context: Sequence[int], length: int) -> Array:
        right, vocab = self.lengths(), self.target.vocab_size
        probs = np.zeros((length, vocab))
        for depth in range(length):
            word = self.target.word(len(context) + depth)
            probs[depth, word if depth < right else (word + 1) % vocab] = 1
        return probs


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

    threads, rounds, buckets = 1, None, None

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        *,
        kind: Kind = "dflash",
        block_size: int = 4,
        **limits: int,
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

    def draftable_length(self, slot: int) -> int:
        return self._slots[slot].known

    def held(self, slot: int) -> list[int]:
        """The tokens in the slot's cache."""
        return list(self._slots[slot].tokens)

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
        tree = token_chain(token_ids)
        (verdict,) = self._pass("prefill", [VerifyRequest(slot, tree)])
        self._keep(slot, np.arange(size), taps)
        first = {"all": 0, "last": size - 1, "none": size}[rows]
        return Verdict(verdict.choices[first:], verdict.logits[first:])

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
        for slot, tree in ((r.slot, r.tree) for r in requests):
            state = self._slots[slot]
            assert len(tree) <= limits.max_tokens_per_pass
            assert len(state.tokens) + len(tree) <= limits.cache_rows
            assert len(state.tokens) < limits.max_seq_len
            logits = self.target.logits(state.tokens, tree)
            choices = logits.argmax(1)
            state.tree = tree
            self._lent += [logits, choices]
            verdicts.append(Verdict(choices, logits))
        return verdicts

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        if requests:
            self._log("draft", [r.slot for r in requests], max(r.length for r in requests))
        return [self._draft(r) for r in requests]

    def _draft(self, request: DraftRequest) -> Draft:
        state, kind = self._slots[request.slot], self.manifest.drafting
        assert state.known == len(state.tokens), "drafting needs the states of every committed token"
        context = [*state.tokens, request.bonus_token]
        if kind.at_once:
            return Draft(*_most_probable(self.drafter.block(context, kind.longest_draft), request.top_k))
        rows, drawn = [], []
        for depth in range(request.length):
            rows.append(_most_probable(self.drafter.block(context, 1), request.top_k))
            drawn.append(request.draw(rows[-1][0][0], rows[-1][1][0], depth))
            context.append(drawn[-1].token)
        log_probs, token_ids = (np.concatenate(part) for part in zip(*rows, strict=True))
        return Draft(log_probs, token_ids, tuple(drawn))

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

    def warm_up(self) -> None:
        self._log("warm_up", [], 0)

    def settle(self) -> None:
        self._log("settle", [], 0)

    def close(self) -> None:
        pass


def make_manifest(vocab_size: int, kind: Kind, block_size: int, limits: Limits) -> Manifest:
    identity = CheckpointIdentity("scripted", "local", "")
    shape = (vocab_size, 8, 1, 1, 1, 8, 8, 1e-6, 1e4, limits.max_seq_len)
    block = DrafterDims(*shape, block_size=block_size, mask_token_id=0, tap_layers=(0,), num_target_layers=1)
    return Manifest(
        schema_version=1,
        product_version="0",
        backend="onnxruntime",
        precision="fp32",
        name="scripted",
        target=identity,
        drafter=identity,
        drafter_kind=kind,
        target_dims=TransformerDims(*shape),
        drafter_dims=block if kind == "dflash" else TransformerDims(*shape),
        limits=limits,
        stop_token_ids=(),
        chat_template_args={},
        toolchain={},
        tensors={},
        files={},
        build_seconds=0.0,
    )


def _softmax(logits: Array) -> Array:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


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

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(map(_letter, token_ids))


def completion(
    engine: Engine,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    codec: Letters | None = None,
    eos: Sequence[int] = (),
    index: int = 0,
    sampler: type[Sampler] = Sampler,
) -> Completion:
    """A sequence as `requests` makes it; where it would choose budgets by costs, whole blocks or chains of CHAIN."""
    manifest, stops = engine.manifest, frozenset(() if params.ignore_eos else eos)
    params = replace(params, method=resolve_method(params.method, manifest.drafter_kind))
    budget = params.tree_budget
    if budget == "auto":
        budget = default_budget(params.method, manifest.drafting)
        if budget is None:
            budget = manifest.drafting.longest_draft if manifest.drafting.at_once else CHAIN
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
            codec or Letters(),
            params.stop,
            skip_special_tokens=params.skip_special_tokens,
            keep_stop=params.include_stop_str_in_output,
        ),
        budget=FixedBudget(budget),
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
    """The outputs of `batch` completions of one prompt side by side."""
    completions = [completion(engine, prompt, params, index=i) for i in range(batch)]
    finish(Scheduler(engine), completions)
    return [c.output for c in completions]


def verbs(engine: ScriptedEngine) -> Counter[str]:
    return Counter(call.verb for call in engine.calls)
