"""What people see of a run: bars on a terminal, plain lines elsewhere; phases and nodes' own lines where asked for."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from myelin.cli.output import human_bytes, tell
from myelin.orchestrator.events import NodeEvent, NodeLog, NodeState, PhaseEvent, ProgressEvent

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINE_EVERY_S = 2.0
"""Plain lines about one stage's phase come no more often than this, except for its end."""

STILL_EVERY_S = 15.0
"""A plain line that says the same as the last one comes no more often than this."""

_PHASE_WORDS = {"open": "opening", "fetch": "fetching", "compile": "compiling", "load": "loading"}
_IN_BYTES = frozenset({"fetch", "load"})


@dataclass(frozen=True, slots=True)
class _Told:
    """What was last said about a stage's phase, and when."""

    when: float
    done: int
    total: int


class Display:
    """An observer for people. A context: what it shows of progress is taken away at its end.

    Args:
        level: ``observability.log_level``: ``info`` also shows the phases, ``debug`` also what the nodes write.
        bars: Whether to draw bars; None where standard error is a terminal.
        write: Where lines go.
    """

    def __init__(
        self,
        level: str = "warning",
        *,
        bars: bool | None = None,
        write: Callable[[str], None] = tell,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._phases = level in ("debug", "info")
        self._nodes = level == "debug"
        self._bars = sys.stderr.isatty() if bars is None else bars
        self._write = write
        self._clock = clock
        self._progress: Progress | None = None
        self._tasks: dict[int, TaskID] = {}
        self._told: dict[tuple[int, str], _Told] = {}
        self._lost: dict[str, str] = {}
        self._serving = False

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.quiet()

    def quiet(self) -> None:
        """Take the bars away; more progress brings them back."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
            self._tasks.clear()

    def line(self, text: str) -> None:
        """Show a line, above the bars where there are any."""
        if self._progress is not None:
            self._progress.console.print(text, markup=False, highlight=False)
        else:
            self._write(text)

    def phase(self, event: PhaseEvent) -> None:
        """A phase began or ended."""
        if event.phase == "stage_provision" and event.state != "started":
            self.quiet()
        if event.phase == "serving":
            self._serving = event.state == "started"
        if not self._phases:
            return
        took = f" ({event.seconds:.2f} s)" if event.state != "started" else ""
        detail = f": {event.detail}" if event.detail else ""
        self.line(f"{event.phase} {event.state}{took}{detail}")

    def node(self, event: NodeEvent) -> None:
        """A node came into another state: one that is lost, and another in its place, are shown to everybody."""
        if event.state is NodeState.LOST:
            self._lost[event.node] = event.detail
        elif event.state is NodeState.STARTING and event.node in self._lost:
            if self._serving and self._bars:
                self._write("")  # an answer may have been in the middle of a line of the terminal
            self.line(f"{event.node} was lost ({self._lost.pop(event.node)}); starting another")
        elif event.state is NodeState.REPLACED:
            self.line(f"{event.node} is back after {event.seconds:.1f} s")

    def progress(self, event: ProgressEvent) -> None:
        """A node got further with its stage. While answers come, only that it is back is shown."""
        if self._serving:
            return
        if self._bars:
            self._draw(event)
        else:
            self._tell(event)

    def log(self, event: NodeLog) -> None:
        """A node wrote a line."""
        if self._nodes:
            self.line(f"{event.node} {event.stream} | {event.text}")

    def _tell(self, event: ProgressEvent) -> None:
        """A plain line, unless there was one a moment ago."""
        complete = 0 < event.total <= event.done
        now = self._clock()
        last = self._told.get((event.stage, event.phase))
        if last is not None:
            same = (event.done, event.total) == (last.done, last.total)
            if now - last.when < (STILL_EVERY_S if same else 0.0 if complete else LINE_EVERY_S) or (same and complete):
                return
        self._told[event.stage, event.phase] = _Told(now, event.done, event.total)
        self._write(f"{_who(event)}: {_PHASE_WORDS.get(event.phase, event.phase)} {_amount(event)}".rstrip())

    def _draw(self, event: ProgressEvent) -> None:
        """A bar for each stage."""
        if self._progress is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=30),
                TextColumn("{task.fields[amount]}"),
                console=Console(stderr=True),
                transient=True,
            )
            self._progress.start()
        if event.stage not in self._tasks:
            self._tasks[event.stage] = self._progress.add_task("", total=None, amount="")
        self._progress.update(
            self._tasks[event.stage],
            description=f"{_who(event)} {_PHASE_WORDS.get(event.phase, event.phase)}",
            completed=event.done,
            total=event.total or None,
            amount=_amount(event),
        )


def _who(event: ProgressEvent) -> str:
    """Whose progress it is: a stage's, or the model's, which is opened before there are stages."""
    return f"stage {event.stage}" if event.stage >= 0 else "model"


def _amount(event: ProgressEvent) -> str:
    """How much of how much."""
    show = human_bytes if event.phase in _IN_BYTES else str
    if event.total:
        return f"{show(event.done)} of {show(event.total)}"
    return show(event.done) if event.done else ""
