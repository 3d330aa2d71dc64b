"""Matchers and pruned trees beside what trying every text says: look-ahead, ends, masks, and constraints that begin
behind a text.
"""

import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest
from engine_builds import CHATS
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from languages import Compiler, texts_of
from random_schemas import random_schema

from ddtree_trt.errors import UsageError
from ddtree_trt.runtime.decoding.sampling import Sampler
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.structured.matcher import Matcher, allowed_part
from ddtree_trt.runtime.structured.record import StructuredOutput
from ddtree_trt.runtime.tree import DraftTree

# Tokens of several letters end and cross an opening in every way.
TOKENS = ["a", "b", "c", "<", ">", "ab", "c>", "<c", ">a", ">ab", "<c>", "<c>b", "a<", "c>c", "bb", ">ba", "<end>"]
END = len(TOKENS) - 1
EXPRESSION = "a(b|c)*|b{1,3}c?"
LONGEST = 6
TEXTS = texts_of(EXPRESSION, "abc", LONGEST + 4)
COMPILER = Compiler(TOKENS, END)


def matcher(*, after: str | None = None, ending: frozenset[int] = frozenset([END])) -> Matcher:
    return COMPILER.matcher(StructuredOutput(regex=EXPRESSION, after=after), ending)


def joined(path: list[int]) -> str:
    return "".join(TOKENS[token] for token in path)


def size(text: str, after: str | None) -> int:
    """How many letters of an output are under the constraint."""
    return len(text if after is None else text.partition(after)[2])


def reaches(path: list[int], after: str | None) -> bool:
    """Whether an output may begin with the path."""
    if END in path[:-1]:
        return False
    text = joined([token for token in path if token != END])
    if after is not None and after not in text:
        return True
    text = text if after is None else text.partition(after)[2]
    return text in TEXTS if path[-1:] == [END] else any(t.startswith(text) for t in TEXTS)


def walk(rng: random.Random, after: str | None, length: int) -> list[int]:
    """A random output that is allowed and can go on."""
    path: list[int] = []
    for _ in range(length):
        following = [token for token in range(END) if reaches([*path, token], after)]
        if not following or size(joined(path), after) > LONGEST:
            break
        # Often towards the opening, which chance alone seldom comes to.
        near = [token for token in following if after and TOKENS[token][0] in after]
        path.append(rng.choice(near if near and rng.random() < 0.5 else following))
    return path


@pytest.mark.parametrize("after", [None, "<c>", "c", "bab"])
def test_masks_are_those_of_the_texts(after: str | None) -> None:
    rng = random.Random(1)
    for _ in range(60):
        output = walk(rng, after, rng.randint(0, 4))
        whole = matcher(after=after)
        for token in output:
            whole.advance(token)
        path = [rng.randrange(END + 1) for _ in range(4)]
        length = next((n for n in range(4) if not reaches([*output, *path[: n + 1]], after)), 4)
        found = whole.allowed_length(path)
        # Before an opening an end is a token like any other, and what is behind it is not judged.
        assert found == length or END in path[: found - 1]
        for _ in range(3):
            expected = [reaches([*output, token], after) for token in range(END + 1)]
            assert whole.mask().tolist() == expected, joined(output)
            assert [whole.allows(token) for token in range(END + 1)] == expected
            for token in np.flatnonzero(expected[:END]).tolist():
                if after is None or after in joined([*output, token]):
                    assert (whole.allowed_length([token, END]) == 2) == reaches([*output, token, END], after)
            following = [token for token in range(END) if expected[token]]
            if not following or size(joined(output), after) > LONGEST:
                break
            output.append(rng.choice(following))
            whole.advance(output[-1])


@pytest.mark.parametrize("after", [None, "<c>"])
def test_a_pruned_tree_has_the_nodes_whose_paths_are_allowed(after: str | None) -> None:
    rng, cut = random.Random(2), 0
    for _ in range(100):
        size = rng.randint(0, 24)
        parents = [-1] + [rng.randint(0, node) for node in range(size)]
        tokens = [rng.randrange(END) for _ in range(size)]
        depths = [0]
        for parent in parents[1:]:
            depths.append(depths[parent] + 1)
        tree = DraftTree(
            np.array(tokens, np.int32),
            np.array(depths[1:], np.int32),
            np.array(parents, np.int32),
            -np.arange(size, dtype=np.float64),
        )
        output = walk(rng, after, rng.randint(0, 2))
        whole = matcher(after=after)
        for token in output:
            whole.advance(token)

        def path(tree: DraftTree, node: int) -> list[int]:
            return [] if node == 0 else [*path(tree, int(tree.parents[node])), int(tree.token_ids[node - 1])]

        allowed = [n for n in range(1, size + 1) if reaches([*output, *path(tree, n)], after)]
        found = allowed_part(tree, whole)
        assert [path(found, n) for n in range(1, len(found) + 1)] == [path(tree, n) for n in allowed]
        assert found.log_weights.tolist() == [float(1 - n) for n in allowed]
        assert found.depths.tolist() == [depths[n] for n in allowed]
        for budget in (0, 3, 10):  # it nests as the tree does
            part = allowed_part(tree.cut(budget), whole)
            assert part.token_ids.tolist() == found.cut(len(part)).token_ids.tolist()
        cut += size - len(found)
    assert cut > 150


def test_the_end_of_a_grammar_is_known_at_once() -> None:
    one = COMPILER.matcher(StructuredOutput(regex="ab?c"), frozenset([END]))
    for token, ended in ((0, False), (1, False), (2, True)):
        one.advance(token)
        assert one.ended is ended


def test_a_token_that_is_not_allowed_is_an_error() -> None:
    one = matcher()
    with pytest.raises(UsageError, match="structured: the output could not be matched"):
        one.advance(2)


def test_ends_of_the_model_that_a_request_ignores_are_never_allowed() -> None:
    one = matcher(ending=frozenset([1]))  # the request ends at the token "b"
    one.advance(0)
    assert one.mask().nonzero()[0].tolist() == [1, 2, 14]  # "b" ends the text, which "a" makes complete
    one.advance(1)
    assert one.ended


# StructuredOutput: what its construction refuses, and the forms in which values are kept


WRONG: list[tuple[Any, str]] = [
    (5, "structured must be a StructuredOutput or an object of its fields, not 5"),
    ({}, "exactly one of json_schema, json_object, regex, choice, grammar is needed, and none was given"),
    ({"regex": "a", "choice": ["b"]}, "not regex and choice"),
    ({"json_schema": "{"}, "the schema is no JSON, or nested too deeply: "),
    ({"json_schema": "[]"}, r"a schema must be a JSON object or a boolean, not \[\]"),
    ({"json_schema": {"enum": [float("nan")]}}, "the schema is no JSON"),
    ({"json_schema": "[" * 100_000}, "the schema is no JSON, or nested too deeply"),
    ({"json_schema": {"title": "\ud800"}}, "half of a surrogate pair"),
    ({"json_object": 1}, "json_object must be true or false, not 1"),
    ({"regex": 5}, "regex must be a text, not 5"),
    ({"choice": [1]}, r"choice\[0\] must be a text, not 1"),
    ({"regex": "a", "after": ""}, "after must be a text that is not empty"),
    ({"regex": "a", "after": "x" * 257}, "after has 257 characters, at most 256 are taken; give its last ones"),
    ({"pattern": "a"}, "unknown name 'pattern'; known are json, after, "),
    ({"json": {}, "json_schema": {}}, "json and json_schema are the same"),
]


@pytest.mark.parametrize(("values", "reason"), WRONG, ids=[reason[:40] for _, reason in WRONG])
def test_what_is_refused(values: Any, reason: str) -> None:
    with pytest.raises(UsageError, match=reason) as caught:
        SamplingParams.from_mapping({"structured": values})
    assert str(caught.value).startswith("structured")


def test_a_schema_is_kept_as_text_in_its_own_order() -> None:
    schema = {"properties": {"b": {}, "a": {}}, "type": "object"}
    record, same = StructuredOutput(json_schema=schema), StructuredOutput.from_mapping({"json": {**schema}})
    schema["type"] = "array"
    assert record.json_schema == '{"properties": {"b": {}, "a": {}}, "type": "object"}'
    assert record == same == StructuredOutput(json_schema=record.json_schema) and hash(record) == hash(same)
    assert StructuredOutput(json_schema=False).json_schema == "false"


# Random schemas: every output is JSON that an independent validator accepts, and that of `ar`, token for token


CHECKER = jsonschema.FormatChecker(["uuid", "ipv4"])


def validate(text: str, schema: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema, format_checker=CHECKER).validate(json.loads(text))


def satisfiable(schemas: Iterator[dict[str, Any]], llm: LLM) -> Iterator[dict[str, Any]]:
    """The schemas that the library takes. It refuses some that nothing satisfies."""
    for schema in schemas:
        try:
            llm.core.maker.grammars.check(StructuredOutput(json_schema=schema))
        except ValueError as error:
            assert "nsatisfiable" in str(error), schema
        else:
            yield schema


def schemas(seed: int) -> Iterator[dict[str, Any]]:
    rng = random.Random(seed)
    while True:
        yield random_schema(rng)


def test_random_tokens_make_valid_json_of_100_schemas(llm: LLM) -> None:
    """The sampler over logits that are noise: texts that no model would write, from all corners of the schemas."""
    core = llm.core
    vocab, ending = core.engine.manifest.target_dims.vocab_size, frozenset(core.engine.manifest.stop_token_ids)
    rng, kinds = np.random.default_rng(0), set[str]()
    for number, schema in zip(range(100), satisfiable(schemas(1), llm), strict=False):
        params = SamplingParams(temperature=1.0, seed=number, structured=StructuredOutput(json_schema=schema))
        assert params.structured is not None
        matcher = core.maker.grammars.matcher(params.structured, ending)
        sampler = Sampler(params, vocab, [], ending, matcher=matcher)
        output: list[int] = []
        while not matcher.ended:
            assert len(output) < 2000, schema
            output.append(sampler.choose(rng.normal(0, 2, vocab).astype(np.float32)))
            sampler.observe(output[-1:])
        text = llm.tokenizer.decode([t for t in output if t not in ending])
        validate(text, schema)
        kinds.add(type(json.loads(text)).__name__)
    assert kinds == {"dict", "list", "str", "int", "float", "bool", "NoneType"}


@pytest.mark.parametrize("count", [20, pytest.param(500, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_methods_say_under_random_schemas_what_ar_says(llm: LLM, count: int) -> None:
    """At temperature 0, token for token, also where the limit cuts the text."""
    methods = st.sampled_from([("ddtree", 4), ("ddtree", 64), ("dflash", "auto"), ("dflash", 3)])

    @settings(max_examples=count)
    @given(rng=st.randoms(use_true_random=False), drafted=methods, chat=st.sampled_from(CHATS))
    def check(rng: random.Random, drafted: tuple[str, Any], chat: Any) -> None:
        schema = random_schema(rng)
        assume([*satisfiable(iter([schema]), llm)])
        common: dict[str, Any] = {"max_tokens": 48, "structured": StructuredOutput(json_schema=schema)}
        (method, budget), plain = drafted, SamplingParams(method="ar", **common)
        (expected,) = llm.generate([chat], plain)[0].outputs
        (found,) = llm.generate([chat], SamplingParams(method=method, tree_budget=budget, **common))[0].outputs
        assert (found.token_ids, found.text) == (expected.token_ids, expected.text)
        assert found.finish_reason == expected.finish_reason
        if expected.finish_reason == "stop":
            validate(found.text, schema)

    check()
