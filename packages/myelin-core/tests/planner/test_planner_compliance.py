"""The built-in planner passes the suite that anyone's planner does."""

from __future__ import annotations

from myelin.builtins.planner_pipeline import myelin_plan
from myelin.plugin import PlanRequest, RunPlan
from myelin_testkit.planner_compliance import PlannerCompliance


class TestPipelinePlanner(PlannerCompliance):
    def plan(self, request: PlanRequest) -> RunPlan | None:
        return myelin_plan(request)
