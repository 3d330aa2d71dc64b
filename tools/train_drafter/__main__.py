"""Command line: `python -m tools.train_drafter STAGE --target TARGET --work DIR`."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch

from . import data
from .drafter import most_frequent, read_shortlist, write_shortlist
from .loop import Log
from .model import load_drafter
from .prompts import held_out_prompts, write_held_out
from .settings import Settings
from .target import Target, load_target, mask_token_id
from .training import train_drafter
from .validation import tokens_per_round

DEFAULTS = Settings()


def write_data(target: Target, args: argparse.Namespace, settings: Settings) -> None:
    v, (first, step) = settings.validation, map(int, args.share.split("/"))
    if first == 0:
        write_held_out(v.final_seed, v.final_prompts, args.work / "prompts.jsonl")
        for name, seed, count, length in (
            ("validation", v.seed, v.prompts, v.max_new),
            ("final", v.final_seed, v.final_prompts, v.final_max_new),
        ):
            prompts = [target.prompt_ids(prompt) for _, prompt in held_out_prompts(seed, count)]
            data.write_greedy(target, prompts, length, args.work / f"{name}.safetensors")
    prompts_of, log = data.chat_prompts(target, settings.data), Log(args.work / f"data-{first}.log")
    data.write_pools(target, args.work / "data", range(first, args.pools, step), settings.data, prompts_of, log.write)


def train(target: Target, args: argparse.Namespace, settings: Settings) -> None:
    mask = mask_token_id(target, args.mask_token)
    budget = settings.validation.budget
    train_drafter(target, settings.drafter, mask, args.work, args.work / "data", args.init, budget)


def write_draft_vocabulary(target: Target, args: argparse.Namespace, settings: Settings) -> None:
    """Have the drafter draft from the tokens that the target's answers have most."""
    stored = data.Answers(args.work / "data")
    stored.scan()
    ids = most_frequent(stored.rows, len(target.head), args.size, target.stops)
    write_shortlist(args.drafter or args.work / "best", ids)


def evaluate(target: Target, args: argparse.Namespace, settings: Settings) -> None:
    """Tokens per round on the held-out prompts that no choice was made by."""
    folder = args.drafter or args.work / "best"
    model, answers = load_drafter(folder).to(args.device), data.read(args.work / "final.safetensors")
    budgets = settings.validation.final_budgets
    print(json.dumps(tokens_per_round(model, target, answers, budgets, read_shortlist(folder))))


STAGES = {"data": write_data, "train": train, "shortlist": write_draft_vocabulary, "evaluate": evaluate}


def main() -> None:
    d = DEFAULTS.drafter
    parser = argparse.ArgumentParser(prog="tools.train_drafter", description="Train a drafter for a target.")
    parser.add_argument("stage", choices=list(STAGES))
    parser.add_argument("--target", default="smollm2", help="folder, hub id, .gguf file or smollm2")
    parser.add_argument("--work", type=Path, required=True, help="folder of data, checkpoints and logs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, help="on a CPU")
    parser.add_argument("--pools", type=int, default=40, help="data: how many files of 384 answers")
    parser.add_argument("--batch", type=int, default=DEFAULTS.data.batch, help="data: answers written at once")
    parser.add_argument("--share", default="0/1", help="data: this process's share of the pools, FIRST/STEP")
    parser.add_argument("--kind", choices=["dflash", "dspark", "eagle3"], default=d.kind)
    parser.add_argument(
        "--init", type=Path, help="train: a drafter's folder to begin with; dspark trains its head only"
    )
    parser.add_argument("--taps", type=int, default=d.taps)
    parser.add_argument("--mask-token", help="train: the token, by text or id, that stands for one to draft")
    parser.add_argument(
        "--steps", type=int, default=d.schedule.steps, help="train: length of the schedule, may be changed later"
    )
    parser.add_argument("--hours", type=float, default=0.0, help="train: length by the clock, in place of --steps")
    parser.add_argument("--block", type=int, default=d.block)
    parser.add_argument("--layers", type=int, default=d.layers)
    parser.add_argument("--size", type=int, default=12288, help="shortlist: how many tokens are drafted from")
    parser.add_argument("--drafter", type=Path, help="shortlist, evaluate: a drafter's folder, by default WORK/best")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    schedule = replace(d.schedule, steps=args.steps, seconds=3600 * args.hours)
    drafter = replace(d, kind=args.kind, taps=args.taps, block=args.block, layers=args.layers, schedule=schedule)
    pool = max(1, DEFAULTS.data.batch * DEFAULTS.data.pool // args.batch)
    settings = replace(DEFAULTS, drafter=drafter, data=replace(DEFAULTS.data, batch=args.batch, pool=pool))
    STAGES[args.stage](load_target(args.target, drafter.taps, args.device), args, settings)


if __name__ == "__main__":
    main()
