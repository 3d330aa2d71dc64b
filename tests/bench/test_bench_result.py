"""Results: kept and read back exactly, merged from shards, refused when they are something else."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from bench_results import STAGES, make_engine, make_result, make_sample

from ddtree_trt.bench.result import BenchResult, merge, read_result, to_json
from ddtree_trt.bench.settings import Shard
from ddtree_trt.errors import UsageError

WHOLE = make_result(
    make_sample("ar", "set/0"),
    make_sample("ddtree@16", "set/0", stage_s=STAGES, mean_budget=16.0),
    make_sample("ddtree@auto", "set/0", automatic={"rounds": 3, "expected_s": 0.25}),
    make_sample("hf:generate", "set/1", acceptance_lengths=None, output_digest=None),
    limit=3,
    temperatures=(0.0, 1.0),
    peers=("hf",),
)


def keep(result: BenchResult, path: Path) -> Path:
    path.write_text(to_json(result), encoding="utf-8")
    return path


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_result(keep(WHOLE, tmp_path / "r.json")) == WHOLE


def test_a_sample_takes_a_line(tmp_path: Path) -> None:
    lines = to_json(WHOLE).splitlines()
    assert sum('"acceptance_lengths"' in line for line in lines) == len(WHOLE.samples)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: d.update(schema_version=99), "schema version 1: its schema_version is 99"),
        (lambda d: d.pop("schema_version"), "its schema_version is None"),
        (lambda d: d.pop("engine"), "is damaged: 'engine'"),
        (lambda d: d["samples"][0].pop("order"), "is damaged: Sample has fields"),
        (lambda d: d["settings"].update(extra=1), "is damaged: BenchSettings has fields"),
    ],
)
def test_a_file_that_is_no_result_is_refused(tmp_path: Path, damage: object, message: str) -> None:
    data = json.loads(to_json(WHOLE))
    damage(data)  # type: ignore[operator]
    path = tmp_path / "r.json"
    path.write_text(json.dumps(data))
    with pytest.raises(UsageError, match=message):
        read_result(path)


def test_a_result_from_before_a_setting_has_its_default(tmp_path: Path) -> None:
    data = json.loads(to_json(WHOLE))
    for name in ("backend", "precision", "device_rounds"):
        del data["settings"][name]
    path = tmp_path / "r.json"
    path.write_text(json.dumps(data))
    assert read_result(path) == WHOLE


def test_text_and_absent_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    for text in ("{", "[]", ""):
        path.write_text(text)
        with pytest.raises(UsageError):
            read_result(path)
    with pytest.raises(UsageError, match="cannot read"):
        read_result(tmp_path / "absent.json")


def shards(count: int = 2) -> list[BenchResult]:
    return [make_result(make_sample("ar", f"set/{i}"), shard=Shard(i, count)) for i in range(1, count + 1)]


def test_shards_make_one_result() -> None:
    one, two = shards()
    merged = merge([two, one])
    assert [p.shard.index for p in merged.parts] == [1, 2]
    assert {s.prompt for s in merged.samples} == {"set/1", "set/2"}
    assert merge([merged]) == merged


def test_shards_of_one_pair_built_on_two_machines_belong_together() -> None:
    one, two = shards()
    settings = dataclasses.replace(two.settings, engine="/elsewhere/pair")
    elsewhere = dataclasses.replace(two, settings=settings, engine=make_engine(digest="other build"))
    assert len(merge([one, elsewhere]).parts) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts_digest": "other"}, "their prompts differ"),
        ({"engine": make_engine(target_sha256="other")}, "their engines differ"),
        ({"settings": dataclasses.replace(WHOLE.settings, max_tokens=9)}, "their settings differ"),
    ],
)
def test_results_of_different_runs_are_not_merged(change: dict[str, object], message: str) -> None:
    one, two = shards()
    with pytest.raises(UsageError, match=message):
        merge([one, dataclasses.replace(two, **change)])  # type: ignore[arg-type]


def test_missing_and_repeated_shards_are_named() -> None:
    one, _, three = shards(3)
    with pytest.raises(UsageError, match="shard 2/3 is missing"):
        merge([one, three])
    with pytest.raises(UsageError, match="do not make one run: 1/3, 1/3"):
        merge([one, one])
    with pytest.raises(UsageError, match="do not make one run: 1/3, 1/2"):
        merge([one, shards(2)[0]])
    with pytest.raises(UsageError, match="nothing to merge"):
        merge([])
