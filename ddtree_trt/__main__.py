"""Entry point of `ddtree-trt` and of `python -m ddtree_trt`. Not to be imported by anything else: from here on Ctrl-C
ends the process."""

from __future__ import annotations

from ddtree_trt import interrupts

interrupts.end_at_once()  # here and not in `main`: the console script does slow work between import and call


def main() -> None:
    """Run the command line; does not return."""
    from ddtree_trt import cli

    cli.main()


if __name__ == "__main__":
    main()
