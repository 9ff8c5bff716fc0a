"""Every kind of `kinds_table` is trained, predicted, stored, resumed and evaluated."""

import functools
import tempfile
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from kinds_table import BATCH, IGNORED, METHODS, Kind, cases
from small_runs import Fuse, assert_one_sentence, assert_same_run
from torch.nn import functional as F

import shoal

pytestmark = pytest.mark.filterwarnings("ignore:members run:shoal.core.errors.ShoalWarning")

STEPS = 4


class Trained(NamedTuple):
    """A finished run in a folder, and the warnings of its training."""

    run: shoal.Run
    folder: Path
    told: list[warnings.WarningMessage]


def ensemble(kind: Kind, seed: int = 0) -> shoal.Ensemble:
    return shoal.Ensemble.init(kind.build, kind.members, seed)


def fitted(kind: Kind, method: str, seed: int = 0, **options: Any) -> shoal.Run:
    settings = {"batch_size": BATCH, "steps": STEPS, "lr": 0.01, "progress": False}
    given = settings | kind.options | {"schedule": Fuse()} | options
    return shoal.fit(ensemble(kind, seed), kind.training(), method=method, **given)


@functools.cache
def trained(kind: Kind, method: str) -> Trained:
    folder = Path(_place().name) / f"{kind.name}-{method}".replace(" ", "-")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run = fitted(kind, method, out=folder)
    return Trained(run, folder, told)


@functools.cache
def _place() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="kinds-")


@pytest.mark.parametrize("kind, method", cases(*METHODS))
def test_a_run_predicts_and_loads(kind, method):
    run, folder, _ = trained(kind, method)
    members = shoal.predict(run, kind.inputs).members
    assert members.shape[1:] == kind.shape and bool(members.isfinite().all())
    again = shoal.predict(shoal.load(folder, kind.build), kind.inputs).members
    # a loop and vmap round differently, and a loaded run predicts by vmap where it can
    torch.testing.assert_close(again, members, **({"rtol": 0, "atol": 0} if kind.together else {}))


@pytest.mark.parametrize("kind, method", cases(*METHODS))
def test_warnings_are_ours_and_a_loop_is_told_once(kind, method):
    told = trained(kind, method).told
    assert {each.category for each in told} <= {shoal.ShoalWarning}
    loops = [each for each in told if "one after another" in str(each.message)]
    assert len(loops) == (0 if kind.together else 1)
    assert trained(kind, method).run.warnings == ()  # the look before training has no false alarm


@pytest.mark.parametrize("kind, method", cases(*METHODS))
def test_a_stopped_run_resumes_bit_for_bit(kind, method, tmp_path):
    with pytest.raises(Fuse.Blown):
        fitted(kind, method, out=tmp_path, schedule=Fuse(3), save_every=0)
    resumed = fitted(kind, method, seed=7, out=tmp_path, resume=True)
    assert_same_run(resumed, trained(kind, method).run)


@pytest.mark.parametrize("kind", cases())
def test_an_evaluation_scores_the_targets_that_count(kind):
    run = trained(kind, "f-kde").run
    found = shoal.evaluate(run, (kind.inputs, kind.y), keep=False)
    assert all(torch.isfinite(torch.tensor(value)) for value in found.test.values())
    if run.likelihood.task != "classification":
        return
    each = [kind.by_hand(run.ensemble.member(i)).detach() for i in range(run.ensemble.members)]
    axis = 2 if len(kind.shape) == 4 else -1
    probs = torch.stack(each).softmax(axis).mean(0).movedim(axis - 1 if axis == 2 else -1, -1)
    flat, y = probs.flatten(0, -2), kind.y.flatten()
    expected = F.nll_loss(flat.log(), y, ignore_index=IGNORED)
    assert found.test["nll"] == pytest.approx(float(expected), rel=1e-4)
    right = flat.argmax(-1)[y != IGNORED] == y[y != IGNORED]
    assert found.test["accuracy"] == pytest.approx(float(right.double().mean()))


@pytest.mark.parametrize("kind", [c for c in cases() if c.values[0].report])
def test_a_report_is_written(kind, tmp_path):
    run, page = trained(kind, "f-kde").run, tmp_path / "report.html"
    shoal.report(run, page, data=(kind.inputs, kind.y))
    assert "NLL" in page.read_text()


@pytest.mark.parametrize("kind, method", cases(*METHODS, works=False))
def test_what_a_kind_cannot_do_is_one_sentence(kind, method):
    with pytest.raises(shoal.ShoalError) as caught:
        fitted(kind, method)
    assert_one_sentence(caught.value, "use a", "'f-kde'")
