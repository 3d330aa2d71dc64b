"""The named pairs, and the tokenizer that belongs to a target."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import edit_json, make_target, make_tokenizer

from ddtree_trt.build.checkpoint.reader import load_checkpoint
from ddtree_trt.build.checkpoint.tokenizer import find_tokenizer, open_tokenizer
from ddtree_trt.build.pair import check_pair
from ddtree_trt.build.presets import PRESETS, find_preset
from ddtree_trt.build.sources import PackagedSource
from ddtree_trt.errors import CheckpointError, UsageError

HYBRIDS = ("3.5-4b", "3.5-9b", "3.5-27b", "3.5-35b-a3b", "3.6-27b", "3.6-35b-a3b", "3-coder-next", "3.8-27b")
# Pairs without published acceptance.
UNMEASURED = ("llama-3.1-8b", "smollm2-135m", "qwen3-coder-30b-a3b", *(f"qwen{name}" for name in HYBRIDS))

BY_METHOD = {"tiny-eagle3": {"eagle"}}  # where they are not those of a block drafter

# Tokenizers


def test_tokenizer_beside_the_checkpoint(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", tokenizer=False)
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        find_tokenizer(target)
    make_tokenizer(tmp_path / "tokenizer", 96)
    assert find_tokenizer(target) == tmp_path / "tokenizer"
    make_tokenizer(target, 96)
    assert find_tokenizer(target) == target


def test_tokenizers_that_cannot_be_used(tmp_path: Path) -> None:
    def refused(message: str) -> None:
        with pytest.raises(CheckpointError, match=message) as caught:
            open_tokenizer(find_tokenizer(tmp_path), tmp_path, 96)
        assert str(caught.value).isprintable()

    make_tokenizer(tmp_path, 97)
    refused("has token 96, the target's vocab_size is 96; fetch the tokenizer again, that of the target")
    make_tokenizer(tmp_path, 96)
    edit_json(tmp_path / "tokenizer_config.json", extra_special_tokens=["<new>"])  # it gets the next id
    refused("has token 96")
    for changes in ({"model": None}, {"added_tokens": 5}, {"added_tokens": [{"id": "7", "content": "x"}]}):
        make_tokenizer(tmp_path, 96)
        edit_json(tmp_path / "tokenizer.json", **changes)
        refused("no usable tokenizer")
    for text, message in (
        ("[]", r"tokenizer.json: it is not a JSON object but \[\]"),
        ("{", "tokenizer.json: it is not valid JSON: EOF while parsing an object at line 1 column 1"),
        (
            '{"added_tokens": ' + "[" * 99_999,
            "tokenizer.json: it is not valid JSON: recursion limit exceeded at line 1",
        ),
        ('{"x": Infinity}', "tokenizer.json: it is not valid JSON: expected value at line 1 column 7"),
    ):
        (tmp_path / "tokenizer.json").write_text(text)
        refused(f"{message}.*; fetch the tokenizer again, that of the target")
    make_tokenizer(tmp_path, 96)
    (tmp_path / "tokenizer_config.json").unlink()
    refused("has no tokenizer_config.json")


# Presets


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_complete(name: str) -> None:
    preset = find_preset(name)
    assert preset.name == name
    assert set(preset.golden_tau) == (set() if name in UNMEASURED else BY_METHOD.get(name, {"dflash", "ddtree"}))
    assert all(1 <= low < high for low, high in preset.golden_tau.values())
    # Drafters for Qwen3 were trained without thinking; other templates have no such switch.
    assert preset.chat_template_args == ({"enable_thinking": False} if name in ("qwen3-4b", "qwen3-8b") else {})


def test_packaged_presets_load_and_fit() -> None:
    for preset in PRESETS.values():
        if isinstance(preset.target, PackagedSource) and isinstance(preset.drafter, PackagedSource):
            target, drafter = load_checkpoint(preset.target.directory), load_checkpoint(preset.drafter.directory)
            check_pair(target, drafter)
            open_tokenizer(find_tokenizer(preset.target.directory), preset.target.directory, target.dims.vocab_size)
            assert target.stop_token_ids


def test_unknown_preset() -> None:
    with pytest.raises(UsageError, match=r"known are tiny, .*--checkpoint PATH and --drafter PATH"):
        find_preset("qwen4")
