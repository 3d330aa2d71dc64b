"""One server and one reference engine for all tests that ask for no options of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from serving import ThreadServer, thread_server

from ddtree_trt import LLM


@pytest.fixture(scope="session")
def server(tiny_engine: Path) -> Iterator[ThreadServer]:
    with thread_server(tiny_engine, playground=True) as server:
        yield server


@pytest.fixture(scope="session")
def client(server: ThreadServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def llm(tiny_engine: Path) -> Iterator[LLM]:
    with LLM(tiny_engine) as llm:
        yield llm
