"""Command line: `python -m tools.train_drafter STAGE --target TARGET --work DIR`."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch

from tools.train_tiny.log import Log
from tools.train_tiny.model import load_drafter

from . import shards
from .drafter import drafter_config, fresh
from .prompts import held_out_prompts, write_held_out
from .settings import Settings
from .shards import Shard
from .shortlist import count_tokens, most_frequent, read_shortlist, write_shortlist
from .target import load_target, mask_token_id
from .training import Tables, train
from .validation import tokens_per_round

DEFAULTS = Settings()


def write_prompts(args: argparse.Namespace, settings: Settings) -> None:
    final = settings.validation
    write_held_out(final.final_seed, final.final_prompts, args.work / "prompts.jsonl")


def write_data(args: argparse.Namespace, settings: Settings) -> None:
    target = load_target(args.target, settings.drafter.taps, args.device)
    first, step = map(int, args.share.split("/"))
    if first == 0:
        v = settings.validation
        for name, seed, count, length in (
            ("validation", v.seed, v.prompts, v.max_new),
            ("final", v.final_seed, v.final_prompts, v.final_max_new),
        ):
            prompts = [prompt for _, prompt in held_out_prompts(seed, count)]
            shards.write_greedy(target, prompts, length, args.work / f"{name}.safetensors", settings.data.kept)
    log = Log(args.work / f"data-{first}.log")
    shards.write_shards(target, args.work / "data", range(first, args.pools, step), settings.data, log.write)


def train_drafter(args: argparse.Namespace, settings: Settings) -> None:
    target = load_target(args.target, settings.drafter.taps, args.device)
    mask = mask_token_id(target, args.mask_token)
    config = drafter_config(target.config.to_dict(), settings.drafter, target.taps, mask)
    model = fresh(config, target.model.state_dict(), settings.drafter.seed).to(args.device)
    tables = Tables(target.embedding.detach().clone(), target.head.detach().clone())
    del target
    train(model, tables, settings, args.work, mask, args.workers)


def evaluate(args: argparse.Namespace, settings: Settings) -> None:
    """Tokens per round on the held-out prompts that no choice was made by."""
    target = load_target(args.target, settings.drafter.taps, args.device)
    folder = args.drafter or args.work / "best"
    model, shortlist = load_drafter(folder).to(args.device), read_shortlist(folder)
    for p in model.parameters():
        p.data = p.data.bfloat16()
    records = Shard(args.work / "final.safetensors").records()
    budgets = settings.validation.final_budgets
    print(json.dumps(tokens_per_round(model, records, target.embedding, target.head, budgets, shortlist)))


def write_draft_vocabulary(args: argparse.Namespace, settings: Settings) -> None:
    """Have the drafter draft from the tokens that the target's answers have most."""
    target = load_target(args.target, settings.drafter.taps, args.device)
    counts = count_tokens(args.work / "data", len(target.head))
    ids = most_frequent(counts, args.size, target.stops)
    write_shortlist(args.drafter or args.work / "best", ids)
    print(json.dumps({"tokens": len(ids), "share": round(float(counts[ids].sum() / counts.sum()), 4)}))


STAGES = {
    "prompts": write_prompts,
    "data": write_data,
    "train": train_drafter,
    "shortlist": write_draft_vocabulary,
    "evaluate": evaluate,
}


def main() -> None:
    d = DEFAULTS.drafter
    parser = argparse.ArgumentParser(prog="tools.train_drafter", description="Train a DFlash drafter for a target.")
    parser.add_argument("stage", choices=list(STAGES))
    parser.add_argument("--target", default="smollm2", help="folder, hub id, .gguf file or smollm2")
    parser.add_argument("--work", type=Path, required=True, help="folder of data, checkpoints and logs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1, help="of one process on a CPU")
    parser.add_argument("--pools", type=int, default=40, help="data: how many pools of 384 answers")
    parser.add_argument("--share", default="0/1", help="data: this process's share of the pools, FIRST/STEP")
    parser.add_argument("--taps", type=int, default=d.taps)
    parser.add_argument("--mask-token", help="train: the token, by text or id, that stands for one to draft")
    parser.add_argument("--workers", type=int, default=1, help="train: processes of --threads each, on a CPU")
    parser.add_argument(
        "--steps", type=int, default=d.steps, help="train: length of the schedule, may be changed later"
    )
    parser.add_argument("--hours", type=float, default=0.0, help="train: length by the clock, in place of --steps")
    parser.add_argument("--size", type=int, default=12288, help="shortlist: how many tokens are drafted from")
    parser.add_argument("--drafter", type=Path, help="shortlist, evaluate: a drafter's folder, by default WORK/best")
    parser.add_argument("--block", type=int, default=d.block)
    parser.add_argument("--layers", type=int, default=d.layers)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    drafter = replace(
        d, taps=args.taps, steps=args.steps, seconds=3600 * args.hours, block=args.block, layers=args.layers
    )
    settings = replace(DEFAULTS, drafter=drafter)
    STAGES[args.stage](args, settings)


if __name__ == "__main__":
    main()
