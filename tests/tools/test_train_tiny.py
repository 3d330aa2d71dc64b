"""The tiny drafters: EAGLE-3's unrolled steps, the Markov head, trees whose children depend on their parent."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.train_tiny import eagle
from tools.train_tiny.comparison import Answered, accepted, rounds
from tools.train_tiny.export import drafter_config, eagle3_config, save, save_target, target_config
from tools.train_tiny.model import Target, load_drafter
from tools.train_tiny.settings import DrafterSettings, Eagle3Settings, TargetSettings
from tools.train_tiny.training import drafter
from tools.train_tiny.training.draft_data import GREEDY, SAMPLED, DraftSet, Sequence, stem_of, write_states
from tools.train_tiny.trees import Ranked, Tree, best_prefixes, grow

SHAPE = TargetSettings(vocabulary=40, hidden=16, inner=24, layers=5, heads=4, kv_heads=2, head_dim=8)
EAGLE3 = Eagle3Settings(inner=20, target_layer_ids=(0, 1, 3))


@pytest.fixture
def target() -> Target:
    torch.manual_seed(1)
    return Target(target_config(SHAPE)).requires_grad_(False)


def make_eagle3(target: Target) -> eagle.Eagle3:
    """A random drafter whose every weight matters."""
    model = eagle.fresh(target, eagle3_config(SHAPE, EAGLE3), 2).requires_grad_(False)
    torch.manual_seed(3)
    for p in model.parameters():
        p.copy_(torch.randn(p.shape) * (p.shape[-1] ** -0.5 if p.dim() == 2 else 0.3) + (p.dim() == 1))
    return model


def plain_step(model: eagle.Eagle3, inputs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """EAGLE-3's layer [H] at the last of rows (feature, embedding), every row seeing all before it; one head a time."""
    w = {name: value for name, value in model.state_dict().items()}
    norm = lambda x, name: x / torch.sqrt((x * x).mean() + 1e-6) * w[f"{name}.weight"]  # noqa: E731

    def turn(x: Tensor, position: int) -> Tensor:
        half = len(x) // 2
        angles = position * 10000.0 ** (-torch.arange(half) / half)
        low, high = x[:half], x[half:]
        return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()])

    joined = [torch.cat([norm(e, "midlayer.input_layernorm"), norm(f, "midlayer.hidden_norm")]) for f, e in inputs]
    last, mixed = len(inputs) - 1, []
    for head in range(SHAPE.heads):
        rows = slice(SHAPE.head_dim * head, SHAPE.head_dim * (head + 1))
        group = head // (SHAPE.heads // SHAPE.kv_heads)
        keys = slice(SHAPE.head_dim * group, SHAPE.head_dim * (group + 1))
        q = turn(w["midlayer.self_attn.q_proj.weight"][rows] @ joined[last], last)
        scores = torch.stack(
            [q @ turn(w["midlayer.self_attn.k_proj.weight"][keys] @ x, i) for i, x in enumerate(joined)]
        )
        values = torch.stack([w["midlayer.self_attn.v_proj.weight"][keys] @ x for x in joined])
        mixed.append(torch.softmax(scores / math.sqrt(SHAPE.head_dim), 0) @ values)
    x = inputs[last][0] + w["midlayer.self_attn.o_proj.weight"] @ torch.cat(mixed)
    h = norm(x, "midlayer.post_attention_layernorm")
    gate, up = w["midlayer.mlp.gate_proj.weight"] @ h, w["midlayer.mlp.up_proj.weight"] @ h
    return x + w["midlayer.mlp.down_proj.weight"] @ (F.silu(gate) * up)


def test_every_unrolled_step_is_the_layer_with_its_own_features_fed_back(target: Target) -> None:
    model, length, steps = make_eagle3(target), 9, 4
    taps, ids = torch.randn(2, length, 3 * SHAPE.hidden), torch.randint(0, SHAPE.vocabulary, (2, length))
    rows, before = torch.tensor([[2, 5], [0, 8]]), torch.randint(0, SHAPE.vocabulary, (2, 2, steps))
    features, past = model.context(target, taps, ids)
    before[:, :, 0] = ids.gather(1, rows)  # the first step's keys come from the context
    found = model.unroll(target, features, past, rows, before)
    for n, a in itertools.product(range(2), range(2)):
        row = int(rows[n, a])
        inputs = [(model.fc.weight @ taps[n, p], target.embed_tokens.weight[ids[n, p]]) for p in range(row + 1)]
        for step in range(steps):
            out = plain_step(model, inputs)
            torch.testing.assert_close(found[n, a, step], out, rtol=1e-4, atol=1e-5)
            if step + 1 < steps:
                inputs.append((out, target.embed_tokens.weight[before[n, a, step + 1]]))


def test_a_tree_that_grows_sees_what_the_unrolled_steps_see(target: Target) -> None:
    """Every node of two branches, expanded in mixed order, gives the log-probabilities of its path alone."""
    model, length = make_eagle3(target), 6
    taps, ids = torch.randn(1, length, 3 * SHAPE.hidden), torch.randint(0, SHAPE.vocabulary, (1, length))
    features, past = model.context(target, taps, ids)
    growth = eagle.Growth(model, target, features[0], past, int(ids[0, -1]), SHAPE.vocabulary)
    bonus, paths = int(ids[0, -1]), {0: [], 1: [7], 2: [9], 3: [7, 3], 4: [9, 3], 5: [7, 3, 1]}
    found = growth([(-1, -1)]) + growth([(0, 7), (0, 9)]) + growth([(1, 3)]) + growth([(2, 3), (3, 1)])
    for number, path in paths.items():
        before = torch.tensor([[[bonus, *path]]])
        states = model.unroll(target, features, past, torch.tensor([[length - 1]]), before)
        truth = torch.log_softmax(model.logits(target, states[0, 0, -1]), -1)
        values, tokens = found[number]
        torch.testing.assert_close(torch.tensor(values), truth[tokens], rtol=1e-4, atol=1e-5)


def random_children(seed: int, vocabulary: int, depth: int) -> dict[tuple[int, ...], Tensor]:
    """Log-probabilities of the next token after every prefix of fewer than `depth` tokens."""
    torch.manual_seed(seed)
    prefixes = itertools.chain.from_iterable(itertools.product(range(vocabulary), repeat=d) for d in range(depth))
    return {prefix: torch.log_softmax(2 * torch.randn(vocabulary, dtype=torch.double), -1) for prefix in prefixes}


def prefixes_of(tree: Tree) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for token, parent, depth in zip(tree.tokens, tree.parents, tree.depths, strict=True):
        paths.append((*paths[parent], token))
        assert len(paths[-1]) == depth
    return paths[1:]


def best_by_enumeration(rows: dict[tuple[int, ...], Tensor], vocabulary: int, depth: int) -> list[tuple[int, ...]]:
    def score(path: tuple[int, ...]) -> float:
        return sum(float(rows[path[:d]][path[d]]) for d in range(len(path)))

    lengths = (itertools.product(range(vocabulary), repeat=d) for d in range(1, depth + 1))
    return sorted(itertools.chain.from_iterable(lengths), key=lambda path: -score(path))


def ranked(rows: dict[tuple[int, ...], Tensor], path: tuple[int, ...]) -> Ranked:
    if path not in rows:  # the last depth
        return [], []
    values, ids = rows[path].sort(descending=True)
    return values.tolist(), ids.tolist()


@pytest.mark.parametrize("budget", [1, 3, 8, 30])
@pytest.mark.parametrize("seed", range(3))
def test_growth_in_passes_finds_the_most_probable_prefixes(budget: int, seed: int) -> None:
    vocabulary, depth, asked = 4, 4, list[tuple[int, ...]]()
    rows = random_children(seed, vocabulary, depth)

    def expand(nodes: list[tuple[int, int]]) -> list[Ranked]:
        new = [() if parent < 0 else (*asked[parent], token) for parent, token in nodes]
        asked.extend(new)
        return [ranked(rows, path) for path in new]

    tree = grow(expand, budget, 3, depth, by_depth=False)
    assert prefixes_of(tree) == best_by_enumeration(rows, vocabulary, depth)[:budget]
    assert len(asked) == len(set(asked))


@pytest.mark.parametrize("budget", [1, 3, 8, 30])
def test_the_heap_finds_the_most_probable_prefixes_where_a_child_depends_on_its_parent_alone(budget: int) -> None:
    vocabulary, depth = 4, 4
    torch.manual_seed(4)
    table = torch.log_softmax(2 * torch.randn(depth, vocabulary + 1, vocabulary, dtype=torch.double), -1)
    prefixes = random_children(0, vocabulary, depth)
    rows = {path: table[len(path), path[-1] if path else vocabulary] for path in prefixes}

    def children(node: int, token: int, at: int) -> Ranked:
        path = () if at == 0 else (0,) * (at - 1) + (token,)
        return ranked(rows, path)

    tree = best_prefixes(children, budget)
    assert prefixes_of(tree) == best_by_enumeration(rows, vocabulary, depth)[:budget]


def test_eagle2_expands_the_most_probable_of_the_newest_depth_and_keeps_the_best_of_all() -> None:
    vocabulary, depth, width, asked = 5, 3, 2, list[tuple[int, ...]]()
    rows = random_children(6, vocabulary, depth)

    def score(path: tuple[int, ...]) -> float:
        return sum(float(rows[path[:d]][path[d]]) for d in range(len(path)))

    def expand(nodes: list[tuple[int, int]]) -> list[Ranked]:
        new = [() if parent < 0 else (*asked[parent], token) for parent, token in nodes]
        asked.extend(new)
        return [(values[:width], ids[:width]) for values, ids in (ranked(rows, path) for path in new)]

    tree = grow(expand, 6, width, depth, by_depth=True)
    candidates, layer = list[tuple[int, ...]](), list[tuple[int, ...]]([()])
    for _ in range(depth):
        layer = [(*path, token) for path in layer for token in ranked(rows, path)[1][:width]]
        candidates += layer
        layer = sorted(layer, key=lambda path: -score(path))[:width]
    assert prefixes_of(tree) == sorted(candidates, key=lambda path: -score(path))[:6]


def make_data(folder: Path, target: Target, taps: tuple[int, ...]) -> None:
    """Draft data: random text that repeats itself."""
    torch.manual_seed(7)
    sequences: list[Sequence] = []
    for number in range(40):
        ids = torch.randint(5, SHAPE.vocabulary, (6,)).tolist()
        sequences.append((ids * 4, 6, SAMPLED if number % 4 == 0 else GREEDY))
    write_states(target, sequences, taps, stem_of(folder, 0))


SMALL: dict[str, Any] = {
    "seconds": 0.0,
    "steps": 30,
    "anchors": 4,
    "warmup_steps": 2,
    "block": 4,
    "target_layer_ids": (0, 1, 3),
}
DFLASH = DrafterSettings(layers=2, **SMALL)
LEARNERS: dict[str, DrafterSettings] = {
    "dspark": replace(DFLASH, markov_rank=3, body_frozen=True, adam_rate=0.05),
    "eagle3": replace(EAGLE3, measured_block=6, muon_rate=0.02, **SMALL),
    "eagle3-own-head": replace(EAGLE3, own_head=True, muon_rate=0.02, **SMALL),
}


@pytest.mark.parametrize("name", LEARNERS)
def test_training_learns_and_goes_on_after_a_signal(
    target: Target, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = LEARNERS[name]
    make_data(tmp_path, target, settings.target_layer_ids)
    save_target(target, target_config(SHAPE), tmp_path / "target")
    save(drafter.fresh(target, SHAPE, DFLASH), drafter_config(SHAPE, DFLASH), tmp_path / "body")
    files = {"target": tmp_path / "target", "data": tmp_path, "out": tmp_path / name}
    files |= {"log": tmp_path / "log.jsonl", "partial": tmp_path / "state.pt"}
    calls, loss = itertools.count(1), drafter.block_loss

    def interrupted(*arguments: Any) -> Tensor:
        if next(calls) == 40:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss(*arguments)

    monkeypatch.setattr(drafter, "block_loss", interrupted)
    drafter.train(settings, SHAPE, 1, files, tmp_path / "body")
    assert not files["out"].exists() and files["partial"].exists()
    drafter.train(settings, SHAPE, 1, files, tmp_path / "body")
    lines = [json.loads(line) for line in files["log"].read_text().splitlines()]
    steps = [line["step"] for line in lines if "step" in line]
    assert steps[0] == 1 and steps[1] == 11  # stopped after the tenth, four micro-batches each
    assert lines[-1]["loss"] < 0.9 * lines[0]["loss"]
    assert not files["partial"].exists()
    weights = load_file(files["out"] / "model.safetensors")
    if name == "dspark":
        body = load_file(tmp_path / "body" / "model.safetensors")
        assert weights.keys() - body.keys() == {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}
        assert all(torch.equal(weights[key], body[key]) for key in body)
        assert load_drafter(files["out"]).markov_head is not None
    else:
        assert ("lm_head.weight" in weights) == name.endswith("own-head")
        found = eagle.load_eagle3(files["out"])
        assert found.taps == settings.target_layer_ids


def test_the_markov_head_adds_what_it_says_of_the_token_before(target: Target, tmp_path: Path) -> None:
    settings = LEARNERS["dspark"]
    make_data(tmp_path, target, settings.target_layer_ids)
    data = DraftSet.load(stem_of(tmp_path, 0))
    blocks = drafter.make_blocks(data, torch.arange(5).numpy(), settings, torch.Generator().manual_seed(0))
    model = drafter.fresh(target, SHAPE, settings).requires_grad_(False)
    assert model.markov_head is not None
    model.markov_head.markov_w2.weight.normal_()
    plain = drafter.fresh(target, SHAPE, DFLASH)
    plain.load_state_dict(model.state_dict(), strict=False)
    added = drafter.draft_logits(model, target, blocks) - drafter.draft_logits(plain, target, blocks)
    first, second = model.markov_head.markov_w1.weight, model.markov_head.markov_w2.weight
    for n, a, k in itertools.product(range(5), range(4), range(3)):
        if blocks.valid[n, a, k]:
            before = int(blocks.tokens[n, blocks.anchor[n, a] + k])
            torch.testing.assert_close(added[n, a, k], second @ first[before], rtol=1e-4, atol=1e-4)


def test_replayed_rounds_accept_the_path_of_the_answer() -> None:
    tree = Tree(tokens=[5, 6, 7, 8], parents=[0, 0, 2, 3], depths=[1, 1, 2, 3])
    assert [accepted(tree, budget, [6, 7, 8, 9]) for budget in range(5)] == [0, 0, 1, 2, 3]
    answered = Answered("math", ids=[1, 1, 4, 6, 7, 8, 5, 2], prompt=2, taps=torch.zeros(0))
    asked: list[int] = []

    def tree_at(anchor: int) -> Tree:
        asked.append(anchor)
        return tree

    assert rounds(answered, tree_at, 4) == [4, 1]  # three drafts and the bonus token, then the end alone
    assert asked == [2, 6]
    assert sum(rounds(answered, tree_at, 1)) == 5
