"""Loggers of TensorBoard, Weights & Biases and MLflow, each by its own library.

Each logger continues the log of an earlier call: `open` returns the last step that the log has.
"""

import io
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from shoal.core.optional import require
from shoal.core.storage.files import read_json, write_json
from shoal.integrations.loggers import log_id, logs_folder, safe_name
from shoal.training.folder.run import Run

__all__ = ["MlflowLogger", "TensorBoardLogger", "WandbLogger"]

PROJECT = "shoal"
"""Project of Weights & Biases and experiment of MLflow, unless the user names another."""


class TensorBoardLogger:
    """Event files in `logs/tensorboard`: type `tensorboard --logdir runs`."""

    def __init__(self, run: Run) -> None:
        self.folder = logs_folder(run) / "tensorboard"
        self._config: dict[str, Any] = {}
        self._made: Any = None

    def open(self) -> int:
        """The last step in the event files of earlier calls."""
        if not self.folder.is_dir():
            return -1
        module = "tensorboard.backend.event_processing.event_accumulator"
        events = require(module, extra="loggers").EventAccumulator(str(self.folder), {"scalars": 1})
        events.Reload()
        known = "epoch" in events.Tags()["scalars"]
        return events.Scalars("epoch")[-1].step if known else -1

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Settings, for the first event file."""
        self._config = {} if self.folder.is_dir() else dict(config)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Scalars, written at once."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_image(self, name: str, png: bytes, step: int) -> None:
        """A figure."""
        pixels = require("numpy", extra="loggers").asarray(_picture(png))
        self._writer.add_image(f"figures/{name}", pixels, step, dataformats="HWC")

    def close(self, finished: bool) -> None:
        """Write what is left."""
        if self._made is not None:
            self._made.close()

    @property
    def _writer(self) -> Any:
        """Made by the first row, so that a run that never begins leaves no file."""
        if self._made is None:
            # TensorBoard reads files in the order of their names, which have whole seconds.
            while any(self.folder.glob(f"events.out.tfevents.{int(time.time())}.*")):
                time.sleep(0.05)
            self._made = require("torch.utils.tensorboard", extra="loggers").SummaryWriter(
                str(self.folder)
            )
            if self._config:
                self._add_settings()
        return self._made

    def _add_settings(self) -> None:
        """Settings as hyper-parameters of this very log; `add_hparams` would make another."""
        module = require("torch.utils.tensorboard.summary", extra="loggers")
        for summary in module.hparams(self._config, {"loss": 0.0}):
            self._made.file_writer.add_summary(summary)
        lines = [f"| {name} | {value} |" for name, value in self._config.items()]
        self._made.add_text("config", "\n".join(["| setting | value |", "| --- | --- |", *lines]))


class WandbLogger:
    """A run of Weights & Biases, with the id of the Shoal run.

    `WANDB_MODE`, `WANDB_PROJECT`, `WANDB_DIR` and the library's other variables are heard. An
    active `wandb.run` is used and stays open.
    """

    def __init__(self, run: Run) -> None:
        self.wandb: Any = require("wandb", extra="loggers")
        self.run: Any = None
        self._theirs = False
        self._id = log_id(run)
        self._folder = None if run.folder is None else logs_folder(run)
        self._name = None if run.folder is None else run.folder.name

    def open(self) -> int:
        """Begin or continue the run; offline runs have their last step in a file."""
        self.run, self._theirs = self.wandb.run, self.wandb.run is not None
        if not self._theirs:
            place = None if "WANDB_DIR" in os.environ else self._folder
            if place is not None:
                place.mkdir(parents=True, exist_ok=True)
            self.run = self.wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                id=self._id,
                name=self._name,
                dir=None if place is None else str(place),
                resume="allow",
            )
        return max(self._stored_step(), self.run.step - 1)

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Settings."""
        self.run.config.update(dict(config), allow_val_change=True)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """A row of history."""
        self.run.log(dict(values), step)
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_json(self._folder / "wandb.json", {"id": self._id, "step": step})

    def log_image(self, name: str, png: bytes, step: int) -> None:
        """A figure."""
        self.run.log({f"figures/{name}": self.wandb.Image(_picture(png))}, step)

    def close(self, finished: bool) -> None:
        """End the run, if this logger began it."""
        if not self._theirs:
            self.run.finish(exit_code=0 if finished else 1)

    def _stored_step(self) -> int:
        path = None if self._folder is None else self._folder / "wandb.json"
        return int(read_json(path)["step"]) if path is not None and path.exists() else -1


class MlflowLogger:
    """A run of MLflow, with the id of the Shoal run as its tag `shoal.run_id`.

    An active run of MLflow is used and stays open. Else `MLFLOW_TRACKING_URI` or
    `mlflow.set_tracking_uri` say where to log; by default a database in `logs/mlflow`. The
    experiment is `MLFLOW_EXPERIMENT_NAME`, or "shoal".
    """

    BATCH = 500
    """MLflow takes at most 1000 metrics, and 100 settings, at once."""

    def __init__(self, run: Run) -> None:
        self.mlflow: Any = require("mlflow", extra="loggers")
        self._run, self._folder = run, logs_folder(run) / "mlflow"
        self._id, self._theirs = "", False

    def open(self) -> int:
        """Begin or continue the run."""
        active = self.mlflow.active_run()
        self._theirs = active is not None
        uri = None if self._theirs or self.mlflow.is_tracking_uri_set() else self._own_store()
        self.client = self.mlflow.MlflowClient(tracking_uri=uri)
        self._id = active.info.run_id if active is not None else self._continued(uri is not None)
        known = self.client.get_metric_history(self._id, "epoch")
        return max((metric.step for metric in known), default=-1)

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Settings; those of a continued run stay."""
        entities: Any = self.mlflow.entities
        known = self.client.get_run(self._id).data.params
        new = [
            entities.Param(safe_name(name), str(value)[:5000])
            for name, value in config.items()
            if safe_name(name) not in known
        ]
        for some in _batches(new, 100):
            self.client.log_batch(self._id, params=some)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """A row of history."""
        entities, now = self.mlflow.entities, int(1000 * time.time())
        rows = [entities.Metric(safe_name(k), float(v), now, step) for k, v in values.items()]
        for some in _batches(rows, self.BATCH):
            self.client.log_batch(self._id, metrics=some)

    def log_image(self, name: str, png: bytes, step: int) -> None:
        """A figure, as an artifact."""
        self.client.log_image(self._id, _picture(png), artifact_file=f"figures/{name}.png")

    def close(self, finished: bool) -> None:
        """End the run, if this logger began it."""
        if not self._theirs:
            self.client.set_terminated(self._id, "FINISHED" if finished else "KILLED")

    def _own_store(self) -> str:
        """A database inside the run's folder; MLflow keeps no more plain files."""
        self._folder.mkdir(parents=True, exist_ok=True)
        return f"sqlite:///{self._folder.absolute() / 'mlflow.db'}"

    def _continued(self, own: bool) -> str:
        """The run with this run's tag, or a new one."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self.client.get_experiment_by_name(name)
        place = (self._folder.absolute() / "artifacts").as_uri() if own else None
        experiment = found.experiment_id if found else self.client.create_experiment(name, place)
        tag = log_id(self._run)
        earlier = self.client.search_runs([experiment], f"tags.`shoal.run_id` = '{tag}'")
        if earlier:
            self.client.update_run(earlier[0].info.run_id, status="RUNNING")
            return earlier[0].info.run_id
        folder = self._run.folder
        called = None if folder is None else folder.name
        new = self.client.create_run(experiment, tags={"shoal.run_id": tag}, run_name=called)
        return new.info.run_id


def _picture(png: bytes) -> Any:
    return require("PIL.Image", extra="report").open(io.BytesIO(png)).convert("RGB")


def _batches(values: Sequence[Any], size: int) -> Iterator[list[Any]]:
    rest = iter(values)
    while some := list(islice(rest, size)):
        yield some
