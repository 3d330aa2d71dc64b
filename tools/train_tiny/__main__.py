"""Command line: `python -m tools.train_tiny STAGE --work DIR --out DIR`."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from .pipeline import STAGES, Run, copy_packaged, run_stages
from .settings import Settings


def main() -> None:
    defaults = Settings()
    parser = argparse.ArgumentParser(prog="tools.train_tiny", description="Make a tiny target and its drafters.")
    parser.add_argument("stage", choices=["all", *STAGES])
    parser.add_argument("--work", type=Path, required=True, help="folder of intermediate files")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of target, drafter, tokenizer, prompts, results"
    )
    parser.add_argument("--init", type=Path, help="target folder to start from (same shape; its tokenizer next to it)")
    parser.add_argument("--init-drafter", type=Path, help="drafter folder to start from (same shape)")
    parser.add_argument("--conversations", type=int, default=defaults.corpus.conversations)
    parser.add_argument("--target-seconds", type=float, default=defaults.target.seconds)
    parser.add_argument("--target-rate", type=float, default=1.0, help="multiplies the target's peak learning rates")
    parser.add_argument("--data-seconds", type=float, default=defaults.draft_data.seconds)
    parser.add_argument("--drafter-seconds", type=float, default=defaults.drafter.seconds)
    parser.add_argument("--dspark-seconds", type=float, default=defaults.dspark.seconds)
    parser.add_argument("--markov-rank", type=int, default=defaults.dspark.markov_rank)
    parser.add_argument("--tune-body", action="store_true", help="dspark: train the whole drafter, not its head alone")
    parser.add_argument("--eagle3-seconds", type=float, default=defaults.eagle3.seconds)
    parser.add_argument("--own-head", action="store_true", help="eagle3: train a head too, from the target's on")
    parser.add_argument(
        "--packaged", action="store_true", help="take target, drafter and tokenizer from the package; evaluate: all"
    )
    parser.add_argument("--block", type=int, default=defaults.drafter.block)
    parser.add_argument("--workers", type=int, default=defaults.workers, help="one-thread training processes")
    args = parser.parse_args()
    settings = replace(
        defaults,
        corpus=replace(defaults.corpus, conversations=args.conversations),
        target=replace(
            defaults.target,
            seconds=args.target_seconds,
            adam_rate=defaults.target.adam_rate * args.target_rate,
            muon_rate=defaults.target.muon_rate * args.target_rate,
        ),
        draft_data=replace(defaults.draft_data, seconds=args.data_seconds),
        drafter=replace(defaults.drafter, seconds=args.drafter_seconds, block=args.block),
        dspark=replace(
            defaults.dspark, seconds=args.dspark_seconds, markov_rank=args.markov_rank, body_frozen=not args.tune_body
        ),
        eagle3=replace(defaults.eagle3, seconds=args.eagle3_seconds, own_head=args.own_head),
        workers=args.workers,
    )
    if args.packaged:
        others = ("dspark", "eagle3") if args.stage == "evaluate" else ()
        copy_packaged(args.out, ("target", "drafter", "tokenizer", *others))
    run = Run(settings, args.work, args.out, args.init, args.init_drafter)
    run_stages(run, list(STAGES) if args.stage == "all" else [args.stage])


if __name__ == "__main__":
    main()
