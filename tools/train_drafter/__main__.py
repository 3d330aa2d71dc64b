"""Command line: `python -m tools.train_drafter fit --target TARGET --out DIR`."""

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from . import settings
from .stages import STAGES, work


def main() -> None:
    defaults = settings.DEFAULTS
    d = defaults.drafter
    parser = argparse.ArgumentParser(prog="tools.train_drafter", description="Train a drafter for a target.")
    parser.add_argument("stage", choices=list(STAGES))
    parser.add_argument("--target", default="smollm2", help="folder, hub id, .gguf file or smollm2")
    parser.add_argument(
        "--out", type=Path, required=True, help="the drafter's folder; data, checkpoint, logs: OUT/work"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, help="on a CPU, of each process")
    parser.add_argument("--minutes", type=float, help="of training; 20 on a GPU, 480 on a CPU")
    parser.add_argument("--writers", type=int, help="processes that write answers; 3 on a GPU, 1 on a CPU")
    parser.add_argument("--batch", type=int, help="answers written at once; 384 on a GPU, 96 on a CPU")
    parser.add_argument("--pools", type=int, help="files of answers, after which none are written; by default no end")
    parser.add_argument("--engine", type=Path, help="of the target, with many slots: it writes the answers")
    parser.add_argument("--share", default="0/1", help="data: this process's share of the pools, FIRST/STEP")
    parser.add_argument("--kind", choices=["dflash", "dspark", "eagle3"], default=d.kind)
    parser.add_argument("--init", type=Path, help="a drafter's folder to begin with")
    parser.add_argument("--rates", type=float, default=1.0, help="times the recipe's; 0.2 to go on with a good drafter")
    parser.add_argument("--taps", type=int, default=d.taps)
    parser.add_argument("--mask-token", help="the token, by text or id, that stands for one to draft")
    parser.add_argument("--block", type=int, default=d.block)
    parser.add_argument("--layers", type=int, default=d.layers)
    parser.add_argument("--window", type=int, default=d.window, help="positions that the drafter sees; 0: all")
    parser.add_argument("--shortlist", type=int, default=0, help="draft from so many tokens only, the most frequent")
    parser.add_argument("--drafter", type=Path, help="evaluate: a drafter's folder, by default OUT")
    args = parser.parse_args()
    for name, value in (settings.GPU if args.device.startswith("cuda") else settings.CPU).items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    args.work = args.out / "work"
    rates = {name: args.rates * getattr(d.schedule, name) for name in ("adam_rate", "muon_rate")}
    schedule = replace(d.schedule, seconds=60 * args.minutes, **rates)
    shape = {"kind": args.kind, "taps": args.taps, "block": args.block, "layers": args.layers, "window": args.window}
    drafter = replace(d, **shape, sequences=args.sequences, tokens=args.tokens, schedule=schedule)
    pool = max(1, defaults.data.batch * defaults.data.pool // args.batch)
    chosen = replace(defaults, drafter=drafter, data=replace(defaults.data, batch=args.batch, pool=pool))
    work(args, chosen)


if __name__ == "__main__":
    main()
