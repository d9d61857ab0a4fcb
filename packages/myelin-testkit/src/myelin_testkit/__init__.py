"""Myelin testkit: compliance suites, synthetic models and fault-injecting fakes for plugin authors."""

import sys

if "pytest" in sys.modules:
    # The suites' asserts are rewritten as a test module's are, so that a failure shows the values.
    sys.modules["pytest"].register_assert_rewrite(
        *(f"{__name__}.{name}_compliance" for name in ("engine", "planner", "provider", "telemetry", "transport"))
    )
