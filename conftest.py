"""How generated tests run here: how long an example takes says nothing, since the cores are shared with other tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# The first text that is drawn in a new checkout builds a table of Unicode, which takes a second or two.
settings.register_profile("shared-cores", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared-cores")
