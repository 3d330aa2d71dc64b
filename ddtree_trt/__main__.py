"""Entry point of `ddtree-trt` and of `python -m ddtree_trt`."""

import sys


def main() -> None:
    """Run the command line; does not return. Ctrl-C ends it with 130, as shells report it, while it still loads too."""
    try:
        from ddtree_trt import cli

        cli.main()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
