"""The examples that engines ship: listed, answered, and the measure of a prompt that the model does not know."""

import json
import shutil
from pathlib import Path

import pytest
from command_line import Cli
from engine_files import vouch

from ddtree_trt import LLM, SamplingParams
from ddtree_trt.artifact.examples import Examples, read_examples, required_examples
from ddtree_trt.artifact.files import EXAMPLES
from ddtree_trt.errors import ArtifactError

LEAST_PER_ROUND = 3.0
UNKNOWN = "What is the capital of France?"


@pytest.fixture(scope="module")
def examples(tiny_engine: Path) -> Examples:
    return required_examples(tiny_engine)


@pytest.fixture
def bare_engine(tiny_engine: Path, tmp_path: Path) -> Path:
    """The tiny pair as a version built it that shipped no examples."""
    engine = tmp_path / "bare"
    shutil.copytree(tiny_engine, engine)
    (engine / EXAMPLES).unlink()
    vouch(engine)
    return engine


def test_every_example_is_answered_well(tiny_engine: Path, examples: Examples) -> None:
    chats = [[{"role": "user", "content": prompt}] for prompt in examples.prompts]
    with LLM(tiny_engine) as llm:
        for output in llm.generate(chats, SamplingParams(max_tokens=512, tree_budget=32)):
            assert output.outputs[0].finish_reason == "stop"
            assert output.metrics.mean_acceptance_length >= LEAST_PER_ROUND, output.outputs[0].text


def test_they_are_listed_and_answered(cli: Cli, tiny_engine: Path, examples: Examples) -> None:
    code, listed, err = cli("run", tiny_engine, "--list-examples")
    assert (code, err) == (0, "")
    for number, prompt in enumerate(examples.prompts, 1):
        assert f"{number}  {prompt}".replace("\n", "\n   ") in listed
    first = cli("run", tiny_engine, "--example", "1")
    assert first[1].splitlines()[-2] == "Answer: 91" and first[2] == f"> {examples.prompts[0]}\n"
    for arguments in (("--example", "2"), ("--example=2", "--max-tokens", "64")):
        code, out, err = cli("run", tiny_engine, *arguments)
        assert (code, err) == (0, f"> {examples.prompts[1]}\n") and "Answer: 192" in out
    asked = json.loads(cli("run", "--example", "1", "--json", tiny_engine)[1])
    assert asked["outputs"][0]["text"].endswith("Answer: 91")


def test_an_example_that_is_none(cli: Cli, tiny_engine: Path, bare_engine: Path, tmp_path: Path) -> None:
    code, out, err = cli("run", tiny_engine, "--example", "9")
    assert (code, out) == (2, "") and "--example must be from 1 to 8, not 9" in err
    assert "without --prompt" in cli("run", tiny_engine, "--example", "1", "--prompt", "x")[2]
    for wanted in ("--example=1", "--list-examples"):
        code, out, err = cli("run", bare_engine, wanted)
        assert (code, out) == (2, "") and "ships no examples" in err and err.count("\n") == 1
    assert "no engine at" in cli("run", tmp_path / "nowhere", "--list-examples")[2]
    (bare_engine / "chat_template.jinja").unlink()
    vouch(bare_engine)
    assert "--system needs a chat template" in cli("run", bare_engine, "--prompt", "x", "--system", "Be brief.")[2]


def test_a_damaged_file_is_refused(bare_engine: Path) -> None:
    (bare_engine / EXAMPLES).write_text('{"prompts": "one"}')
    with pytest.raises(ArtifactError, match=r"prompts must be"):
        read_examples(bare_engine)


def test_the_hint_comes_once_and_where_it_belongs(cli: Cli, tiny_engine: Path, bare_engine: Path) -> None:
    asked = ("--prompt", UNKNOWN, "--max-tokens", "4")
    code, _, err = cli("run", tiny_engine, *asked)
    assert code == 0 and err.startswith("hint: this model knows only arithmetic stories") and err.count("\n") == 1
    for quiet in ((tiny_engine, "--json"), (tiny_engine, "--raw"), (bare_engine,)):
        assert cli("run", *quiet, *asked)[::2] == (0, "")
    (bare_engine / EXAMPLES).write_text('{"prompts": ["How do I prepare for a job interview?"], "knows": null}')
    vouch(bare_engine)
    assert cli("run", bare_engine, *asked)[::2] == (0, ""), "a model for any text has none"
