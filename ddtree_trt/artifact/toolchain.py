"""Versions of the packages that compile engines."""

from contextlib import suppress
from importlib import metadata

RANKS = "ranks"  # key of a running engine's toolchain: processes over which its target is split


def installed_versions(*packages: str) -> dict[str, str]:
    """Versions of those of the packages that are installed, without importing any."""
    versions = {}
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions
