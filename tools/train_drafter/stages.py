"""The stages of a training: answers are written, a drafter is trained on them, measured and published.

The command line is apart (`__main__.py`), since a process that is spawned cannot import it again.
"""

import argparse
import itertools
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import torch

from ddtree_trt import LLM

from . import data
from .drafter import most_frequent, read_shortlist, write_card, write_shortlist
from .loop import Log
from .model import load_drafter
from .prompts import held_out_prompts, write_held_out
from .settings import Settings
from .target import ServedTarget, Target, load_target, mask_token_id
from .training import train_drafter
from .validation import tokens_per_round


def write_answers(target: Target, args: argparse.Namespace, settings: Settings) -> None:
    """This process's share of the pools, without an end unless --pools says one."""
    first, step = map(int, args.share.split("/"))
    pools = range(first, args.pools, step) if args.pools else itertools.count(first, step)
    prompts, log = data.chat_prompts(target, settings.data), Log(args.work / f"data-{first}.log")
    data.write_pools(target, args.work / "data", pools, settings.data, prompts, log.write)


def write_held_out_answers(target: Target, args: argparse.Namespace, settings: Settings) -> None:
    """Greedy answers to prompts of held-out kinds: those that measure during training, those that are kept for the end,
    and the latter once more as turns of long chats."""
    v = settings.validation
    write_held_out(v.final_seed, v.final_prompts, args.work / "prompts.jsonl")
    checked, final = (
        [prompt for _, prompt in held_out_prompts(seed, count)]
        for seed, count in ((v.seed, v.prompts), (v.final_seed, v.final_prompts))
    )
    size = settings.data.most_turns
    for name, groups, length in (
        ("validation", [[prompt] for prompt in checked], v.max_new),
        ("final", [[prompt] for prompt in final], v.final_max_new),
        ("chats", [final[i : i + size] for i in range(0, len(final), size)], v.final_max_new),
    ):
        chats = [data.chat_ids(target, group) for group in groups]
        data.write_greedy(target, chats, replace(settings.data, max_new=length), args.work / f"{name}.safetensors")


@contextmanager
def writers(args: argparse.Namespace, settings: Settings) -> Iterator[None]:
    """Processes that write answers all the while."""
    with ExitStack() as stack:
        started = []
        for i in range(args.writers):
            share = argparse.Namespace(**{**vars(args), "stage": "data", "share": f"{i}/{args.writers}"})
            process = get_context("spawn").Process(target=work, args=(share, settings))
            process.start()
            stack.callback(process.join)
            stack.callback(process.terminate)
            started.append(process)
        while not any((args.work / "data").glob("pool-*.safetensors")):
            if not any(process.is_alive() for process in started):
                raise SystemExit("no answers were written: see the messages above, or run the stage data by itself")
            time.sleep(0.5)
        yield


def fit(target: Target, args: argparse.Namespace, settings: Settings) -> None:
    """Write answers, train on them as they come, and publish the best drafter with what is known of it."""
    mask = mask_token_id(target, args.mask_token)
    with writers(args, settings):
        write_held_out_answers(target, args, settings)
        ended = train_drafter(
            target, settings.drafter, mask, args.work, args.work / "data", args.init, settings.validation.budget
        )
    if not ended:
        raise SystemExit("stopped; the same command goes on")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(args.work / "best" / name, args.out)
    stored = data.Answers(args.work / "data")
    stored.scan()
    if args.shortlist:
        write_shortlist(args.out, most_frequent(stored.rows, len(target.head), args.shortlist, target.stops))
    write_card(args.out, args.target, stored.rows, args.work / "train.log", evaluate(target, args, settings))


def evaluate(target: Target, args: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    """Tokens per round on the held-out prompts that no choice was made by, alone and behind long chats."""
    folder, v = args.drafter or args.out, settings.validation
    model, found = load_drafter(folder).to(args.device), {}
    for name, behind in (("final", 0), ("chats", v.long)):
        answers = data.read(args.work / f"{name}.safetensors")
        found[name] = tokens_per_round(model, target, answers, v.final_budgets, read_shortlist(folder), behind)
    print(json.dumps(found))
    return found


STAGES = {"fit": fit, "data": write_answers, "evaluate": evaluate}


def work(args: argparse.Namespace, settings: Settings) -> None:
    """A stage, in this process."""
    if args.threads:
        torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    target = load_target(args.target, settings.drafter.taps, args.device)
    if args.engine and args.stage == "data":
        target = ServedTarget(**vars(target), llm=LLM(args.engine, threads=args.threads or 0))
    STAGES[args.stage](target, args, settings)
