"""The version of Pagewire that runs, as both planes tell it to people.

Owns: where it is found. Does not know: who asks.
"""

from __future__ import annotations

import importlib.metadata


def software_version() -> str:
    """The installed package's version; "unknown" where the code runs without being installed."""
    try:
        return importlib.metadata.version("pagewire")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
