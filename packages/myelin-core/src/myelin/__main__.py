"""``python -m myelin``."""

from __future__ import annotations

import sys

from myelin.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
