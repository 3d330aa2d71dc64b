"""What a client gets is what `LLM.generate` gives, over every transport and layout."""

import json
import re
import runpy
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from triton_clients import ask, eventually, generate, generate_stream, idle, metric, text, values

from ddtree_trt import LLM, SamplingParams
from tools.triton_server import TritonServer

ROOT = Path(__file__).resolve().parents[3]
DEPLOYMENT = ROOT / "docs" / "deployment.md"
GREEDY = {"max_tokens": 48}
SAMPLED = {"max_tokens": 32, "temperature": 0.8, "top_p": 0.9, "seed": 7}
POLL_S = 0.01


def expected(llm: LLM, prompt: str, **sampling: object) -> str:
    return llm.generate(prompt, SamplingParams.from_mapping(sampling))[0].outputs[0].text


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_text_equals_generate(
    server: TritonServer, llm: LLM, prompts: list[str], model: str, sampling: dict[str, Any]
) -> None:
    """Whole and streamed; acceptance figures come with the last response."""
    for prompt in prompts:
        truth = expected(llm, prompt, **sampling)
        whole, parts = (values(model, prompt, stream=stream, **sampling) for stream in (False, True))
        status, answer = generate(server, model, whole)
        assert (status, answer["text_output"]) == (200, truth)
        assert text(ask(server, model, whole)) == text(generate_stream(server, model, parts)) == truth
        *before, last = ask(server, model, parts)
        assert text([*before, last]) == truth and not any("acceptance_rate" in response for response in before)
        assert last["acceptance_rate"].shape == last["total_draft_tokens"].shape == (1,) * (1 + ("vllm" not in model))


def test_streams_while_metrics_are_scraped(server: TritonServer, llm: LLM, prompts: list[str], model: str) -> None:
    sampling = {"max_tokens": 96, "ignore_eos": True}
    jobs = [prompts[i % len(prompts)] for i in range(16)]
    truth = {prompt: expected(llm, prompt, **sampling) for prompt in set(jobs)}
    before = metric(server, "vllm:generation_tokens_total", model)
    names = ("time_to_first_token", "request_time_per_output_token", "e2e_request_latency", "request_queue_time")
    counts = {f"vllm:{n}_seconds_count": metric(server, f"vllm:{n}_seconds_count", model) for n in names}
    done = threading.Event()

    def scrape() -> int:
        scrapes = 0
        while not done.wait(POLL_S):
            server.metrics()
            scrapes += 1
        return scrapes

    def client(i: int) -> str:
        request = values(model, jobs[i], stream=True, **sampling)
        return text(ask(server, model, request) if i % 2 else generate_stream(server, model, request))

    with ThreadPoolExecutor(len(jobs) + 1) as pool:
        scraper = pool.submit(scrape)
        try:
            texts = list(pool.map(client, range(len(jobs))))
        finally:
            done.set()
        assert scraper.result() > 0
    assert texts == [truth[prompt] for prompt in jobs]
    assert idle(server, model)

    def reaches(name: str, value: float) -> bool:
        return eventually(lambda: metric(server, name, model) == value)

    assert reaches("vllm:generation_tokens_total", before + 16 * sampling["max_tokens"])
    for name, count in counts.items():  # histograms of the server itself
        assert reaches(name, count + 16)
        bounds = [k for k in server.metrics() if k.startswith(name.replace("_count", "_bucket{")) and f'"{model}"' in k]
        assert len(bounds) > 30


def curl_lines(path: Path) -> list[tuple[str, str, dict[str, Any]]]:
    """Model, verb and body of every curl line of a document."""
    found = re.findall(r"^curl -sN? localhost:8000/v2/models/([\w-]+)/(\w+) -d '(.*)'$", path.read_text(), re.MULTILINE)
    return [(model, verb, json.loads(body)) for model, verb, body in found]


def test_the_documents_examples_run(
    server: TritonServer,
    repository: Path,
    llm: LLM,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    documents = [DEPLOYMENT, repository / "tiny" / "README.md", repository / "tiny-vllm" / "README.md"]
    lines = [line for document in documents for line in curl_lines(document)]
    assert len(lines) == 7
    (prompt,) = {body["text_input"] for _, _, body in lines}
    truth = expected(llm, prompt, max_tokens=64)
    for model, verb, body in lines:
        responses = [generate(server, model, body)[1]] if verb == "generate" else generate_stream(server, model, body)
        assert text(responses).removeprefix(prompt) == truth
    monkeypatch.setattr(sys, "argv", ["triton_stream.py", server.grpc])
    runpy.run_path(str(ROOT / "examples" / "triton_stream.py"))
    assert capsys.readouterr().out.startswith(f"{truth}\nacceptance rate ")
