"""LLM on the packaged pair: batches, streams, chat turns, log-probabilities."""

import dataclasses
import itertools
import random
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from engine_builds import CHATS

import ddtree_trt
from ddtree_trt.errors import ArtifactError, EngineError, UsageError, install_with
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.params import SamplingParams


def test_metrics_say_why_automatic_budgets_drafted(llm: LLM) -> None:
    made, fixed = (
        llm.generate(CHATS[0], SamplingParams(max_tokens=40, tree_budget=budget))[0].metrics for budget in ("auto", 4)
    )
    why = made.automatic
    assert 0 < why.drafted <= why.rounds == made.rounds
    assert why.committed_tokens == sum(made.acceptance_lengths) - (why.rounds - why.drafted)  # the others made one each
    assert why.expected_tokens > why.drafted and fixed.automatic.rounds == 0
    assert made.to_dict()["automatic"] == dataclasses.asdict(why)


def test_streams_side_by_side_say_what_generate_says(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, method=m) for n, m in ((30, "auto"), (50, "dflash"), (9, "auto"))]
    expected = llm.generate(CHATS[:3], params)
    streams = [llm.stream(prompt, each) for prompt, each in zip(CHATS[:3], params, strict=True)]
    parts: list[list[Any]] = [[], [], []]
    for row in zip_longest(*streams):
        for place, part in enumerate(row):
            if part is not None:
                parts[place].append(part)
    for found, whole in zip(parts, expected, strict=True):
        assert "".join(p.outputs[0].text for p in found) == whole.outputs[0].text
        assert [t for p in found for t in p.outputs[0].token_ids] == whole.outputs[0].token_ids
        assert [p.finished for p in found] == [False] * (len(found) - 1) + [True]


@pytest.mark.parametrize("count", [30, pytest.param(403, marks=pytest.mark.slow)])
def test_reused_prefixes_say_what_a_fresh_engine_says(llm: LLM, tiny_engine: Path, count: int) -> None:
    """Prompts that go on from, cut short or fork what some slot holds, by any method."""
    rng = random.Random(count)
    vocab = llm.engine.manifest.target_dims.vocab_size
    known = [[rng.randrange(5, vocab) for _ in range(rng.randrange(1, 60))] for _ in range(4)]
    reused = 0
    with LLM(tiny_engine) as fresh:
        for _ in range(count):
            prompt = rng.choice(known)
            prompt = prompt[: rng.randrange(1, len(prompt) + 1)] if rng.random() < 0.3 else prompt
            prompt = prompt + [rng.randrange(5, vocab) for _ in range(rng.randrange(4))]
            method = rng.choice(["ddtree", "ddtree", "ar", "dflash"])
            params = SamplingParams(method=method, max_tokens=rng.randrange(1, 20), ignore_eos=True)
            (output,) = llm.generate(prompt, params)
            fresh.reset_prefix_cache()
            (plain,) = fresh.generate(prompt, params)
            assert plain.usage.cached_tokens == 0 and output.outputs[0].token_ids == plain.outputs[0].token_ids
            reused += output.usage.cached_tokens > 0
            known[rng.randrange(len(known))] = (prompt + output.outputs[0].token_ids)[:300]
    assert reused > count / 2


def test_an_engine_failure_is_raised_to_everyone_it_ended(llm: LLM, monkeypatch: Any) -> None:
    streams = [llm.stream(CHATS[i], SamplingParams(max_tokens=60, ignore_eos=True)) for i in range(2)]
    for stream in streams:
        next(stream)

    def fail(requests: object) -> None:
        raise EngineError("the device went away")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "verify", fail)
        with pytest.raises(EngineError, match="went away"):
            next(streams[0])
    with pytest.raises(EngineError, match="went away"):
        next(streams[1])
    assert llm.core.scheduler.free_slots == llm.core.scheduler.slots
    assert llm.generate(CHATS[0], SamplingParams(max_tokens=5))[0].finished


def test_far_more_threads_than_cores_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for each other: an engine with 64 on two cores takes minutes to open."""
    monkeypatch.setattr("ddtree_trt.runtime.engines.load.usable_cores", lambda: 2)
    with pytest.raises(UsageError, match=r"threads 9 would wait for each other on 2 cores; give at most 2$"):
        LLM(tmp_path, threads=9)
    with pytest.raises(ArtifactError, match="manifest"):
        LLM(tmp_path, threads=8)


def test_nothing_runs_when_one_of_many_calls_is_wrong(llm: LLM) -> None:
    limit = llm.engine.manifest.limits.max_seq_len
    vocab = llm.engine.manifest.target_dims.vocab_size
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ("", {}, "the prompt has no tokens"),
        ([], {}, "the prompt has no tokens"),
        ([5] * limit, {}, f"the prompt has {limit} tokens, this engine takes at most {limit - 1}"),
        ([vocab], {}, f"token id {vocab} is outside the vocabulary of {vocab}"),
        ([-1], {}, "token id -1 is outside the vocabulary"),
        ("hi", {"stop_token_ids": [vocab]}, f"stop_token_ids: token id {vocab} is outside the vocabulary"),
        ("hi", {"stop_token_ids": range(vocab)}, f"stop_token_ids name the whole vocabulary of {vocab}"),
        ("hi", {"logit_bias": {vocab: 1}}, f"logit_bias: token id {vocab} is outside the vocabulary"),
        ("hi", {"method": "draft-model"}, "method 'draft-model' needs a drafter of kind autoregressive"),
        ("hi", {"tree_budget": 10**6}, "tree_budget 1000000 is above this engine's"),
    ]
    for name, tokens in itertools.product(("max_tokens", "min_tokens"), (10, 2**31 - 1)):
        says = f"{name} {tokens} does not fit: the prompt leaves 9 of this engine's {limit} tokens; lower it"
        cases.append(([7] * (limit - 9), {name: tokens}, says))
    for prompt, params, text in cases:
        with pytest.raises(UsageError, match=text):
            llm.generate(["fine", prompt], [SamplingParams(max_tokens=1), SamplingParams(**params)])
        with pytest.raises(UsageError, match=text):
            llm.stream(prompt, SamplingParams(**params))
        assert not llm.core.scheduler.busy
    with pytest.raises(UsageError, match="2 prompts but 1 sampling params"):
        llm.generate(["a", "b"], [SamplingParams()])


@pytest.mark.parametrize(
    ("method", "room", "max_tokens"),
    [("ddtree", 1, None), *((method, 9, most) for method in ("ar", "dflash", "ddtree") for most in (None, 9))],
)
def test_generation_up_to_the_engines_last_token(llm: LLM, method: str, room: int, max_tokens: int | None) -> None:
    limit = llm.engine.manifest.limits.max_seq_len
    params = SamplingParams(ignore_eos=True, method=method, max_tokens=max_tokens)
    (output,) = llm.generate([[7] * (limit - room)], params)
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (room, "length")


def test_unless_given_there_are_at_most_256_tokens(llm: LLM) -> None:
    for least, size in ((0, 256), (300, 300)):
        (output,) = llm.generate([7, 8], SamplingParams(ignore_eos=True, min_tokens=least))
        assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (size, "length")


def test_a_chat_is_generate_of_messages(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12)
    expected = [o.outputs[0].token_ids for o in llm.generate(CHATS[:2], params)]
    assert [o.outputs[0].token_ids for o in llm.chat(CHATS[:2], params)] == expected
    assert [o.outputs[0].token_ids for o in llm.chat(CHATS[0], params)] == expected[:1]
    for wrong in ("hi", [1, 2], ["hi"], [[1, 2]], [CHATS[0], "hi"], [5.0], 5):
        with pytest.raises(UsageError, match="messages"):
            llm.chat(wrong, params)  # type: ignore[arg-type]
    assert llm.get_tokenizer() is llm.tokenizer


def test_a_bar_counts_prompts(llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a terminal, and none elsewhere."""
    llm.generate(["a"] * 3, SamplingParams(max_tokens=1))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    llm.generate(["a"] * 3, SamplingParams(max_tokens=1), use_tqdm=False)
    assert capsys.readouterr().err == ""
    llm.chat([[{"role": "user", "content": "a"}]] * 3, SamplingParams(max_tokens=1))
    assert "prompts: 100%" in capsys.readouterr().err


def test_an_output_that_the_default_limit_cut_is_warned_of_once(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    llm._warned = False
    llm.generate(["a", "b"], SamplingParams(max_tokens=3, ignore_eos=True))
    assert not caplog.messages
    for prompt in ([7] * (llm.engine.manifest.limits.max_seq_len - 9), "a", "a"):
        llm.generate([prompt], SamplingParams(ignore_eos=True))
    (message,) = caplog.messages
    assert message.startswith("an output was cut at 256 tokens, the default where max_tokens is not given")


# What `import ddtree_trt` offers, and what it says where the native module is not beside the sources


ROOT = Path(__file__).resolve().parents[2]


def test_the_public_names_are_listed() -> None:
    names = dir(ddtree_trt)
    assert {"LLM", "AsyncLLM", "SamplingParams", "RequestOutput", "__version__"} <= {*names} == {*ddtree_trt.__all__}
    assert all(getattr(ddtree_trt, name) is not None for name in names)


def test_sources_without_the_native_module_say_what_to_do(tmp_path: Path) -> None:
    """As in a checkout whose installation is a copy elsewhere: Python meets the sources in the working directory."""
    (tmp_path / "ddtree_trt").mkdir()
    for name in ("__init__.py", "errors.py"):
        (tmp_path / "ddtree_trt" / name).write_text((ROOT / "ddtree_trt" / name).read_text())
    command = [sys.executable, "-S", "-c", "from ddtree_trt import _native"]  # -S: no installation either
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"ddtree_trt.errors.MissingDependency: {tmp_path}/ddtree_trt has no native module (_native); {install_with()}"
    )
