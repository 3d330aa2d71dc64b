"""Figures in answers, in streams and on /metrics: ours, and what clients and dashboards made for vLLM read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from pacing import wait_for
from serving import ThreadServer, events_of

from ddtree_trt import LLM, SamplingParams

QUESTION = "There are 6 drawers, each with 32 cards. How many cards are there?"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
LONGEST = 15  # draft positions of the tiny pair
# Beside `speculative_decoding`, as vLLM's documentation lists them (docs/features/per_request_metrics.md).
TIMING = {"time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second"}
# Of vLLM's vllm/v1/metrics/loggers.py and vllm/v1/spec_decode/metrics.py, as a scrape shows them.
SCRAPED = {
    "counter": """generation_tokens prefix_cache_hits prefix_cache_queries prompt_tokens request_success
        spec_decode_num_accepted_tokens spec_decode_num_accepted_tokens_per_pos spec_decode_num_draft_tokens
        spec_decode_num_drafts""",
    "gauge": "kv_cache_usage_perc num_requests_running num_requests_waiting",
    "histogram": """e2e_request_latency_seconds inter_token_latency_seconds request_decode_time_seconds
        request_generation_tokens request_inference_time_seconds request_prefill_time_seconds request_prompt_tokens
        request_queue_time_seconds request_time_per_output_token_seconds time_to_first_token_seconds""",
}


def expected(llm: LLM, **sampling: Any) -> dict[str, Any]:
    """vLLM's object for a request (docs/features/speculative_decoding/acceptance_metrics.md at level "summary"),
    counted round by round from the engine's own record of it."""
    (output,) = llm.generate([MESSAGES], SamplingParams(temperature=0.0, **sampling))
    rounds = zip(output.metrics.acceptance_lengths, output.metrics.budgets, strict=True)
    steps = [(length - 1, nodes) for length, nodes in rounds if nodes > 0]
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
    assert answer["metrics"]["speculative_decoding"] == expected(llm, max_tokens=40, **sampling)
    times = {name: answer["metrics"][name] for name in TIMING}
    assert all(value > 0 for value in times.values())
    tokens = answer["usage"]["completion_tokens"]
    assert times["mean_itl_ms"] == pytest.approx(times["generation_time_ms"] / (tokens - 1))
    seconds = (times["time_to_first_token_ms"] + times["generation_time_ms"]) / 1000
    assert times["tokens_per_second"] == pytest.approx(tokens / seconds)
    first_ms = times["queue_time_ms"] + times["time_to_first_token_ms"]
    assert answer["metrics"]["time_to_first_token_s"] == pytest.approx(first_ms / 1000)


AIPERF = json.loads((Path(__file__).resolve().parents[1] / "fixtures" / "aiperf" / "tiny.json").read_text("utf-8"))


@pytest.mark.parametrize("recorded", AIPERF["prompts"], ids=lambda r: r["prompt"][:20])
def test_answers_are_what_aiperf_reported(server: ThreadServer, recorded: dict[str, Any]) -> None:
    """The fixture is of a run of the real tool. The body is AIPerf's."""
    wanted = {"stream": True, "stream_options": {"include_usage": True}, "tree_budget": AIPERF["tree_budget"]}
    parts = events_of(server.chat(recorded["prompt"], model="tiny", **wanted).text)
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


def test_it_is_for_single_sequences_only(server: ThreadServer) -> None:
    several = server.chat(QUESTION, max_tokens=8, n=2, temperature=1, seed=3).json()["metrics"]
    prompts = server.http.post("/v1/completions", json={"prompt": ["def f(", "x ="], "max_tokens": 4}).json()["metrics"]
    for figures in (several, prompts):
        assert figures["rounds"] > 0, "the figures of this server are there"
        assert {figures[name] for name in ("speculative_decoding", *TIMING)} == {None}


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_a_stream_has_it_once_in_the_part_with_the_usage(client: openai.OpenAI, llm: LLM, endpoint: str) -> None:
    options: Any = {"model": "tiny", "max_tokens": 40, "stream": True, "extra_body": {"tree_budget": 8}}
    options["stream_options"] = {"include_usage": True}
    if endpoint == "chat":
        chunks: list[Any] = list(client.chat.completions.create(messages=MESSAGES, **options))
    else:
        ids = llm.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
        chunks = list(client.completions.create(prompt=ids, **options))
    with_it = [c for c in chunks if (c.model_extra or {}).get("metrics", {}).get("speculative_decoding")]
    assert with_it == chunks[-1:] and chunks[-1].usage is not None and chunks[-1].choices == []
    found = chunks[-1].model_extra["metrics"]["speculative_decoding"]
    assert found == expected(llm, max_tokens=40, tree_budget=8)
    ours = chunks[-2].model_extra["metrics"]
    assert ours["rounds"] == found["num_spec_steps"], "our own figures stay where they were"


def test_a_stream_without_usage_has_it_at_its_end(server: ThreadServer, llm: LLM) -> None:
    parts = events_of(server.chat(QUESTION, max_tokens=40, stream=True, tree_budget=8).text)
    found = [p["metrics"]["speculative_decoding"] for p in parts if p.get("metrics")]
    assert found == [expected(llm, max_tokens=40, tree_budget=8)]


def test_scrapes_add_up_with_the_answers(server: ThreadServer) -> None:
    wait_for(lambda: server.idle and not server.llm.running)
    before = server.figures()
    asked = [server.chat(QUESTION, max_tokens=40, tree_budget=b).json() for b in (4, 8, 0)]
    middle = server.figures()
    server.chat("What is 3 + 2?", max_tokens=20, stream=True, n=2, temperature=1, tree_budget=8)
    assert server.chat(temperature=-1).status_code == 400
    after = server.figures()
    found, all_of_them = ({k: v - before.get(k, 0) for k, v in page.items()} for page in (middle, after))
    for field in ("prompt_tokens", "completion_tokens"):
        counter = field.replace("completion", "generation")
        assert found[f"vllm:{counter}_total"] == sum(a["usage"][field] for a in asked)
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
    m, sequences = all_of_them, 5
    assert sum(v for k, v in m.items() if k.startswith("vllm:request_success_total")) == sequences
    assert m['ddtree_requests_refused_total{status="400"}'] == 1
    for name in ("time_to_first_token", "e2e_request_latency", "request_time_per_output_token"):
        assert m[f"vllm:{name}_seconds_count"] == sequences and m[f"vllm:{name}_seconds_sum"] > 0
    # A round commits its accepted drafts and one token more; the first token comes from the prompt's pass.
    rounds, length = m["ddtree_rounds_total"], "ddtree_acceptance_length"
    assert m[f"{length}_count"] == rounds and m[f"{length}_sum"] == m["vllm:generation_tokens_total"] - sequences
    assert m[f"{length}_sum"] == rounds + m["vllm:spec_decode_num_accepted_tokens_total"]
    assert after["ddtree_slots"] == server.llm.slots and after["process_resident_memory_bytes"] > 0


def test_the_page_has_vllms_names_and_no_twins_that_say_when_they_began(server: ThreadServer) -> None:
    page = server.http.get("/metrics").text
    kinds = dict(line.split()[2:4] for line in page.splitlines() if line.startswith("# TYPE vllm:"))
    scraped = {f"vllm:{name}": kind for kind, names in SCRAPED.items() for name in names.split()}
    assert {name.removesuffix("_total"): kind for name, kind in kinds.items()} == scraped
    openmetrics = server.http.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert openmetrics.text.endswith("# EOF\n") and "openmetrics" in openmetrics.headers["content-type"]
    assert "vllm:num_requests_running" in openmetrics.text and "_created" not in page + openmetrics.text
