"""Chat templates that are programs: what they compute, and that those without an end or a measure are stopped."""

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_pair
from engine_builds import PACKAGED
from pacing import WAIT_S

import ddtree_trt
from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.cli import app
from ddtree_trt.errors import EngineError, UsageError
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.text import chat_template
from ddtree_trt.runtime.text.chat_template import LIMITS, MAX_CHARACTERS, Renderer
from ddtree_trt.runtime.text.codec import TextCodec
from ddtree_trt.worker_process import Limits

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "größe?\n{{ 5 }} 😀"}]
PLAIN = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
TOKENIZER = TextCodec(PACKAGED / "tokenizer", {}).tokenizer


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    renderer = Renderer(Limits(cpu_seconds=WAIT_S, memory_bytes=64 << 20))
    yield renderer
    renderer.close()


@pytest.fixture(scope="module")
def hasty() -> Iterator[Renderer]:
    renderer = Renderer(Limits(cpu_seconds=0.5, memory_bytes=256 << 20))
    yield renderer
    renderer.close()


def test_it_renders_what_transformers_does(renderer: Renderer) -> None:
    templates = [
        PLAIN,
        "{%- for m in messages -%}\n  {{ m | tojson }}\n{%- endfor %}{% if add_generation_prompt %}<bot>{% endif %}",
        "{% for m in messages %}{% if loop.last %}{% continue %}{% endif %}{{ m['content'] }}{% endfor %}{{ style }}",
    ]
    for template in templates:
        expected = TOKENIZER.apply_chat_template(
            MESSAGES, chat_template=template, tokenize=False, add_generation_prompt=True, bos_token="<s>", style=3
        )
        assert renderer.render(template, MESSAGES, {"bos_token": "<s>", "style": 3}) == expected


NESTED = "{% for a in range(99999) %}" * 3 + "x" + "{% endfor %}" * 3
DOUBLED = "{% set ns = namespace(x='ab') %}{% for a in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}"
BOUNDED = [
    (DOUBLED, "more than the 64 MiB allowed"),
    ("{{ 'x' * 10 ** 10 }}", "more than the 64 MiB allowed"),
    ("{{ 'x' * 5242880 }}", "5242880 characters, more than the 4194304 allowed"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ("{% for %}", "Expected"),
    ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ("{{ messages.__class__.__mro__ }}", "unsafe"),
]


def test_the_documents_say_the_limits_of_a_template() -> None:
    limits = f"{LIMITS.cpu_seconds:g} s, {LIMITS.memory_bytes >> 20} MiB and {MAX_CHARACTERS >> 20} Mi characters"
    assert limits in (Path(__file__).parents[2] / "docs" / "serving.md").read_text()


@pytest.mark.timeout(300)
def test_a_template_without_an_end_is_stopped(hasty: Renderer) -> None:
    with pytest.raises(UsageError, match=r"takes more than 0\.5 s of a processor .* was stopped; shorten"):
        hasty.render("{{ 9 ** (9 ** 9) }}", MESSAGES, {})
    assert hasty._process is None, "it does not go on"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("template", "text"), BOUNDED, ids=lambda v: v[:40])
def test_a_template_s_error_is_one_line(renderer: Renderer, template: str, text: str) -> None:
    with pytest.raises(UsageError, match=text) as caught:
        renderer.render(template, MESSAGES, {})
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)
    assert renderer.render(PLAIN, MESSAGES[:1], {"bos_token": ""}) == "<system>Be brief.\n", "the next one renders"


def test_an_interrupted_rendering_leaves_no_answer_behind(renderer: Renderer) -> None:
    renderer.wait()
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        renderer.render(NESTED, MESSAGES, {})
    assert renderer.render("b", MESSAGES, {}) == "b"


def test_long_messages_pass_through_the_pipe(renderer: Renderer) -> None:
    chat = [{"role": "user", "content": "ß" * 90_000}, {"role": "user", "content": "x" * 2_000_000}]
    assert renderer.render("{{ messages[0].content }}", chat, {}) == "ß" * 90_000


def test_what_json_cannot_hold_is_refused(renderer: Renderer) -> None:
    with pytest.raises(UsageError, match="chat messages and template variables must hold what JSON can"):
        renderer.render(PLAIN, [{"role": "user", "content": "x", "extra": b"x"}], {})


def test_it_runs_nothing_of_the_directory_it_is_started_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("json.py", "jinja2.py", "sitecustomize.py", "transformers.py"):
        (tmp_path / name).write_text("import os; os._exit(3)")
    packages = str(Path(ddtree_trt.__file__).parent.parent)  # found by a hook, perhaps, and not on the path
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *(p for p in sys.path if p != packages)])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    renderer = Renderer()
    assert renderer.render("a", MESSAGES, {}) == "a"
    renderer.close()


def test_a_process_that_cannot_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = Renderer()
    renderer._work = "ddtree_trt.no_such_module:rendering"
    with pytest.raises(EngineError, match="rendered: ModuleNotFoundError: No module named"):
        renderer.render("a", MESSAGES, {})
    monkeypatch.setattr("sys.executable", "/nonexistent/python")
    with pytest.raises(EngineError, match="/nonexistent/python does not start"):
        Renderer().render("a", MESSAGES, {})


def test_a_process_that_ends_is_not_the_messages_fault(renderer: Renderer) -> None:
    renderer.wait()
    assert renderer._process is not None
    threading.Timer(0.1, renderer._process.kill).start()
    with pytest.raises(EngineError, match="rendered: their process ended with code -9; try again"):
        renderer.render(NESTED, MESSAGES, {})
    assert renderer.render("b", MESSAGES, {}) == "b"
    renderer._process.kill()  # between two renderings
    renderer._process.wait()
    assert renderer.render("c", MESSAGES, {}) == "c"


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_process_has_its_own() -> None:
    assert chat_template.render("a", MESSAGES, {}) == "a"
    process = chat_template._shared._process
    child = os.fork()
    if child == 0:
        forgot = chat_template._shared._process is None
        own = chat_template.render("b", MESSAGES, {}) == "b"
        chat_template._shared.close()
        os._exit(0 if forgot and own else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert chat_template._shared._process is process
    assert chat_template.render("c", MESSAGES, {}) == "c"


def test_an_engine_chat_is_rendered_there(tiny_engine: Path, hasty: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = TextCodec(tiny_engine, {})
    expected = codec.tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert codec.render(MESSAGES) == expected
    assert codec.encode(MESSAGES) == codec.encode(expected)
    monkeypatch.setattr(chat_template, "render", hasty.render)
    codec.tokenizer.chat_template = NESTED
    with pytest.raises(UsageError, match=r"takes more than 0.5 s of a processor for these messages"):
        codec.encode(MESSAGES)


# Variables of one request: through every door, over what the engine was built with


# In the words of the tests' tokenizer. The engine is built with enable_thinking false.
TEMPLATE = """{% for message in messages %}{{ message.content }} {% endfor %}
{%- if add_generation_prompt %}t7
{%- if enable_thinking is defined and enable_thinking is false %} t8 t9{% endif %}
{%- for word in words or [] %} {{ word }}{% endfor %}{% endif %}"""
CHAT: list[dict[str, str]] = [{"role": "user", "content": "t5"}]
PARAMS = SamplingParams(max_tokens=4)
CASES: list[tuple[dict[str, Any] | None, list[int]]] = [
    (None, [5, 7, 8, 9]),
    ({"enable_thinking": True}, [5, 7]),
    ({"enable_thinking": None, "words": ["t3", "t4"]}, [5, 7, 3, 4]),
]
WRONG: list[tuple[Any, str]] = [
    ({"thinking": False}, "chat_template_kwargs thinking: the target's chat template has no such variable; it has"),
    ({"messages": []}, "chat_template_kwargs messages is set by every request itself; leave it out"),
    ({"a b\n": 1}, r"chat_template_kwargs 'a b\n': the target's chat template has no such variable"),
    (["enable_thinking"], "must be an object of names and values"),
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chats")
    target, drafter = make_pair(path)
    (target / "chat_template.jinja").write_text(TEMPLATE)
    given: Any = {"checkpoint": target, "drafter": drafter, "chat_template_args": {"enable_thinking": False}}
    compile_engine(BuildRequest(target="mine", output=path / "engine", **given))
    return path / "engine"


@pytest.fixture(scope="module")
def llm(engine: Path) -> Iterator[LLM]:
    with LLM(engine) as llm:
        yield llm


@pytest.mark.parametrize(("given", "ids"), CASES)
def test_generate_and_stream(llm: LLM, given: dict[str, Any] | None, ids: list[int]) -> None:
    both = llm.generate([CHAT, CHAT], PARAMS, chat_template_kwargs=given)
    assert [output.prompt_token_ids for output in both] == [ids, ids]
    assert both[0].outputs[0].token_ids == llm.generate([ids], PARAMS)[0].outputs[0].token_ids
    parts = list(llm.stream(CHAT, PARAMS, chat_template_kwargs=given))
    assert {tuple(part.prompt_token_ids) for part in parts} == {tuple(ids)}
    assert llm.generate(CHAT, PARAMS)[0].prompt_token_ids == CASES[0][1]  # the next request's are its own


@pytest.mark.parametrize(("given", "message"), WRONG)
def test_what_the_template_never_looks_at(llm: LLM, given: Any, message: str) -> None:
    for call in (llm.generate, llm.stream):
        with pytest.raises(UsageError) as caught:
            call(CHAT, PARAMS, chat_template_kwargs=given)
        assert message in str(caught.value) and str(caught.value).isprintable()


def test_a_prompt_without_a_template_takes_none(llm: LLM, tiny_engine: Path) -> None:
    with pytest.raises(UsageError, match="are for chat messages, and this prompt is text or token"):
        llm.generate([[5], [7]], PARAMS, chat_template_kwargs={"enable_thinking": True})
    assert llm.generate("t5", PARAMS, chat_template_kwargs={})
    codec = TextCodec(tiny_engine, {})
    codec.tokenizer.chat_template = None
    with pytest.raises(UsageError, match="chat_template_kwargs x: the target's tokenizer has no chat template"):
        codec.encode(CHAT, {"x": 1})


def test_run(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["run", str(engine), "--prompt", "t5", "--max-tokens", "4", "--json"]
    option = ["--chat-template-arg", "enable_thinking=true", "--chat-template-arg", 'words=["t3"]']
    assert not app([*call, *option], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["prompt_token_ids"] == [5, 7, 3]
    assert app([*call, *option, "--raw"], standalone_mode=False) == 2
    assert "--raw does without" in capsys.readouterr().err
