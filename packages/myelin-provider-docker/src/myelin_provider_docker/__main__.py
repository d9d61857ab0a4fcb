"""``python -m myelin_provider_docker``: the same as ``myelin docker``, where the command itself isn't on the path."""

from __future__ import annotations

import sys

from myelin.plugin import MyelinError
from myelin_provider_docker.commands import app

if __name__ == "__main__":
    try:
        app(prog_name="myelin docker")
    except MyelinError as error:
        sys.stderr.write(f"Error: {error.message}\nHint: {error.hint}\n")
        sys.exit(error.exit_code)
