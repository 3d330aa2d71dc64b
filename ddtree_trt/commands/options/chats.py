"""Options of the commands that answer chats."""

from __future__ import annotations

from typing import Annotated

import typer

from ddtree_trt.runtime.chat.parsers import REASONING_PARSERS, TOOL_PARSERS

ToolParser = Annotated[
    str,
    typer.Option(
        metavar="NAME", help=f"How the model calls tools: auto, by its template; none; {', '.join(TOOL_PARSERS)}."
    ),
]
ReasoningParser = Annotated[
    str,
    typer.Option(
        metavar="NAME", help=f"How it writes its reasoning: auto; none, as content; {', '.join(REASONING_PARSERS)}."
    ),
]
