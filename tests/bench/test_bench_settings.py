"""What a benchmark runs: cases, shards, and settings that are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_trt.bench.settings import BenchSettings, Case, Shard
from ddtree_trt.errors import UsageError


@pytest.mark.parametrize(
    ("case", "label"),
    [
        (Case("ar"), "ar"),
        (Case("ddtree", 16), "ddtree@16"),
        (Case("ddtree", "auto"), "ddtree@auto"),
        (Case("ddtree", 16, device=True), "ddtree@16+device"),
        (Case("generate", peer="hf"), "hf:generate"),
        (Case("ddtree", 64, "ddtree-reference"), "ddtree-reference:ddtree@64"),
    ],
)
def test_labels_name_cases(case: Case, label: str) -> None:
    assert case.label == label
    assert Case.parse(label) == case


@pytest.mark.parametrize("label", ["", "ddtree@", "ddtree@some", "a:b:c", "ddtree@-1", "ddtree@4+host"])
def test_a_label_that_names_nothing_is_refused(label: str) -> None:
    with pytest.raises(UsageError, match=r"expected \[peer:\]method"):
        Case.parse(label)


def test_the_baselines_are_always_measured() -> None:
    settings = BenchSettings("engine", methods=("ddtree",), budgets=(4, "auto", 4))
    assert [c.label for c in settings.cases("dflash")] == ["ar", "dflash", "ddtree@4", "ddtree@auto"]


@pytest.mark.parametrize(
    ("chosen", "labels"),
    [
        ("auto", ["ddtree@auto", "ddtree@4"]),
        ("off", ["ddtree@auto", "ddtree@4"]),
        ("on", ["ddtree@auto", "ddtree@4+device"]),
        ("both", ["ddtree@auto", "ddtree@4", "ddtree@4+device"]),
    ],
)
def test_fixed_budgets_have_rounds_on_the_device(chosen: str, labels: list[str]) -> None:
    settings = BenchSettings("engine", budgets=("auto", 4), device_rounds=chosen)
    assert [c.label for c in settings.cases("dflash")][2:] == labels


def test_the_default_is_what_the_drafter_is_for() -> None:
    settings = BenchSettings("engine", budgets=(4,))
    assert [c.label for c in settings.cases("dflash")] == ["ar", "dflash", "ddtree@4"]
    assert [c.label for c in settings.cases("autoregressive")] == ["ar", "draft-model"]


def test_an_engine_without_a_block_drafter_has_one_baseline() -> None:
    settings = BenchSettings("engine", methods=("draft-model",))
    assert [c.label for c in settings.cases("autoregressive")] == ["ar", "draft-model"]


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.integers(1, n), st.just(n))))
def test_shards_are_read_as_they_are_written(numbers: tuple[int, int]) -> None:
    shard = Shard(*numbers)
    assert Shard.parse(str(shard)) == shard


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "1/0", "a/b", "1/2/3", "-1/2"])
def test_a_shard_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="i from 1 to n"):
        Shard.parse(text)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"budgets": (0,)}, "draws no tree"),
        ({"budgets": ()}, "at least one budget"),
        ({"temperatures": ()}, "at least one temperature"),
        ({"max_tokens": 1}, "max_tokens must be from 2 to"),
        ({"repeats": 0}, "repeats must be from 1 to"),
        ({"limit": 0}, "limit must be from 1 to"),
        ({"forced_acceptance": 0}, "forced_acceptance must be from 1 to"),
        ({"forced_acceptance": 4, "temperatures": (0.0, 1.0)}, "use temperature 0"),
        ({"forced_acceptance": 4, "peers": ("hf",)}, "cannot be forced in peer hf"),
        ({"backend": "torch"}, "torch can be chosen for random weights"),
        ({"backend": "tensorrt", "random_weights": True}, "backend must be one of onnxruntime, torch"),
        ({"backend": "torch", "random_weights": True, "peers": ("hf",)}, "hf cannot load random weights"),
        ({"precision": "int8"}, "int8 is for random weights"),
        ({"backend": "torch", "random_weights": True, "exact": True}, "exact can be chosen for .* onnxruntime"),
        ({"precision": "int9", "random_weights": True}, "precision must be one of auto, fp32, fp16, bf16, int8"),
        ({"device_rounds": "both", "budgets": ("auto",)}, "is for method ddtree with a number as its budget"),
        ({"device_rounds": "on", "methods": ("dflash",)}, "is for method ddtree with a number as its budget"),
        ({"device_rounds": "some"}, "device_rounds must be one of auto, on, off, both"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        BenchSettings("engine", **wrong)  # type: ignore[arg-type]


def test_forced_acceptance_is_allowed_in_the_published_code() -> None:
    settings = BenchSettings("engine", forced_acceptance=4, peers=("ddtree-reference=somewhere",))
    assert settings.forced_acceptance == 4
