"""Names of the parsers of calls and of reasoning, which are vLLM's, and which calls a chat template asks for."""

import re
from typing import Literal

ToolParser = Literal["auto", "none", "hermes", "qwen3_coder", "llama3_json"]
ReasoningParser = Literal["auto", "none", "qwen3", "deepseek_r1"]

# Templates may end one of their texts behind the tag and begin another, in which quotes are escaped or not.
_JSON_IN_TAGS = re.compile(r"<tool_call>(?:\\+n|[\s\"'{}-])*\{\s*\\*[\"'](?:name|arguments)")
_PARAMETERS = re.compile(r"\\*[\"']parameters\\*[\"']\s*:")


def tool_parser_of(template: str) -> ToolParser:
    """The parser of calls as a chat template writes them; `none` where none is known."""
    if "<function=" in template:
        return "qwen3_coder" if "<parameter=" in template and "<tool_call>" in template else "none"
    if _JSON_IN_TAGS.search(template):
        return "hermes"
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and _PARAMETERS.search(template)):
        return "llama3_json"
    return "none"
