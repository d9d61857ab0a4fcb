"""The built-in planner, asked last: a chain of stages that take equally long (see :mod:`myelin.planner.pipeline`)."""

from __future__ import annotations

from myelin.planner.pipeline import plan_pipeline
from myelin.planner.run_plan import PlanRequest, RunPlan
from myelin.plugin import hookimpl


@hookimpl(trylast=True)
def myelin_plan(request: PlanRequest) -> RunPlan | None:
    """Plan ``request``; never declines."""
    return plan_pipeline(request)
