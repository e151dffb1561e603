"""Metrics over agent steps: metrics.csv, TensorBoard, Weights & Biases."""

from __future__ import annotations

import contextlib
import csv
import io
import uuid
from collections.abc import Iterable, Mapping
from numbers import Integral
from pathlib import Path
from typing import Any

from beast.errors import InputError, MissingPackage, first_line
from beast.files import read_json, replace_file

# The first columns of metrics.csv, whose names dashboards know. All others follow in the order of their first values.
COLUMNS = (
    *("step", "frames", "hours", "charts/episodic_return", "charts/episodic_length", "charts/SPS"),
    *("charts/learning_rate", "losses/policy_loss", "losses/value_loss", "losses/entropy", "losses/approx_kl"),
    *("losses/clipfrac", "losses/explained_variance", "stats/policy_lag_mean", "stats/policy_lag_max"),
    *("stats/inference_batch", "stats/learner_wait", "stats/actor_wait"),
)


class Metrics:
    """Numbers over agent steps: rows of `<path>/metrics.csv`, and on request TensorBoard and Weights & Biases.

    `resume_step` is the step of the checkpoint from which the run resumes: rows and events after it describe lost
    training and are dropped. None begins a new file. With `track`, into this `project`, raises MissingPackage without
    wandb.
    """

    def __init__(self, path: Path, resume_step: int | None, tensorboard=True, track=False, project="beast"):
        self._wandb = start_wandb(path, project, new=resume_step is None) if track else None
        self._path = path / "metrics.csv"
        purge_step = 0 if resume_step is None else resume_step + 1
        columns, rows = read_rows(self._path) if purge_step and self._path.exists() else (list(COLUMNS), [])
        self._rewrite(columns, [row for row in rows if int(row["step"]) < purge_step])
        self._tensorboard: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # only on request: it takes a second and 60 MB

            self._tensorboard = SummaryWriter(str(path), purge_step=purge_step)
            self._write_hyperparameters(read_json(path / "config.json", missing={}))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record `values` at agent step `step`; the file has them on return. A new name becomes a new column.

        Raises InputError if the disk is full.
        """
        try:
            if new := [name for name in values if name not in self._writer.fieldnames]:
                self._file.close()
                columns, rows = read_rows(self._path)
                self._rewrite(columns + new, rows)
            # Nine digits are exact for any float32; integers keep all their digits.
            row = {name: int(x) if isinstance(x, Integral) else f"{float(x):.9g}" for name, x in values.items()}
            self._writer.writerow({"step": step, **row})
            self._file.flush()
            if self._tensorboard:
                for name, value in values.items():
                    self._tensorboard.add_scalar(name, value, step)
                self._tensorboard.flush()
            if self._wandb:
                self._wandb.log({"step": step, **values})
        except OSError as error:
            raise InputError(
                f"{self._path}: metrics cannot be written ({first_line(error)}); the checkpoints are untouched. "
                "Free some space, and give the same command again to go on from the newest"
            ) from error

    def _write_hyperparameters(self, config: dict) -> None:
        """The run's flags, for TensorBoard's tabs of texts and of hyperparameters."""
        from torch.utils.tensorboard.summary import hparams

        values = {name: x if isinstance(x, (bool, int, float, str)) else str(x) for name, x in config.items()}
        table = "".join(f"|{name}|{str(x).replace('|', '&#124;')}|\n" for name, x in values.items())
        self._tensorboard.add_text("hyperparameters", f"|flag|value|\n|-|-|\n{table}")
        for summary in hparams(values, {"charts/episodic_return": 0}):  # `add_hparams` would begin a run of its own
            self._tensorboard.file_writer.add_summary(summary)

    def film(self, step: int, path: Path) -> None:
        """Show a GIF."""
        if self._tensorboard:
            from PIL import Image
            from tensorboard.compat.proto.summary_pb2 import Summary

            with Image.open(path) as image:
                width, height = image.size
            encoded = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=path.read_bytes())
            value = Summary.Value(tag="eval/film", image=encoded)
            self._tensorboard.file_writer.add_summary(Summary(value=[value]), step)
        if self._wandb:
            import wandb

            self._wandb.log({"step": step, "eval/film": wandb.Video(str(path), format="gif")})

    def close(self) -> None:
        """Close the files and end the Weights & Biases run."""
        with contextlib.suppress(OSError):  # a full disk, which `write` has told of
            self._file.close()
        if self._tensorboard:
            with contextlib.suppress(OSError):
                self._tensorboard.close()
        if self._wandb:
            self._wandb.finish()

    def _rewrite(self, columns: list[str], rows: Iterable[Mapping[str, str]]) -> None:
        """Replace metrics.csv by these columns and rows, and open it for appending."""
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        replace_file(self._path, lambda file: file.write(text.getvalue().encode()))
        self._file = open(self._path, "a", encoding="utf-8", newline="")
        self._writer = csv.DictWriter(self._file, columns, lineterminator="\n")


def read_rows(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Columns and complete rows of a metrics.csv, without a last row that a crash cut short."""
    content = path.read_text(encoding="utf-8")
    reader = csv.DictReader(io.StringIO(content[: content.rfind("\n") + 1]))
    # DictReader puts None for a missing cell, and under None what is more than the columns.
    rows = [row for row in reader if None not in (*row, *row.values()) and row.get("step", "").isdigit()]
    return list(reader.fieldnames or COLUMNS), rows


def start_wandb(path: Path, project: str, new: bool) -> Any:
    """A run of Weights & Biases with the name and flags of the run at `path`, resumed unless it is `new`."""
    try:
        import wandb
    except ImportError:
        message = "--track needs Weights & Biases, which is not installed: pip install wandb, or leave --track off"
        raise MissingPackage(message) from None
    id_path = path / "wandb_id"
    if new or not id_path.exists():
        id_path.write_text(uuid.uuid4().hex)
    names = {"project": project, "name": path.name, "id": id_path.read_text(), "dir": str(path)}
    run = wandb.init(**names, resume="allow", config=read_json(path / "config.json", missing={}))
    run.define_metric("*", step_metric="step")  # wandb's own may not decrease, but a resume goes back to its checkpoint
    return run
