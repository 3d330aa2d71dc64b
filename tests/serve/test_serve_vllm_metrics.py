"""What clients and dashboards made for vLLM read: `metrics` of answers and streams, and the names of /metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from serving import ThreadServer, thread_server

from ddtree_trt import LLM, SamplingParams

QUESTION = "There are 6 drawers, each with 32 cards. How many cards are there?"
LONGEST = 15  # draft positions of the tiny pair
# The fields of `metrics.speculative_decoding` and of `metrics`, as vLLM's documentation lists them
# (docs/features/speculative_decoding/acceptance_metrics.md at level "summary", docs/features/per_request_metrics.md).
SPECULATIVE = {
    "mean_acceptance_length",
    "draft_acceptance_rate",
    "acceptance_histogram",
    "num_spec_steps",
    "num_accepted_draft_tokens",
    "num_draft_tokens",
    "num_spec_tokens",
}
TIMING = {"time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second"}
# Of vLLM's vllm/v1/metrics/loggers.py and vllm/v1/spec_decode/metrics.py, as a scrape shows them.
SCRAPED = {
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:generation_tokens": "counter",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:prefix_cache_hits": "counter",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:request_inference_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_success": "counter",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:spec_decode_num_accepted_tokens": "counter",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "counter",
    "vllm:spec_decode_num_draft_tokens": "counter",
    "vllm:spec_decode_num_drafts": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
}


def expected(llm: LLM, **sampling: Any) -> dict[str, Any]:
    """vLLM's object for a request, counted round by round from the engine's own record of it."""
    (output,) = llm.generate([[{"role": "user", "content": QUESTION}]], SamplingParams(temperature=0.0, **sampling))
    steps = [
        (length - 1, nodes)
        for length, nodes in zip(output.metrics.acceptance_lengths, output.metrics.budgets, strict=True)
        if nodes > 0
    ]
    accepted, drafted = sum(a for a, _ in steps), sum(n for _, n in steps)
    return {
        "mean_acceptance_length": 1 + accepted / len(steps) if steps else 1,
        "draft_acceptance_rate": accepted / drafted if drafted else 0,
        "acceptance_histogram": [sum(a == j for a, _ in steps) for j in range(LONGEST + 1)],
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": LONGEST,
    }


@pytest.mark.parametrize(
    "sampling", [{"tree_budget": 8}, {"tree_budget": 40}, {"method": "dflash"}, {"method": "ar"}], ids=str
)
def test_answers_have_vllms_object(server: ThreadServer, llm: LLM, sampling: dict[str, Any]) -> None:
    answer = server.chat(QUESTION, max_tokens=40, **sampling).json()
    found = answer["metrics"]["speculative_decoding"]
    assert found == expected(llm, max_tokens=40, **sampling)
    assert set(found) == SPECULATIVE
    times = {name: answer["metrics"][name] for name in TIMING}
    assert all(value > 0 for value in times.values())
    tokens = answer["usage"]["completion_tokens"]
    assert times["mean_itl_ms"] == pytest.approx(times["generation_time_ms"] / (tokens - 1))
    seconds = (times["time_to_first_token_ms"] + times["generation_time_ms"]) / 1000
    assert times["tokens_per_second"] == pytest.approx(tokens / seconds)
    assert answer["metrics"]["time_to_first_token_s"] == pytest.approx(
        (times["queue_time_ms"] + times["time_to_first_token_ms"]) / 1000
    )


AIPERF = json.loads((Path(__file__).resolve().parents[1] / "fixtures" / "aiperf" / "tiny.json").read_text("utf-8"))


@pytest.mark.parametrize("recorded", AIPERF["prompts"], ids=lambda r: r["prompt"][:20])
def test_answers_are_what_aiperf_reported(server: ThreadServer, recorded: dict[str, Any]) -> None:
    """The fixture is of a run of the real tool. The body is AIPerf's."""
    body = {
        "messages": [{"role": "user", "content": recorded["prompt"]}],
        "model": "tiny",
        "stream": True,
        "stream_options": {"include_usage": True},
        "tree_budget": AIPERF["tree_budget"],
    }
    events = server.http.post("/v1/chat/completions", json=body).text.split("\n\n")
    parts = [json.loads(e.removeprefix("data: ")) for e in events if e.startswith("data: {")]
    (stats,) = [s for p in parts if (s := (p.get("metrics") or {}).get("speculative_decoding"))]
    # As AIPerf's adapter for vLLM checks them before it believes them.
    assert all(type(count) is int for count in stats["acceptance_histogram"])
    assert len(stats["acceptance_histogram"]) == stats["num_spec_tokens"] + 1
    assert sum(stats["acceptance_histogram"]) == stats["num_spec_steps"]
    accepted = sum(j * count for j, count in enumerate(stats["acceptance_histogram"]))
    assert accepted == stats["num_accepted_draft_tokens"] <= stats["num_draft_tokens"]
    assert recorded == {
        "prompt": recorded["prompt"],
        "usage_prompt_tokens": parts[-1]["usage"]["prompt_tokens"],
        "usage_completion_tokens": parts[-1]["usage"]["completion_tokens"],
        "spec_decode_steps": stats["num_spec_steps"],
        "spec_decode_draft_tokens": stats["num_draft_tokens"],
        "spec_decode_accepted_draft_tokens": stats["num_accepted_draft_tokens"],
        "spec_decode_acceptance_length": pytest.approx(stats["mean_acceptance_length"]),
        "spec_decode_draft_acceptance_rate": pytest.approx(100 * stats["draft_acceptance_rate"]),
    }


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("completions", {"prompt": "def fib(n):", "max_tokens": 12, "repetition_penalty": 1.0, "logprobs": None}),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}),
    ],
)
def test_vllms_benchmark_client_finds_what_it_reads(server: ThreadServer, path: str, prompt: dict[str, Any]) -> None:
    """Bodies and reading as in vLLM's vllm/benchmarks/lib/endpoint_request_func.py, with --ignore-eos."""
    length = {} if "max_tokens" in prompt else {"max_completion_tokens": 12}
    options = {"model": "tiny", "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    answer = server.http.post(f"/v1/{path}", json={**prompt, **length, **options}, headers={"x-request-id": "bench-1"})
    assert answer.status_code == 200
    messages = [m.strip().removeprefix("data: ") for m in answer.text.split("\n\n") if m.strip()]
    chunks = [json.loads(m) for m in messages if m != "[DONE]"]
    with_tokens = [c for c in chunks if c.get("choices")]
    usage = [c["usage"] for c in chunks if not c.get("choices") and c.get("usage")]
    assert len(with_tokens) >= 1 and [u["completion_tokens"] for u in usage] == [12]


def test_it_is_for_single_sequences_only(server: ThreadServer) -> None:
    several = server.chat(QUESTION, max_tokens=8, n=2, temperature=1, seed=3).json()["metrics"]
    prompts = server.http.post("/v1/completions", json={"prompt": ["def f(", "x ="], "max_tokens": 4}).json()["metrics"]
    for figures in (several, prompts):
        assert figures["rounds"] > 0, "the figures of this server are there"
        assert {figures[name] for name in ("speculative_decoding", *TIMING)} == {None}


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_a_stream_has_it_once_in_the_part_with_the_usage(server: ThreadServer, llm: LLM, endpoint: str) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    options: Any = {
        "model": "tiny",
        "max_tokens": 40,
        "stream": True,
        "stream_options": {"include_usage": True},
        "extra_body": {"tree_budget": 8},
    }
    if endpoint == "chat":
        chunks: list[Any] = list(
            client.chat.completions.create(messages=[{"role": "user", "content": QUESTION}], **options)
        )
    else:
        ids = llm.tokenizer.apply_chat_template(
            [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_dict=False
        )
        chunks = list(client.completions.create(prompt=ids, **options))
    with_it = [c for c in chunks if (c.model_extra or {}).get("metrics", {}).get("speculative_decoding")]
    assert with_it == chunks[-1:] and chunks[-1].usage is not None and chunks[-1].choices == []
    found = chunks[-1].model_extra["metrics"]["speculative_decoding"]
    assert found == expected(llm, max_tokens=40, tree_budget=8)
    assert chunks[-2].model_extra["metrics"]["rounds"] == found["num_spec_steps"], (
        "our own figures stay where they were"
    )


def test_a_stream_without_usage_has_it_at_its_end(server: ThreadServer, llm: LLM) -> None:
    events = server.chat(QUESTION, max_tokens=40, stream=True, tree_budget=8).text.split("\n\n")
    parts = [json.loads(e.removeprefix("data: ")) for e in events if e.startswith("data: {")]
    found = [p["metrics"]["speculative_decoding"] for p in parts if p.get("metrics")]
    assert found == [expected(llm, max_tokens=40, tree_budget=8)]


def test_scrapes_add_up_with_the_answers(tiny_engine: Path) -> None:
    with thread_server(tiny_engine, model_name="a/model") as fresh:
        asked = [fresh.chat(QUESTION, max_tokens=40, tree_budget=b).json() for b in (4, 8, 0)]
        found = fresh.figures()
    assert found["vllm:generation_tokens_total"] == sum(a["usage"]["completion_tokens"] for a in asked)
    objects = [a["metrics"]["speculative_decoding"] for a in asked]
    for counter, field in (
        ("num_drafts", "num_spec_steps"),
        ("num_draft_tokens", "num_draft_tokens"),
        ("num_accepted_tokens", "num_accepted_draft_tokens"),
    ):
        assert found[f"vllm:spec_decode_{counter}_total"] == sum(o[field] for o in objects) > 0
    for position in range(LONGEST):
        name = f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{position}"}}'
        assert found[name] == sum(sum(o["acceptance_histogram"][position + 1 :]) for o in objects)


def test_the_names_are_vllms(server: ThreadServer) -> None:
    page = server.http.get("/metrics").text
    kinds = dict(line.split()[2:4] for line in page.splitlines() if line.startswith("# TYPE vllm:"))
    assert {name.removesuffix("_total"): kind for name, kind in kinds.items()} == SCRAPED
