"""When a node is told (again) to load its stage: pure rules over what was sent and what progress came.

- Never sent: send at once.
- Sent, and no progress ever came: send again after :data:`NO_PROGRESS_S`, and so on.
- Progress is active (younger than :data:`PROGRESS_OLD_S`): never.
- Progress has grown older than that: send again, once for each such time.
- The work has not got any further for ``stall_s``: the stage has failed.

A message of progress shows that the node lives; the work *gets further* only if the phase or the amount changes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

NO_PROGRESS_S = 2.0
PROGRESS_OLD_S = 60.0


class Verdict(StrEnum):
    """What to do now."""

    SEND = "send"
    WAIT = "wait"
    STALLED = "stalled"


@dataclass(frozen=True, slots=True)
class ProvisionState:
    """What has happened to one provision. Times are seconds of one monotonic clock.

    Attributes:
        began: When the stage's provision began.
        sent: How often it was sent.
        sent_at: When last.
        progress_at: When the last message of progress came, or None.
        further_at: When the work last got further.
        mark: The last phase and amount done.
    """

    began: float
    sent: int = 0
    sent_at: float = 0.0
    progress_at: float | None = None
    further_at: float = 0.0
    mark: tuple[str, int] = ("", 0)

    def after_send(self, now: float) -> ProvisionState:
        """It was sent."""
        further_at = self.further_at if self.sent else now
        return replace(self, sent=self.sent + 1, sent_at=now, further_at=further_at)

    def after_progress(self, now: float, phase: str, done: int) -> ProvisionState:
        """A message of progress came."""
        moved = (phase, done) != self.mark or self.progress_at is None
        return replace(self, progress_at=now, mark=(phase, done), further_at=now if moved else self.further_at)


@dataclass(frozen=True, slots=True)
class Decision:
    """A verdict and, for WAIT, the time at which to decide again if nothing comes before."""

    verdict: Verdict
    until: float = 0.0


def decide(state: ProvisionState, now: float, stall_s: float) -> Decision:
    """What to do at ``now``, by the rules above."""
    if not state.sent:
        return Decision(Verdict.SEND)
    stalled_at = state.further_at + stall_s
    if now >= stalled_at:
        return Decision(Verdict.STALLED)
    if state.progress_at is None:
        due = state.sent_at + NO_PROGRESS_S
    else:
        due = max(state.progress_at, state.sent_at) + PROGRESS_OLD_S
    if now >= due:
        return Decision(Verdict.SEND)
    return Decision(Verdict.WAIT, until=min(due, stalled_at))
