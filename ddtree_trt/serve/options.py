"""Options of the server and of replicas. Imports little: the command line reads them."""

import re
from dataclasses import dataclass, fields
from typing import get_args

from ddtree_trt.artifact.template_arguments import check_template
from ddtree_trt.errors import MAX_COUNT, UsageError, shown
from ddtree_trt.records import check, option
from ddtree_trt.runtime.chat.parsers import ReasoningParser, ToolParser
from ddtree_trt.runtime.options import EngineOptions


@dataclass(frozen=True)
class ServeOptions(EngineOptions):
    """How to serve an engine. Raises UsageError for a value out of range."""

    host: str = option("127.0.0.1", "Where to listen; 0.0.0.0 is everywhere.", "ADDRESS")
    port: int = option(8000, "0 takes any free one and prints it.", within=(0, 65535))
    model_name: str | None = option(
        None, "What clients call the model. Default: the engine's name.", "NAME", flag="--served-model-name"
    )
    api_key: str | None = option(None, "What clients must send as a bearer token.", "KEY", envvar="DDTREE_API_KEY")
    max_requests: int = option(512, "HTTP requests under way; more are answered 429.", within=(1, MAX_COUNT))
    max_waiting: int = option(256, "Sequences waiting for a slot; more are answered 429.", within=(0, MAX_COUNT))
    max_body_bytes: int = option(4 << 20, "Larger requests are answered 413.", within=(1024, 1 << 30))
    request_timeout_s: float = option(600.0, "Longer requests are ended; 0: none is.", "SECONDS", within=(0, 86400))
    stall_timeout_s: float = option(30.0, "Clients that read nothing so long are cut off.", "SECONDS", within=(1, 3600))
    drain_timeout_s: float = option(
        30.0, "After SIGTERM, how long requests under way may still take.", "SECONDS", within=(0, 86400)
    )
    default_max_tokens: int | None = option(
        None, "New tokens of a chat that states no limit. Default: the rest of the context.", within=(1, MAX_COUNT)
    )
    chat_template: str | None = None  # the text of one in place of the engine's own
    tool_parser: ToolParser = option(
        "auto", "How the model calls tools: auto, by its template; none; by name.", "|".join(get_args(ToolParser))
    )
    reasoning_parser: ReasoningParser = option(
        "auto", "How it writes its reasoning: auto; none, as content; by name.", "|".join(get_args(ReasoningParser))
    )
    request_log: bool = option(True, "Log every request that ends: its tokens, times and tokens a round.")
    access_log: bool = option(False, "Log every HTTP exchange.")
    allowed_origins: str = option("", "Pages that may call, comma-separated; * is any. Default: none.", "ORIGINS")
    playground: bool = option(False, "Also serve /playground, a page that draws each round's tree.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for origin in self.origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise UsageError(
                    "allowed_origins must be * or origins such as https://app.example:8443 with commas between, not "
                    f"{shown(origin)}"
                )
        if self.api_key is not None and not (self.api_key and self.api_key.isascii() and self.api_key.isprintable()):
            raise UsageError("the API key must be printable ASCII text that is not empty")
        if self.chat_template is not None:
            check_template(self.chat_template, "chat_template")

    @property
    def origins(self) -> list[str]:
        return [origin.strip() for origin in self.allowed_origins.split(",")] if self.allowed_origins else []


_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/,]+")
# Those that concern the engine and its answers.
ANSWER_OPTIONS = (*(f.name for f in fields(EngineOptions)), "model_name", "tool_parser", "reasoning_parser")


@dataclass(frozen=True)
class ReplicaOptions:
    """How many engines there are, and what each gets. Raises UsageError for a value out of range."""

    replicas: int = option(
        1, "Engines, on the machines of a Ray cluster. Without it: one, in this process.", within=(1, MAX_COUNT)
    )
    max_replicas: int | None = option(None, "Engines at most: more start as requests queue.", within=(1, MAX_COUNT))
    target_ongoing_requests: float | None = option(
        None, "Requests per engine above which more are started. Default: its slots.", "X", within=(0.01, MAX_COUNT)
    )
    cpus_per_replica: float | None = option(
        None, "Default: the cluster's CPUs, divided among the replicas.", "X", within=(0, MAX_COUNT)
    )
    gpus_per_replica: float | None = option(
        None, "Default: what an engine needs: 1, --tensor-parallel-size, or 0.", "X", within=(0, MAX_COUNT)
    )

    def __post_init__(self) -> None:
        check(self)
        if self.most < self.replicas:
            raise UsageError(f"max_replicas {self.most} is below replicas {self.replicas}, how many there are at least")

    @property
    def most(self) -> int:
        return self.replicas if self.max_replicas is None else self.max_replicas
