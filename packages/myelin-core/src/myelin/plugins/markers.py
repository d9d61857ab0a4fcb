"""The two pluggy markers of this project."""

from __future__ import annotations

import pluggy

PROJECT = "myelin"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
