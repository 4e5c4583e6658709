"""Progress: bars with tokens per second and time left, on standard error; plain lines where that is no terminal."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from lenspipe.plan import Plan

_UNITS = {"encode": "tokens", "capture": "tokens", "read": "rows", "assemble": "rows"}


class _Speed(ProgressColumn):
    """Units per second since the stage began."""

    def render(self, task: Any) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.0f}/s" if speed else "", justify="right")


class Progress:
    """Shows what a run does; says nothing when quiet."""

    def __init__(self, quiet: bool) -> None:
        console = Console(stderr=True)
        self._quiet = quiet
        self._live = console.is_terminal and not quiet
        self._bars = RichProgress(
            TextColumn("{task.description:<9}"),
            BarColumn(bar_width=32),
            TextColumn("{task.completed:,.0f} of {task.total:,.0f} {task.fields[unit]}"),
            _Speed(),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=console,
            disable=not self._live,
        )
        self._tasks: dict[str, TaskID] = {}
        self._totals: dict[str, int] = {}
        self._done: dict[str, int] = {}
        self._began: dict[str, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Settle what has been shown; nothing moves any more."""
        self._finish()
        self._bars.stop()

    def begin(self, plan: Plan) -> None:
        """Show the bars of what is left to do."""
        if plan.is_done:
            return
        todo = {
            "encode": plan.n_tokens([item.shard for item in plan.encode]),
            "capture": plan.n_tokens([item.shard for item in plan.capture]),
            "read": plan.n_rows([item.shard for item in plan.read]),
            "assemble": plan.n_rows() * len(plan.sites) if plan.assemble else 0,
        }
        for stage in self._tasks:
            self._bars.remove_task(self._tasks[stage])
        self._tasks, self._done, self._began = {}, {}, {}
        self._totals = {stage: n for stage, n in todo.items() if n}
        for stage, n in self._totals.items():
            self._tasks[stage] = self._bars.add_task(stage, start=False, total=n, unit=_UNITS[stage])
        self._bars.start()

    def advance(self, stage: str, amount: int) -> None:
        """Count work that was done in this process."""
        if stage not in self._tasks:
            return
        if stage not in self._began:
            self._finish()
            self._began[stage] = time.monotonic()
            self._bars.start_task(self._tasks[stage])
        self._done[stage] = self._done.get(stage, 0) + amount
        self._bars.update(
            self._tasks[stage], completed=self._done[stage], total=max(self._totals[stage], self._done[stage])
        )

    def _finish(self) -> None:
        """Settle stages that ended: totals were estimates until the text was tokenized."""
        for stage in [name for name in self._began if name in self._totals]:
            del self._totals[stage]
            done = self._done[stage]
            self._bars.update(self._tasks[stage], completed=done, total=done)
            if not self._live and not self._quiet:
                print(f"{stage}: {done:,} {_UNITS[stage]}", file=sys.stderr)


@contextmanager
def counting(what: str, unit: str) -> Iterator[Callable[[int], None]]:
    """Show a count that grows towards no known end; yields what tells it of more."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), TextColumn("{task.completed:,.0f} {task.fields[unit]}"), _Speed())
    with RichProgress(*columns, console=console, disable=not console.is_terminal, transient=True) as shown:
        task = shown.add_task(what, total=None, unit=unit)
        yield lambda amount: shown.advance(task, amount)
