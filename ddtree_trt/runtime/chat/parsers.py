"""Names of the parsers of calls and of reasoning, which are vLLM's, and which of them a chat template asks for."""

import re
from collections.abc import Sequence

from ddtree_trt.errors import UsageError, shown

AUTO, NONE = "auto", "none"
HERMES, QWEN3_CODER, LLAMA3_JSON = "hermes", "qwen3_coder", "llama3_json"
TOOL_PARSERS = (HERMES, QWEN3_CODER, LLAMA3_JSON)
QWEN3, DEEPSEEK_R1 = "qwen3", "deepseek_r1"
REASONING_PARSERS = (QWEN3, DEEPSEEK_R1)

# Templates may end one of their texts behind the tag and begin another, in which quotes are escaped or not.
_JSON_IN_TAGS = re.compile(r"<tool_call>(?:\\+n|[\s\"'{}-])*\{\s*\\*[\"'](?:name|arguments)")
_PARAMETERS = re.compile(r"\\*[\"']parameters\\*[\"']\s*:")


def check_parser(option: str, name: str, known: Sequence[str]) -> None:
    """Raises UsageError, which names the option, for anything but `auto`, `none` and the known names."""
    if name not in (AUTO, NONE, *known):
        raise UsageError(f"{option} must be one of {', '.join((AUTO, NONE, *known))}, not {shown(name)}")


def tool_parser(name: str, template: str) -> str | None:
    """The parser of calls of that name, `auto` being the one for calls as the chat template writes them; None for
    `none`, and where none is known."""
    if name != AUTO:
        return None if name == NONE else name
    if "<function=" in template:
        return QWEN3_CODER if "<parameter=" in template and "<tool_call>" in template else None
    if _JSON_IN_TAGS.search(template):
        return HERMES
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and _PARAMETERS.search(template)):
        return LLAMA3_JSON
    return None


def reasoning_parser(name: str, template: str) -> str | None:
    """The parser of reasoning of that name, as `tool_parser` finds it."""
    if name != AUTO:
        return None if name == NONE else name
    return QWEN3 if "</think>" in template else None
