"""Whether a token could go through the chain now. Pure: told of events, asked for the truth."""

from __future__ import annotations

from myelin.orchestrator.events import NodeEvent, NodeLog, PhaseEvent, ProgressEvent
from myelin.telemetry.phases import RECOVERY, Phase

STARTING = "starting"
SERVING = "serving"
RECOVERING = "recovering"
LOST = "lost"
ENDING = "ending"


class Health:
    """An observer that knows how the run is.

    Attributes:
        status: ``starting`` until a token went through the whole chain, then ``serving``; ``recovering`` while a lost
            node is being replaced; ``lost`` once it can't go on; ``ending``.
        phase_now: The phase that began last, for those who wait.
    """

    def __init__(self) -> None:
        self.status = STARTING
        self.phase_now = ""

    @property
    def healthy(self) -> bool:
        """A token went through, and nothing was lost since."""
        return self.status == SERVING

    def phase(self, event: PhaseEvent) -> None:
        """A phase began or ended. (``serving`` begins only once the probe's token came through.)"""
        if event.state == "started":
            self.phase_now = event.phase
        if self.status in (LOST, ENDING):
            return
        if event.state == "failed":
            self.status = LOST
        elif event.phase == Phase.SERVING:
            self.status = SERVING if event.state == "started" else ENDING
        elif event.phase == RECOVERY:
            self.status = RECOVERING if event.state == "started" else SERVING
        elif event.phase in (Phase.SHUTDOWN, Phase.PROVIDER_STOP):
            self.status = ENDING

    def node(self, event: NodeEvent) -> None:
        """A node came into another state: once one is lost, nothing goes through until the recovery is done."""
        if event.state == "lost" and self.status == SERVING:
            self.status = RECOVERING

    def progress(self, event: ProgressEvent) -> None:
        """Nothing."""

    def log(self, event: NodeLog) -> None:
        """Nothing."""
