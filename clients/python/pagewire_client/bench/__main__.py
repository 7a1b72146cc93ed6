"""`python -m pagewire_client.bench`: a further sending process, for the one that started it."""

from __future__ import annotations

import sys

from pagewire_client.bench.processes import main

if __name__ == "__main__":
    sys.exit(main())
