"""Arguments of a chat template: read from the command line, and checked against the variables the template reads.

A build takes them for all chats, a request for its own. Templates are parsed here and never run.
"""

import inspect
import re
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from ddtree_trt.errors import UsageError
from ddtree_trt.reading import Source, parse_json, shown

OPTION = "--chat-template-arg"  # of `build` and `run`
KEYWORD = "chat_template_kwargs"  # of requests
MAX_TEMPLATE = 256 << 10  # characters; real ones have some thousands
THINKING = "enable_thinking"  # of Qwen3's template
# A tag that transformers adds to Jinja, around what an assistant said; it has no effect on a prompt.
_GENERATION = re.compile(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}")
# Names that Jinja binds inside a template, and functions that transformers passes to every template.
_PROVIDED = frozenset("loop caller varargs kwargs self super raise_exception strftime_now".split())


def parse_arguments(given: Sequence[str]) -> dict[str, Any]:
    """`NAME=VALUE` texts, the values JSON. Raises UsageError for anything else and for a name that is given twice."""
    arguments: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"{OPTION} takes NAME=VALUE, as in {THINKING}=false; found {shown(text)}")
        if name in arguments:
            raise UsageError(f"{OPTION} {name} is given twice; give it once")
        advice = f"a text is quoted, as in {OPTION} '{name}=\"text\"'"
        arguments[name] = parse_json(value, Source(f"{OPTION} {name}", UsageError, advice))
    return arguments


def check_arguments(tokenizer: Any, known: set[str] | None, arguments: Mapping[str, Any], given_as: str) -> None:
    """Raises UsageError for an argument that is not among the `known` variables of the tokenizer's chat template, or
    that every request sets itself. None for `known`: there is no template. `given_as` is for messages: `OPTION` or
    `KEYWORD`."""
    # What every request passes to the template, and the parameters of transformers' function for it.
    own = {"messages", *tokenizer.special_tokens_map, *inspect.signature(tokenizer.apply_chat_template).parameters}
    for name in arguments:
        spelled = name if isinstance(name, str) and name.isidentifier() and len(name) <= 100 else shown(name)
        if name in own:
            raise UsageError(f"{given_as} {spelled} is set by every request itself; leave it out")
        if known is None:
            raise UsageError(f"{given_as} {spelled}: the target's tokenizer has no chat template; leave it out")
        if name not in known:
            problem = "the target's chat template has no such variable"
            raise UsageError(f"{given_as} {spelled}: {problem}; it has {', '.join(sorted(known - own)) or 'none'}")


def thinking_note(known: set[str] | None, arguments: Mapping[str, Any]) -> str | None:
    """A note for users of DFlash drafters where the template has a thinking mode and nobody chose; None elsewhere."""
    if THINKING in arguments or THINKING not in (known or ()):
        return None
    return (
        "note: chats run in the template's own mode, which is thinking in Qwen3's; published DFlash drafters are "
        f"trained without: {OPTION} {THINKING}=false"
    )


def template_variables(tokenizer: Any, source: Source) -> set[str] | None:
    """The variables that a caller can give the tokenizer's chat template; None where it has none. Raises the error of
    `source`, where the tokenizer came from, if the template is no Jinja template, or is too long."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if not template:
        return None
    if isinstance(template, str) and len(template) > MAX_TEMPLATE:
        raise source.fault(f"the chat template has {len(template)} characters, at most {MAX_TEMPLATE} are supported")
    try:
        if not isinstance(template, str):
            raise TypeError(f"it is {shown(template)}")
        return _free_names(_GENERATION.sub("", template))
    except Exception as error:  # a syntax error, nesting without end, or another extension's tag
        raise source.fault(f"the chat template cannot be parsed ({' '.join(str(error).split())[:200]})") from error


def check_template(template: str, given_as: str) -> None:
    """Raises UsageError, which calls it `given_as`, for a text that is no chat template."""
    source = Source(given_as, UsageError, "give a Jinja template of messages")
    if "messages" not in (template_variables(SimpleNamespace(chat_template=template), source) or ()):
        raise source.fault("the chat template reads no messages")


def _free_names(template: str) -> set[str]:
    """The names that a template reads and neither sets itself nor has from Jinja or transformers. (What `jinja2.meta`
    has for this computes constants, however large.)"""
    from jinja2 import Environment, nodes

    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    tree = environment.parse(template)
    names = list(tree.find_all(nodes.Name))
    stored = {name.name for name in names if name.ctx != "load"} | {macro.name for macro in tree.find_all(nodes.Macro)}
    # Stored too, but asked for first: `x is defined`, `x | default(…)`.
    asked: list[Any] = [test.node for test in tree.find_all(nodes.Test) if test.name in ("defined", "undefined")]
    asked += [call.node for call in tree.find_all(nodes.Filter) if call.name in ("default", "d")]
    optional = {node.name for node in asked if isinstance(node, nodes.Name)}
    read = {name.name for name in names if name.ctx == "load" and name.name not in stored}
    return (read | optional) - _PROVIDED - environment.globals.keys()
