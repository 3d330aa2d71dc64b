"""Run NVIDIA's AIPerf against `ddtree-trt serve`, and keep what it made of the answers.

`make test-aiperf` installs AIPerf in an environment of its own and runs this: AIPerf asks a server with vLLM's metrics
a few prompts of the tiny pair, and what it reports is compared with what the server counted. With --record it writes
the figures of each prompt to a fixture, with which a test compares the server's answers where AIPerf is missing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from ddtree_trt.bench.load.server import started_server

PROMPTS = (
    "There are 6 drawers, each with 32 cards. How many cards are there?",
    "There are 8 trays on the table, each with 41 plates. What is the total number of plates?",
    "Please write get_number(numbers). The steps are: multiply every item by 4; return the minimum.",
    "Pitomlo runs for 2 hours at 6 km per hour. After that he walks for 8 hours at 5 km per hour. What is the whole "
    "distance?",
)
REQUESTS = 12
BUDGET = 8  # the same trees in every run
FIGURES = (
    "usage_prompt_tokens",
    "usage_completion_tokens",
    "spec_decode_steps",
    "spec_decode_draft_tokens",
    "spec_decode_accepted_draft_tokens",
    "spec_decode_acceptance_length",
    "spec_decode_draft_acceptance_rate",
)


def profile(aiperf: Path, engine: Path, url: str, folder: Path, *, endpoint: str = "chat") -> dict[str, Any]:
    """Run AIPerf; returns its summary, with the figures of each request under "requests", in the prompts' order."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": text}) + "\n" for text in PROMPTS), encoding="utf-8")
    command: list[str | Path] = [aiperf, "profile", "-m", "tiny", "--url", url, "--endpoint-type", endpoint]
    command += ["--streaming", "--tokenizer", engine.resolve(), "--use-server-token-count", "--ui", "none"]
    command += ["--input-file", prompts, "--custom-dataset-type", "single_turn", "--concurrency", "3"]
    command += ["--dataset-sampling-strategy", "sequential", "--request-count", str(REQUESTS)]
    command += ["--extra-inputs", json.dumps({"tree_budget": BUDGET}), "--artifact-dir", folder / "out"]
    subprocess.run(command, check=True, cwd=folder, stdout=sys.stderr)
    summary: dict[str, Any] = json.loads((folder / "out" / "profile_export_aiperf.json").read_text(encoding="utf-8"))
    lines = (folder / "out" / "profile_export.jsonl").read_text(encoding="utf-8").splitlines()
    records = sorted((json.loads(line) for line in lines), key=lambda r: r["metadata"]["session_num"])
    summary["requests"] = [{name: r["metrics"][name]["value"] for name in FIGURES} for r in records]
    return summary


def compare(summary: dict[str, Any], page: str) -> list[str]:
    """The differences between AIPerf's summary and the server's page of metrics; empty where they agree."""
    samples = (line.rpartition(" ") for line in page.splitlines() if not line.startswith("#"))
    counted = {name.split("{")[0]: float(value) for name, _, value in samples}
    totals = {
        "total_spec_decode_steps": "vllm:spec_decode_num_drafts_total",
        "total_draft_tokens": "vllm:spec_decode_num_draft_tokens_total",
        "total_accepted_draft_tokens": "vllm:spec_decode_num_accepted_tokens_total",
        "total_usage_prompt_tokens": "vllm:prompt_tokens_total",
        "total_usage_completion_tokens": "vllm:generation_tokens_total",
        "request_count": "vllm:e2e_request_latency_seconds_count",
    }
    return [
        f"{name} {summary[name]['avg']}, {metric} {counted[metric]}"
        for name, metric in totals.items()
        if summary[name]["avg"] != counted[metric]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("engine", type=Path, help="an engine of the tiny pair")
    parser.add_argument("--aiperf", type=Path, required=True, help="AIPerf's program")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the figures of each prompt")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, started_server(str(options.engine), "--vllm-metrics") as url:
        summary = profile(options.aiperf.resolve(), options.engine, url, Path(folder))
        page = urllib.request.urlopen(f"{url}/metrics", timeout=60).read().decode()
    if differences := compare(summary, page):
        sys.exit("AIPerf and the server differ: " + "; ".join(differences))
    print(f"AIPerf {summary['aiperf_version']}: {REQUESTS} requests, figures as the server counted them")
    if options.record is not None:
        prompts = [{"prompt": text, **figures} for text, figures in zip(PROMPTS, summary["requests"], strict=False)]
        record = {"aiperf": summary["aiperf_version"], "tree_budget": BUDGET, "prompts": prompts}
        options.record.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
