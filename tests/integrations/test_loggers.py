"""Loggers, each read back by its own library after a whole run."""

import csv
import json
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from small_runs import Fuse, points, quick
from torch import nn

from shoal.cli.main import main
from shoal.core.errors import ConfigError, ShoalWarning, StorageError
from shoal.inference.ensemble import Ensemble
from shoal.integrations import loggers as loggers_module
from shoal.integrations.loggers import make_loggers, numbers, settings

pytestmark = pytest.mark.usefixtures("warm")

STEPS = [4, 8, 12]
"""Steps of the epochs of the small run."""

OPTIONS = {"epochs": 3, "method": "f-kde", "strength": 100.0, "save_every": 0}


class Kept:
    """A user's own logger."""

    def __init__(self):
        self.rows, self.config, self.images = [], None, {}

    def log(self, values, step):
        self.rows.append((step, dict(values)))

    @property
    def steps(self):
        return [step for step, _ in self.rows]


class Whole(Kept):
    """One that also takes settings and figures."""

    def log_config(self, config):
        self.config = config

    def log_image(self, name, png, step):
        self.images[name] = png, step


def expected(run, name):
    """The numbers of the history by step."""
    found = {row["step"]: numbers(row).get(name) for row in run.history}
    return {step: value for step, value in found.items() if value is not None}


def assert_logged(run, read):
    """A log has every number of the history once; `read` returns [(step, value)] of a name."""
    names = {name for row in run.history for name in numbers(row)}
    assert {"loss", "drive", "push", "ratio", "h2", "effective", "lr", "seconds"} <= names
    assert {"member_loss/0", "member_loss/2"} <= names
    for name in names:
        found, wanted = read(name), expected(run, name)
        assert [step for step, _ in found] == list(wanted), name
        for step, value in found:
            assert math.isclose(value, wanted[step], rel_tol=1e-6), (name, step)


def stopped_then_resumed(folder, logger):
    """A run that dies in its second epoch and goes on in another call."""
    with pytest.raises(Fuse.Blown):
        quick(out=folder, loggers=[logger], schedule=Fuse(at=6), **OPTIONS)
    return quick(out=folder, loggers=[logger], schedule=Fuse(), resume=True, **OPTIONS)


# --- csv ---


def read_csv(folder):
    with (folder / "logs" / "history.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    return lambda name: [(int(row["step"]), float(row[name])) for row in lines if row[name]]


def test_csv_has_the_history(tmp_path):
    run = quick(out=tmp_path, loggers=["csv"], **OPTIONS)
    assert_logged(run, read_csv(tmp_path))


def test_csv_goes_on_after_a_resume(tmp_path):
    run = stopped_then_resumed(tmp_path, "csv")
    assert len(run.history) == 3
    assert_logged(run, read_csv(tmp_path))


def test_csv_drops_half_a_line_of_a_killed_process(tmp_path):
    run = quick(out=tmp_path, loggers=["csv"], **OPTIONS)
    path = tmp_path / "logs" / "history.csv"
    text = path.read_text()
    path.write_text(text[: text.rindex("\n", 0, -1) + 4])
    quick(out=tmp_path, loggers=["csv"], resume=True, **OPTIONS)
    assert_logged(run, read_csv(tmp_path))


def test_a_logger_that_comes_late_gets_the_whole_history(tmp_path):
    quick(out=tmp_path, **OPTIONS)
    run = quick(out=tmp_path, loggers=["csv"], resume=True, **OPTIONS)
    assert_logged(run, read_csv(tmp_path))


def test_a_column_that_comes_late_joins_the_others(tmp_path):
    run = quick(out=tmp_path, **OPTIONS)
    (callback,) = make_loggers(["csv"], run)
    logger = callback.logger
    logger.open()
    logger.log({"loss": 1.0}, 4)
    logger.log({"loss": 0.5, "validation/nll": 0.7}, 8)
    read = read_csv(tmp_path)
    assert read("loss") == [(4, 1.0), (8, 0.5)] and read("validation/nll") == [(8, 0.7)]


def test_without_a_folder_the_log_has_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = quick(loggers=["csv"], **OPTIONS)
    path = tmp_path / "logs" / run.provenance["run_id"] / "history.csv"
    assert len(path.read_text().splitlines()) == 4


# --- objects, failures, names ---


def test_an_object_gets_numbers_settings_and_figures():
    pytest.importorskip("matplotlib")
    kept = Whole()
    run = quick(loggers=[kept], **OPTIONS)
    assert kept.steps == STEPS
    assert kept.rows[-1][1] == numbers(run.history[-1])
    assert kept.config["method"] == "f-kde" and kept.config["lr"] == 1e-3
    assert {"loss", "forces", "bandwidth"} <= kept.images.keys()
    for png, step in kept.images.values():
        assert png.startswith(b"\x89PNG") and step == STEPS[-1]


@pytest.mark.parametrize("task", ["classes", "numbers"])
def test_validation_data_are_logged_with_a_figure_of_calibration(task):
    pytest.importorskip("matplotlib")
    kept, (x, y) = Whole(), points()
    y = y if task == "classes" else x[:, :1] + x[:, 1:2]
    ensemble = Ensemble.init(lambda: nn.Linear(3, 4 if task == "classes" else 1), 3)
    run = quick(ensemble, (x, y), loggers=[kept], validation=0.25, epochs=2)
    for (_, values), row in zip(kept.rows, run.history, strict=True):
        found = {name: v for name, v in values.items() if name.startswith("validation/")}
        assert found == {f"validation/{name}": v for name, v in row["validation"].items()}
        assert "validation/nll" in found
    assert kept.images["calibration"][0].startswith(b"\x89PNG")


def test_an_object_with_log_alone_is_enough_and_a_resume_doubles_nothing(tmp_path):
    kept = Kept()
    stopped_then_resumed(tmp_path, kept)
    assert kept.steps == STEPS


def test_a_plain_ensemble_has_no_figure_of_forces():
    pytest.importorskip("matplotlib")
    kept = Whole()
    quick(loggers=[kept], method="ensemble", epochs=1)
    assert kept.images.keys() == {"loss"}


@pytest.mark.parametrize("when", ["log", "log_config", "log_image"])
def test_a_failing_logger_warns_once_and_training_goes_on(when):
    class Failing(Whole):
        pass

    def fail(*_):
        raise OSError("the disk is\nfull")

    setattr(Failing, when, fail)
    other = Kept()
    with pytest.warns(ShoalWarning, match="Failing.*OSError: the disk is full") as caught:
        run = quick(loggers=[Failing(), other], **OPTIONS)
    assert len(caught) == 1 and len(run.history) == 3 and other.steps == STEPS


def test_a_figure_that_cannot_be_drawn_costs_neither_the_run_nor_the_log(
    tensorboard, monkeypatch, tmp_path
):
    def fail(*_):
        raise ValueError("no ink")

    pytest.importorskip("matplotlib")
    monkeypatch.setattr(loggers_module.plots, "forces", fail)
    kept, other = Whole(), Whole()
    with pytest.warns(ShoalWarning, match="figures.*no ink") as caught:
        quick(out=tmp_path, loggers=["tensorboard", kept, other], **OPTIONS)
    assert len(caught) == 1 and kept.steps == other.steps == STEPS
    assert events(tmp_path).Tags()["images"] == ["figures/loss"]
    assert kept.images.keys() == other.images.keys() == {"loss"}


@pytest.mark.parametrize(
    ("loggers", "words"),
    [
        (["tensorbord"], "tensorboard"),
        (["???"], "csv"),
        (["csv", 5], "log"),
        ("csv", "list"),
    ],
)
def test_what_cannot_log_is_refused_before_training(loggers, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        quick(loggers=loggers, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_missing_library_is_an_error_with_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"shoal\[loggers\]"):
        quick(loggers=["wandb"])


def test_numbers_and_settings_of_many_members():
    row = {"step": 1, "loss": math.inf, "member_loss": [0.5] * 11, "validation": {"nll": 0.25}}
    found = numbers(row)
    assert "loss" not in found and found["validation/nll"] == 0.25
    assert [name for name in found if "member" in name] == sorted(
        name for name in found if "member" in name
    )
    assert settings({"a": {"b": [1, 2]}, "on": True}) == {"a.b": "1, 2", "on": True}


def test_the_command_line_takes_names(tmp_path):
    tiny = ["toy-classification", "model.hidden=[8]", "members=2", "steps=3"]
    arguments = [*tiny, "-o", str(tmp_path / "run")]
    assert main(["fit", *arguments, "--loggers", "csv,"]) == 0
    assert read_csv(tmp_path / "run")("loss")[0][0] == 3
    assert main(["fit", *arguments, "--resume", "--loggers", "csvv"]) == 2


# --- TensorBoard ---


def events(folder):
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = module.EventAccumulator(str(folder / "logs" / "tensorboard"))
    return found.Reload()


@pytest.fixture
def tensorboard():
    pytest.importorskip("tensorboard")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("torch.utils.tensorboard")


def test_tensorboard_event_files(tensorboard, tmp_path):
    pytest.importorskip("matplotlib")
    run = quick(out=tmp_path, loggers=["tensorboard"], **OPTIONS)
    found = events(tmp_path)
    assert_logged(run, lambda name: [(e.step, e.value) for e in found.Scalars(name)])
    assert {"figures/loss", "figures/forces"} <= set(found.Tags()["images"])
    image = found.Images("figures/loss")[0]
    assert image.encoded_image_string.startswith(b"\x89PNG") and image.width > 300
    assert "f-kde" in found.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "_hparams_/session_start_info" in found.summary_metadata


def test_tensorboard_goes_on_after_a_resume(tensorboard, tmp_path):
    run = stopped_then_resumed(tmp_path, "tensorboard")
    found = events(tmp_path)
    assert_logged(run, lambda name: [(e.step, e.value) for e in found.Scalars(name)])
    assert len(found.Tensors("config/text_summary")) == 1


KILLED = """
import os, sys
from small_runs import quick

def die(event):
    if event.epoch == 3:
        os._exit(9)

quick(out=sys.argv[1], loggers=["csv", "tensorboard"], callbacks=[die], epochs=3, save_every=3600)
"""


@pytest.mark.kill
@pytest.mark.slow
def test_a_log_ahead_of_its_checkpoint_doubles_nothing(tensorboard, tmp_path):
    """Killed after two logged epochs and no checkpoint, the run starts anew in the same log."""
    tests = Path(__file__).parents[1]
    path = os.pathsep.join([str(tests), str(tests.parent)])
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True)
    assert done.returncode == 9, done.stderr
    assert [step for step, _ in read_csv(tmp_path)("loss")] == STEPS[:2]
    loggers = ["csv", "tensorboard"]
    run = quick(out=tmp_path, loggers=loggers, epochs=3, save_every=3600, resume=True)
    assert [row["step"] for row in run.history] == STEPS
    found = events(tmp_path).Scalars("loss")
    for log in (read_csv(tmp_path)("loss"), [(event.step, event.value) for event in found]):
        assert [step for step, _ in log] == STEPS
        assert [value for _, value in log] == pytest.approx([row["loss"] for row in run.history])


# --- Weights & Biases, offline ---


@pytest.fixture
def wandb(monkeypatch, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wandb = pytest.importorskip("wandb")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name, value in {"MODE": "offline", "SILENT": "true", "CONSOLE": "off"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    yield wandb
    wandb.teardown()


def wandb_records(path):
    """The records of an offline run: a header of 7 bytes, then blocks as in a LevelDB log.

    A fragment has a checksum (4 bytes), its length (2), its place in the record (1), and its data.
    """
    from wandb.proto import wandb_internal_pb2

    data, place, whole = path.read_bytes(), 7, b""
    assert data.startswith(b":W&B")
    while place + 7 <= len(data):
        left = BLOCK - place % BLOCK
        if left < 7:  # too little for a fragment: zeros up to the next block
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (WHOLE, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


BLOCK, WHOLE, LAST = 32768, 1, 4


def read_wandb(wandb, folder):
    """All records of the offline runs in a folder, and a function from a name to its numbers."""
    wandb.teardown()  # waits for the process that writes: `finish` may return before it has
    paths = sorted((folder / "logs" / "wandb").glob("offline-run-*/*.wandb"))
    records = [record for path in paths for record in wandb_records(path)]
    rows = []
    for record in records:
        if record.WhichOneof("record_type") == "history":
            items = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            rows.append({"_step": record.history.step.num} | items)
    return records, lambda name: [(row["_step"], row[name]) for row in rows if name in row]


@pytest.mark.slow
def test_wandb_offline(wandb, tmp_path):
    pytest.importorskip("matplotlib")
    run = quick(out=tmp_path, loggers=["wandb"], **OPTIONS)
    records, read = read_wandb(wandb, tmp_path)
    assert_logged(run, read)
    assert read("figures/loss/_type") == [(STEPS[-1], "image-file")]
    (began,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert began.run_id == run.provenance["run_id"] and began.project == "shoal"
    told = "".join(str(record) for record in records)
    assert "f-kde" in told and list(tmp_path.glob("logs/wandb/*/files/media/images/**/*.png"))
    assert wandb.run is None


@pytest.mark.slow
def test_wandb_goes_on_after_a_resume(wandb, tmp_path):
    run = stopped_then_resumed(tmp_path, "wandb")
    records, read = read_wandb(wandb, tmp_path)
    assert_logged(run, read)
    names = {r.run.run_id for r in records if r.WhichOneof("record_type") == "run"}
    assert names == {run.provenance["run_id"]}


@pytest.mark.slow
def test_an_active_run_of_wandb_is_used_and_stays_open(wandb, tmp_path):
    (tmp_path / "logs").mkdir()
    with wandb.init(project="mine", dir=str(tmp_path / "logs")) as own:
        run = quick(loggers=["wandb"], **OPTIONS)
        assert wandb.run is own and own.config["method"] == "f-kde"
    assert_logged(run, read_wandb(wandb, tmp_path)[1])


# --- MLflow ---


@pytest.fixture
def mlflow(monkeypatch, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mlflow = pytest.importorskip("mlflow")
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return mlflow


def read_mlflow(mlflow, folder):
    """The only run in the store of a folder, and a function from a name to its numbers."""
    store = f"sqlite:///{folder / 'logs' / 'mlflow' / 'mlflow.db'}"
    client = mlflow.MlflowClient(tracking_uri=store)
    experiment = client.get_experiment_by_name("shoal").experiment_id
    (run,) = client.search_runs([experiment])

    def read(name):
        return [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)]

    return client, run, read


@pytest.mark.slow
def test_mlflow_store(mlflow, tmp_path):
    pytest.importorskip("matplotlib")
    run = stopped_then_resumed(tmp_path, "mlflow")
    client, found, read = read_mlflow(mlflow, tmp_path)
    assert_logged(run, read)
    assert found.info.status == "FINISHED"
    assert found.data.params["method"] == "f-kde" and found.data.params["lr"] == "0.001"
    assert found.data.tags["shoal.run_id"] == run.provenance["run_id"]
    paths = {each.path for each in client.list_artifacts(found.info.run_id, "figures")}
    assert {"figures/loss.png", "figures/forces.png"} <= paths
    assert list((tmp_path / "logs" / "mlflow" / "artifacts").rglob("loss.png"))


@pytest.mark.slow
def test_an_active_run_of_mlflow_is_used_and_stays_open(mlflow, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'theirs.db'}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mlflow.set_experiment("mine")
        with mlflow.start_run() as own:
            run = quick(out=tmp_path / "run", loggers=["mlflow"], **OPTIONS)
            assert mlflow.active_run().info.run_id == own.info.run_id
            (callback,) = make_loggers(["mlflow"], run)
            callback.logger.open()
            many = {f"member_loss/{member:04}": 1.0 for member in range(1100)}
            callback.logger.log(many, 16)
        client = mlflow.MlflowClient()
        found = client.get_run(own.info.run_id).data

        def read(name):
            rows = client.get_metric_history(own.info.run_id, name)
            return [(metric.step, metric.value) for metric in rows]

        assert_logged(run, read)
    assert found.params["method"] == "f-kde" and not (tmp_path / "run" / "logs").exists()
    assert found.metrics["member_loss/1099"] == 1.0


@pytest.mark.parametrize("kind", ["link", "pipe", "folder link"])
def test_the_csv_logger_follows_no_link_and_waits_for_no_pipe(kind, tmp_path):
    """A file elsewhere stays as it is, and the run ends."""
    out, other = tmp_path / "run", tmp_path / "elsewhere"
    other.mkdir()
    (other / "history.csv").write_text("step\n1\n")
    out.mkdir()
    if kind == "folder link":
        (out / "logs").symlink_to(other)
        with pytest.raises(StorageError, match="symbolic link"):
            quick(out=out, loggers=["csv"], **OPTIONS)
    else:
        (out / "logs").mkdir()
        target = out / "logs" / "history.csv"
        target.symlink_to(other / "history.csv") if kind == "link" else os.mkfifo(target)
        with pytest.warns(ShoalWarning, match="link|ordinary file"):
            quick(out=out, loggers=["csv"], **OPTIONS)
    assert (other / "history.csv").read_text() == "step\n1\n"
