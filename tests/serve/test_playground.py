"""The playground's routes: the page, what it is told, and rounds that are those of the engine."""

import math
from pathlib import Path
from typing import Any

import pytest
from serving import ThreadServer, events_of

from ddtree_trt import LLM, SamplingParams
from ddtree_trt.artifact.examples import required_examples
from ddtree_trt.runtime.decoding.loop import Round
from ddtree_trt.serve.playground.routes import PAGE

QUESTION = "Anna has 5 apples and buys 7 more. How many apples does she have?"
MESSAGES = [{"role": "user", "content": QUESTION}]


def events(server: ThreadServer, **fields: Any) -> list[dict[str, Any]]:
    response = server.http.post("/playground/rounds", json={"messages": MESSAGES, **fields})
    assert response.status_code == 200, response.text
    assert response.text.endswith("data: [DONE]\n\n")
    return events_of(response.text)


@pytest.mark.parametrize("path", PAGE)
def test_the_page_comes_whole_and_may_use_nothing_from_elsewhere(server: ThreadServer, path: str) -> None:
    answer = server.http.get(path)
    name, media_type = PAGE[path]
    assert answer.status_code == 200 and answer.headers["content-type"] == media_type
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    text = answer.text.replace("http://www.w3.org/2000/svg", "")  # a namespace, not an address
    assert name.split(".")[1] and "http://" not in text and "https://" not in text


def test_with_a_key_the_page_is_open_and_its_requests_are_not(guarded: ThreadServer) -> None:
    nobody = {"Authorization": ""}
    assert {guarded.http.get(path, headers=nobody).status_code for path in PAGE} == {200}
    assert guarded.http.get("/playground/engine", headers=nobody).status_code == 401
    assert guarded.http.post("/playground/rounds", json={"messages": MESSAGES}, headers=nobody).status_code == 401
    assert guarded.http.get("/playground/engine").json()["chat"] is True


def test_the_page_is_told_what_the_engine_can_do(server: ThreadServer, tiny_engine: Path) -> None:
    told = server.http.get("/playground/engine").json()
    limits = server.llm.engine.manifest.limits
    drafts = {method["name"]: method["drafts"] for method in told["methods"]}
    assert drafts["ddtree"] and not drafts["ar"] and "draft-model" not in drafts
    examples = required_examples(tiny_engine)
    assert (told["examples"], told["knows"]) == (list(examples.prompts), examples.knows)
    assert (told["max_tree_budget"], told["max_seq_len"]) == (limits.max_tree_budget, limits.max_seq_len)


def test_rounds_are_those_that_the_engine_decodes(server: ThreadServer, tiny_engine: Path) -> None:
    seen: list[Round] = []
    params = SamplingParams(max_tokens=40, method="ddtree", tree_budget=16)
    with LLM(tiny_engine) as llm:
        expected = "".join(p.outputs[0].text for p in llm.stream(MESSAGES, params, on_round=seen.append))
        text = {token: server.llm.codec.decode([token], skip_special_tokens=False) for token in range(1, 500)}
    parts = events(server, method="ddtree", tree_budget=16, max_tokens=40)
    rounds = [record for part in parts for record in part["rounds"]]
    assert "".join(part["text"] for part in parts) == expected
    assert len(rounds) == len(seen) and any(len(r["nodes"]) > len(r["path"]) for r in rounds)
    for record, round_ in zip(rounds, seen, strict=True):
        assert [node[1] for node in record["nodes"]] == round_.tree.parents[1:].tolist()
        for (shown, _, probability), token, weight in zip(
            record["nodes"], round_.tree.token_ids.tolist(), round_.tree.log_weights.tolist(), strict=True
        ):
            assert shown == text.get(token, shown) and probability == pytest.approx(math.exp(weight), abs=1e-4)
        assert record["path"] == round_.path[1:].tolist()
        assert len(record["emitted"]) == len(round_.path)
    assert parts[-1]["finish_reason"] in ("stop", "length")
    figures = parts[-1]["figures"]
    assert figures["rounds"] == len(seen) and figures["stage_s"]["verify"] > 0


@pytest.mark.parametrize(("load", "says"), [(0.0, None), (999.0, "The machine was busy: load 999.00 on ")])
def test_answers_say_that_the_machine_was_busy(
    server: ThreadServer, monkeypatch: pytest.MonkeyPatch, load: float, says: str | None
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    parts = events(server, max_tokens=4)
    assert all(part["busy"] is None if says is None else part["busy"].startswith(says) for part in parts)
