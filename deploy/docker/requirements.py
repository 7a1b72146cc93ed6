"""Prints the dependencies that pyproject.toml names, one a line: those of every part and one extra.

Images install these before the sources are copied, so that a changed source file does not install
everything again.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, extra: str) -> list[str]:
    """What the project and its `extra` depend on, in the file's order."""
    project = tomllib.loads(pyproject.read_text())["project"]
    return [*project["dependencies"], *project["optional-dependencies"][extra]]


if __name__ == "__main__":
    sys.stdout.write("\n".join(requirements(Path(sys.argv[1]), sys.argv[2])) + "\n")
