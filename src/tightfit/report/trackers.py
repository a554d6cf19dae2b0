"""Logs a run's metrics to the trackers that the job's train.trackers lists: TensorBoard, wandb or
mlflow."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tightfit.errors import InputError
from tightfit.job import Job, Train

_SHOWN = ("loss", "learning_rate", "gradient_norm", "items_per_s", "peak_bytes", "process_bytes")


def check_trackers(job: Job) -> None:
    """Raise InputError if the package of one of the job's trackers is not installed. The default,
    TensorBoard alone, is left out instead."""
    for name in job.train.trackers if job.train.trackers != Train().trackers else ():
        if importlib.util.find_spec(name) is None:
            raise InputError(
                f"job: train.trackers: {name}",
                f"needs the package {name}, which is not installed",
                f'install it: pip install "tightfit[trackers]", or leave out {name}',
            )


class Trackers:
    """A context manager that opens the job's trackers, logs the figures of each step to them, and
    closes them at the end.

    out    the run's folder, where the trackers write their files
    start  number of steps that are already done; 0 for a new run
    """

    def __init__(self, job: Job, out: Path, start: int) -> None:
        self.names, self.job, self.out, self.start = job.train.trackers, job, out, start
        self.writer: Any = None

    def __enter__(self) -> Self:
        if "tensorboard" in self.names:
            self.writer = self._tensorboard()
        if "wandb" in self.names:
            import wandb

            wandb.init(project="tightfit", dir=str(self.out), config=json.loads(self.job.to_json()))
        if "mlflow" in self.names:
            import mlflow

            mlflow.start_run()
            mlflow.log_params(json.loads(self.job.to_json())["train"])
        return self

    def _tensorboard(self) -> Any:
        """Return a writer of TensorBoard's files, or None if the package tensorboard is not installed."""
        if importlib.util.find_spec("tensorboard") is None:
            return None
        from torch.utils.tensorboard.writer import SummaryWriter

        return SummaryWriter(str(self.out / "tensorboard"), purge_step=self.start + 1)

    def log(self, line: dict[str, Any]) -> None:
        """Log the figures of one step to every tracker.

        line  the figures by name, as in a line of metrics.jsonl
        """
        shown = [*_SHOWN, *(name for name in line if name.startswith("evaluation_"))]
        figures = {name: line[name] for name in shown if line.get(name) is not None}
        if self.writer is not None:
            for name, value in figures.items():
                self.writer.add_scalar(name, value, line["step"])
        if "wandb" in self.names:
            import wandb

            wandb.log(figures, step=line["step"])
        if "mlflow" in self.names:
            import mlflow

            mlflow.log_metrics(figures, step=line["step"])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.writer is not None:
            self.writer.close()
        if "wandb" in self.names:
            import wandb

            wandb.finish(exit_code=1 if error else 0)
        if "mlflow" in self.names:
            import mlflow

            mlflow.end_run("FAILED" if error else "FINISHED")
