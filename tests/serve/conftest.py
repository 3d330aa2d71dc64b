"""One server, one with other options, and one reference engine for all tests that ask for nothing of their own."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from serving import ThreadServer, thread_server

TOOLS = Path(__file__).resolve().parents[2] / "examples" / "tools.jinja"


@pytest.fixture(scope="session")
def server(tiny_engine: Path) -> Iterator[ThreadServer]:
    with thread_server(tiny_engine, playground=True) as server:
        yield server


@pytest.fixture(scope="session")
def guarded(tiny_engine: Path) -> Iterator[ThreadServer]:
    """With a key, small limits, a template that takes tools, and pages that may call."""
    with thread_server(
        tiny_engine,
        api_key="correct horse",
        playground=True,
        chat_template=TOOLS.read_text(),
        max_body_bytes=200_000,
        max_waiting=4,
        default_max_tokens=6,
        allowed_origins="https://app.example, http://localhost:3000",
    ) as server:
        yield server


@pytest.fixture(scope="session")
def client(server: ThreadServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
