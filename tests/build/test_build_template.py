"""Arguments of a chat template: from the command line into the manifest, and into every prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import edit_json, make_drafter, make_pair, make_target

from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.artifact.rebuild import rebuild_command
from ddtree_trt.artifact.template_arguments import (
    MAX_TEMPLATE,
    parse_arguments,
    template_variables,
)
from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.build.presets import PRESETS
from ddtree_trt.cli import app
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


def test_on_the_command_line(pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = tmp_path / "engine"
    build = [
        "build",
        "--target",
        "mine",
        "--checkpoint",
        *map(str, (pair[0], "--drafter", pair[1], "--output", engine)),
    ]
    argument = ["--chat-template-arg", "enable_thinking=false"]
    assert not app([*build, *argument, "--no-profile"], standalone_mode=False)
    built = capsys.readouterr().out.splitlines()
    assert len(built) == 2 and built[1] == f"next: ddtree-trt run {engine}"
    assert not app(["inspect", str(engine)], standalone_mode=False)
    assert "enable_thinking False" in capsys.readouterr().out
    assert " ".join(argument) in rebuild_command(engine, load_manifest(engine))
    # Without it, one line says which mode a chat runs in.
    assert not app([*build, "--no-profile", "--force"], standalone_mode=False)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and "thinking" in lines[1] and " ".join(argument) in lines[1]
    assert (
        app([*build, "--no-profile", "--force", "--chat-template-arg", "enable_thinkin=false"], standalone_mode=False)
        == 2
    )
    assert "no such variable; it has enable_thinking" in capsys.readouterr().err
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
        (
            ['effort="high"', "n=3", 'x={"a": [1]}', "empty=null"],
            {"effort": "high", "n": 3, "x": {"a": [1]}, "empty": None},
        ),
        ([], {}),
    ],
)
def test_values_are_json(given: list[str], arguments: dict[str, Any]) -> None:
    assert parse_arguments(given) == arguments


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["enable_thinking"], "takes NAME=VALUE, as in enable_thinking=false; found 'enable_thinking'"),
        (["=1"], "takes NAME=VALUE"),
        (["a-b=1"], "takes NAME=VALUE"),
        (["effort=high"], "--chat-template-arg effort: it is not valid JSON"),
        (["enable_thinking=False"], "a text is quoted, as in --chat-template-arg 'enable_thinking=\"text\"'"),
        (["n=NaN"], "it is not valid JSON"),
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
        (TEMPLATE, "tokenize", "is set by every request itself"),
        (TEMPLATE, "messages", "is set by every request itself"),
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


def source(directory: Path) -> Source:
    return Source(str(directory), CheckpointError, "fetch the tokenizer again")


class Tokenizer:
    def __init__(self, template: object) -> None:
        self.chat_template = template


@pytest.mark.parametrize(
    ("template", "variables"),
    [
        ("{% set x = x | default(1) %}{{ x }}{% set y = 2 %}{{ y }}", {"x"}),
        ("{% if not x is defined %}{% set x = 1 %}{% endif %}{{ x }}", {"x"}),
        ("{% macro show(a) %}{{ a }}{{ b }}{% endmacro %}{{ show(c) }}", {"b", "c"}),
        ("{% generation %}{{ a }}{%- endgeneration -%}{% for m in n %}{% break %}{% endfor %}", {"a", "n"}),
        ({"default": "{{ a }}", "tool_use": "{{ b }}"}, {"a"}),
        ("{{ 'x' * 99999 * 99999 * 99999 }}{{ a }}", {"a"}),  # parsed, never computed
        # What Jinja and transformers provide is nobody's to give.
        (
            "{{ range(2) }}{% set n = namespace(x=a) %}{{ raise_exception(b) if strftime_now is defined }}{{ self }}"
            "{% for m in c %}{{ loop.index }}{% endfor %}{% macro f() %}{{ caller() }}{{ varargs }}{{ kwargs }}"
            "{% endmacro %}",
            {"a", "b", "c"},
        ),
        ("", None),
        (None, None),
    ],
)
def test_variables_of_a_template(template: object, variables: set[str] | None, tmp_path: Path) -> None:
    assert template_variables(Tokenizer(template), source(tmp_path)) == variables


@pytest.mark.parametrize(
    "template",
    [
        "{% if %}",
        "{{ " + "(" * 50_000,
        "{{ " + "1+" * 20_000 + "1 }}",
        "{% unknown %}",
        ["a list"],
        {"default": 5},
    ],
    ids=["syntax", "parentheses", "sum", "tag", "list", "number"],
)
def test_templates_that_are_none(template: object, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the chat template cannot be parsed") as caught:
        template_variables(Tokenizer(template), source(tmp_path))
    assert len(str(caught.value)) < 600


def test_a_template_without_end_is_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert template_variables(Tokenizer("{{ x }}".ljust(MAX_TEMPLATE)), source(tmp_path)) == {"x"}
    monkeypatch.setattr("jinja2.Environment.parse", None)
    with pytest.raises(CheckpointError, match="has 262145 characters, at most 262144 are supported; fetch the token"):
        template_variables(Tokenizer("{{ x }}".ljust(MAX_TEMPLATE + 1)), source(tmp_path))


def test_a_preset_keeps_its_arguments_where_none_replaces_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With directories of one's own, too: their template need not know the preset's argument."""
    target, drafter = make_target(tmp_path / "t"), make_drafter(tmp_path / "d")
    (target / "chat_template.jinja").write_text(TEMPLATE)
    for given, stored in (({}, {"enable_thinking": False}), ({"enable_thinking": True}, {"enable_thinking": True})):
        asked = BuildRequest(
            target="qwen3-8b",
            checkpoint=target,
            drafter=drafter,
            output=tmp_path / "e",
            force=True,
            chat_template_args=given,
        )
        manifest = compile_engine(asked)
        assert manifest.chat_template_args == stored
        preset = PRESETS["qwen3-8b"]
        assert (manifest.golden_tau, manifest.limits.max_batch) == (preset.golden_tau, preset.limits.max_batch)
    (target / "chat_template.jinja").unlink()
    assert compile_engine(BuildRequest(**{**vars(asked), "chat_template_args": {}})).chat_template_args


# The tokenizer is loaded before anything is written


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"type": "abacus", "vocab": {}}}, "no usable tokenizer"),
        ({"pre_tokenizer": {"type": "x"}}, "no usable tokenizer"),
    ],
)
def test_tokenizers_that_do_not_load(
    pair: tuple[Path, Path], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    edit_json(pair[0] / "tokenizer.json", **changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        compile_engine(request(pair, tmp_path / "engine"))
    assert str(caught.value).isprintable()
    assert not (tmp_path / "engine").exists()
