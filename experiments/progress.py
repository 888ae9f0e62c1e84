"""Progress of a training: a progress bar or log lines, history.csv and TensorBoard."""

from __future__ import annotations

import csv
import io
import time
from contextlib import AbstractContextManager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from setfold.core.persist import write_atomically

FIRST_LINE, NEXT_LINES = 10.0, 60.0  # seconds until the first and between later log lines


class Display(AbstractContextManager["Display"]):
    """A progress bar on a terminal; otherwise a line per minute, so that logs stay readable.

    Args:
        console: where to print; a quiet console shows nothing.
        epochs: number of epochs of the training.
        done: number of epochs that are done.
    """

    def __init__(self, console: Console, epochs: int, done: float) -> None:
        self.console, self.epochs, self.began_at = console, epochs, done
        self.started = time.monotonic()
        self.next_line = self.started + FIRST_LINE
        self.bar = Progress(
            BarColumn(),
            TextColumn("epoch {task.completed:.1f} of {task.total:.0f}"),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task("", total=epochs)
        self.bar.update(self.task, completed=done)

    def __enter__(self) -> Display:
        self.bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()

    def show(self, epoch: float, numbers: dict[str, float]) -> None:
        """Show the epoch and some metrics."""
        text = "  ".join(f"{name} {value:.4g}" for name, value in numbers.items())
        self.bar.update(self.task, completed=epoch, description=text)
        now = time.monotonic()
        if self.console.is_terminal or now < self.next_line:
            return
        self.next_line = now + NEXT_LINES
        rest = (now - self.started) / (epoch - self.began_at) * (self.epochs - epoch)
        line = f"epoch {epoch:.1f} of {self.epochs}  {text}  about {duration(rest)} left"
        self.console.print(line, soft_wrap=True)


def duration(seconds: float) -> str:
    """Format a duration.

    >>> duration(42), duration(600), duration(9000)
    ('42 s', '10 min', '2.5 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


class Log:
    """Writes a training's history to history.csv and, if installed, to TensorBoard.

    Args:
        folder: folder of the training.
        history: history before the training was resumed.
        step: step at which the training is resumed.
    """

    def __init__(self, folder: Path, history: dict[str, list[float]], step: int) -> None:
        self.folder = folder
        self._write(history)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self.writer = None
        else:  # discard entries that are newer than the checkpoint
            self.writer = SummaryWriter(folder / "tensorboard", purge_step=step + 1)

    def note(self, history: dict[str, list[float]], step: int) -> None:
        """Write a history that has one more entry, from this step."""
        self._write(history)
        if self.writer is not None:
            for name, values in history.items():
                self.writer.add_scalar(name, values[-1], step)
            self.writer.flush()

    def close(self) -> None:
        """Close the log."""
        if self.writer is not None:
            self.writer.close()

    def _write(self, history: dict[str, list[float]]) -> None:
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow(history)
        rows.writerows(zip(*history.values(), strict=True))
        # Rewritten each time: it is short, and this drops entries newer than the checkpoint.
        write_atomically(self.folder / "history.csv", text.getvalue().encode())
