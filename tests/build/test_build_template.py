"""Arguments of a chat template: from the command line into the manifest, and into every prompt."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from build_faults import assert_refused, build_args
from checkpoints import make_drafter, make_pair, make_target
from command_line import Cli

from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.artifact.template_arguments import MAX_TEMPLATE, parse_arguments, template_variables
from ddtree_trt.artifact.verify import rebuild_command
from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.build.presets import PRESETS
from ddtree_trt.errors import CheckpointError, UsageError
from ddtree_trt.reading import Source
from ddtree_trt.runtime.text.codec import TextCodec

# What Qwen3's does with the argument, in the words of the tests' tokenizer.
TEMPLATE = """{% for message in messages %}{{ message.content }} {% endfor %}
{%- if add_generation_prompt %}t7
{%- if enable_thinking is defined and enable_thinking is false %} t8 t9{% endif %}{% endif %}"""


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    target, drafter = make_pair(tmp_path / "pair")
    (target / "chat_template.jinja").write_text(TEMPLATE)
    return target, drafter


def request(pair: tuple[Path, Path], output: Path, **arguments: Any) -> BuildRequest:
    return BuildRequest(
        target="mine", checkpoint=pair[0], drafter=pair[1], output=output, force=True, chat_template_args=arguments
    )


def notes_of(request: BuildRequest) -> list[str]:
    notes: list[str] = []
    compile_engine(request, notice=notes.append)
    assert notes.pop(0).startswith("backend onnxruntime: ")
    return notes


def test_an_argument_reaches_every_prompt(pair: tuple[Path, Path], tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "t5"}]
    encoded = {}
    for name, arguments in (("default", {}), ("off", {"enable_thinking": False}), ("on", {"enable_thinking": True})):
        engine = tmp_path / name
        compile_engine(request(pair, engine, **arguments))
        manifest = load_manifest(engine)
        assert manifest.chat_template_args == arguments
        encoded[name] = TextCodec(engine, manifest.chat_template_args).encode(chat)
    assert encoded == {"default": [5, 7], "off": [5, 7, 8, 9], "on": [5, 7]}


def test_on_the_command_line(pair: tuple[Path, Path], tmp_path: Path, cli: Cli) -> None:
    engine = tmp_path / "engine"
    build, argument = build_args(pair, engine, "--no-profile", "--force"), "--chat-template-arg enable_thinking=false"
    status, out, _ = cli(*build, *argument.split())
    assert status == 0 and out.splitlines()[1:] == [f"next: ddtree-trt run {engine}"]
    assert "enable_thinking False" in cli("inspect", engine)[1]
    assert argument in rebuild_command(engine, load_manifest(engine))
    # Without it, one line says which mode a chat runs in.
    status, _, err = cli(*build)
    assert status == 0 and len(err.splitlines()) == 2 and "thinking" in err and argument in err
    misspelled = cli(*build, "--chat-template-arg", "enable_thinkin=false")
    assert_refused(misspelled, 2, "no such variable; it has enable_thinking")
    assert load_manifest(engine).chat_template_args == {}


def test_no_note_where_it_would_mean_nothing(pair: tuple[Path, Path], tmp_path: Path) -> None:
    assert len(notes_of(request(pair, tmp_path / "e"))) == 1
    assert notes_of(request(pair, tmp_path / "e", enable_thinking=True)) == []
    own = make_target(tmp_path / "small", num_layers=1, tokenizer=False)
    assert notes_of(request((pair[0], own), tmp_path / "e")) == []  # no DFlash drafter
    (pair[0] / "chat_template.jinja").write_text("{{ messages }}")
    assert notes_of(request(pair, tmp_path / "e")) == []


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        (["enable_thinking=false"], {"enable_thinking": False}),
        (['e="high"', "n=3", 'x={"a": [1]}', "y=null"], {"e": "high", "n": 3, "x": {"a": [1]}, "y": None}),
        ([], {}),
    ],
)
def test_values_are_json(given: list[str], arguments: dict[str, Any]) -> None:
    assert parse_arguments(given) == arguments


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["enable_thinking"], "takes NAME=VALUE, as in enable_thinking=false; found 'enable_thinking'"),
        (["effort=high"], "--chat-template-arg effort: it is not valid JSON"),
        (["enable_thinking=False"], "a text is quoted, as in --chat-template-arg 'enable_thinking=\"text\"'"),
        (["n=1", "n=2"], "n is given twice"),
        (["n=" + "[" * 100_000], "recursion limit exceeded"),
    ],
)
def test_what_is_no_argument(given: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_arguments(given)
    assert message in str(caught.value) and str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("template", "name", "message"),
    [
        (TEMPLATE, "thinking", "has no such variable; it has enable_thinking"),
        (TEMPLATE, "message", "has no such variable"),  # the template's own, of a loop
        ("{{ range(3) }}{{ b }}", "range", "has no such variable; it has b$"),
        (TEMPLATE, "add_generation_prompt", "is set by every request itself"),
        (None, "enable_thinking", "has no chat template"),
    ],
)
def test_arguments_that_would_change_nothing(
    pair: tuple[Path, Path], tmp_path: Path, template: str | None, name: str, message: str
) -> None:
    if template is None:
        (pair[0] / "chat_template.jinja").unlink()
    else:
        (pair[0] / "chat_template.jinja").write_text(template)
    with pytest.raises(UsageError, match=message):
        compile_engine(request(pair, tmp_path / "engine", **{name: False}))
    assert not (tmp_path / "engine").exists()


def variables_of(template: object) -> set[str] | None:
    source = Source("tokenizer", CheckpointError, "fetch the tokenizer again")
    return template_variables(SimpleNamespace(chat_template=template), source)


@pytest.mark.parametrize(
    ("template", "variables"),
    [
        ("{% set x = x | default(1) %}{{ x }}{% set y = 2 %}{{ y }}", {"x"}),
        ("{% macro show(a) %}{{ a }}{{ b }}{% endmacro %}{{ show(c) }}", {"b", "c"}),
        ("{% generation %}{{ a }}{%- endgeneration -%}{% for m in n %}{% break %}{% endfor %}", {"a", "n"}),
        ("{{ 'x' * 99999 * 99999 * 99999 }}{{ a }}", {"a"}),  # parsed, never computed
        # What Jinja and transformers provide is nobody's to give.
        ("{{ range(2) }}{% set n = namespace(x=a) %}{{ raise_exception(b) if strftime_now is defined }}", {"a", "b"}),
        ("", None),
        (None, None),
    ],
)
def test_variables_of_a_template(template: object, variables: set[str] | None) -> None:
    assert variables_of(template) == variables


ENDLESS = "{{ " + "(" * 50_000, "{{ " + "1+" * 20_000 + "1 }}"


@pytest.mark.parametrize("template", ["{% if %}", *ENDLESS, "{% unknown %}", ["a list"], {"default": 5}], ids=range(6))
def test_templates_that_are_none(template: object) -> None:
    with pytest.raises(CheckpointError, match="the chat template cannot be parsed") as caught:
        variables_of(template)
    assert len(str(caught.value)) < 600


def test_a_template_without_end_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert variables_of("{{ x }}".ljust(MAX_TEMPLATE)) == {"x"}
    monkeypatch.setattr("jinja2.Environment.parse", None)
    with pytest.raises(CheckpointError, match="has 262145 characters, at most 262144 are supported; fetch the token"):
        variables_of("{{ x }}".ljust(MAX_TEMPLATE + 1))


def test_a_preset_keeps_its_arguments_where_none_replaces_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With directories of one's own, too: their template need not know the preset's argument."""
    target, drafter = make_target(tmp_path / "t"), make_drafter(tmp_path / "d")
    (target / "chat_template.jinja").write_text(TEMPLATE)
    for given, stored in (({}, {"enable_thinking": False}), ({"enable_thinking": True}, {"enable_thinking": True})):
        asked = replace(request((target, drafter), tmp_path / "e", **given), target="qwen3-8b")
        manifest = compile_engine(asked)
        assert manifest.chat_template_args == stored
        preset = PRESETS["qwen3-8b"]
        assert (manifest.golden_tau, manifest.limits.max_batch) == (preset.golden_tau, preset.limits.max_batch)
    (target / "chat_template.jinja").unlink()
    assert compile_engine(replace(asked, chat_template_args={})).chat_template_args
