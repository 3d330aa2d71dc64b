"""The export for TensorRT-LLM: names are those of a release, and say the engine's pair."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from checkpoints import make_pair
from command_line import Cli

import ddtree_trt
from ddtree_trt.artifact.manifest import CheckpointIdentity, load_manifest
from ddtree_trt.errors import UsageError
from ddtree_trt.trtllm_export import RELEASE, export_pair

NAMES = json.loads((Path(__file__).parents[1] / "fixtures" / "peers" / "trtllm.json").read_text())
COMMIT = "b968826d9c46dd6066d109eabc6255188de91218"


@pytest.fixture
def changed(tiny_engine: Path, tmp_path: Path) -> Callable[..., Path]:
    """An engine directory that has only a manifest: the tiny engine's with other values."""

    def change(**values: Any) -> Path:
        directory = tmp_path / "changed"
        directory.mkdir(exist_ok=True)
        (directory / "manifest.json").write_text(replace(load_manifest(tiny_engine), **values).to_json())
        return directory

    return change


def packaged_target(engine: Path) -> Path:
    return Path(ddtree_trt.__file__).parent / "assets" / load_manifest(engine).target.name


def test_the_command_prints_names_of_the_release(tiny_engine: Path, cli: Cli) -> None:
    code, out, err = cli("export-trtllm", tiny_engine)
    assert (code, err) == (0, "")
    written = yaml.safe_load(out)
    assert [*written][-1] == "speculative_config", "the last, as the file says"
    speculative = written["speculative_config"]
    assert NAMES["release"] == RELEASE
    assert set(written) <= set(NAMES["options"]) and set(speculative) <= set(NAMES["speculative"])
    assert speculative["decoding_type"] in NAMES["values"]["decoding_type"]
    assert written["dtype"] == "auto", "an engine of 32 bits is served as its checkpoint is stored"
    assert f"trtllm-serve {packaged_target(tiny_engine)} --config THIS_FILE" in out


def test_a_pair_of_the_hub_is_named_by_its_commits(changed: Callable[..., Path]) -> None:
    identity = CheckpointIdentity("Qwen/Qwen3-8B", COMMIT, "0" * 64)
    engine = changed(
        target=identity,
        drafter=replace(identity, name="z-lab/d"),
        chat_template_args={"enable_thinking": False},
        backend="torch",
        precision="bf16",
    )
    text = export_pair(engine)
    assert yaml.safe_load(text) == {
        "revision": COMMIT,
        "dtype": "bfloat16",
        "max_seq_len": 2048,
        "max_batch_size": load_manifest(engine).limits.max_batch,
        "speculative_config": {"decoding_type": "DFlash", "max_draft_len": 15, "speculative_model": "z-lab/d"},
    }
    assert f"hf download z-lab/d --revision {COMMIT}" in text
    assert '"chat_template_kwargs": {"enable_thinking": false}' in text


def test_a_local_checkpoint_must_be_given_and_be_the_same(
    changed: Callable[..., Path], tiny_engine: Path, tmp_path: Path
) -> None:
    engine = changed(target=replace(load_manifest(tiny_engine).target, name="mine", revision="local"))
    with pytest.raises(UsageError, match=r"built from a local directory called 'mine'.*give it as --checkpoint DIR"):
        export_pair(engine)
    other, _ = make_pair(tmp_path)
    with pytest.raises(UsageError, match="is not what the engine was built from"):
        export_pair(engine, checkpoint=str(other))
    target = packaged_target(tiny_engine)
    assert f"trtllm-serve {target} " in export_pair(engine, checkpoint=str(target))


def test_what_it_cannot_run_is_refused(changed: Callable[..., Path], tiny_engine: Path) -> None:
    manifest = load_manifest(tiny_engine)
    markov = replace(manifest.drafting.dims, markov_rank=8)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"target": replace(manifest.target, name="llm/model.Q8_0.gguf")}, r"model\.Q8_0\.gguf is a GGUF file"),
        (
            {"drafter_kind": "autoregressive", "drafter_dims": manifest.target_dims},
            "has an autoregressive drafter; exports are for DFlash drafters",
        ),
        ({"drafter_dims": markov}, r"has markov_rank, which DFlash of TensorRT-LLM 1\.4\.0rc1 is not known to compute"),
    ]
    for values, message in cases:
        with pytest.raises(UsageError, match=message):
            export_pair(changed(**values))
