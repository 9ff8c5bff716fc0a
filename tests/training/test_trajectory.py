"""Snapshots along training: which stay, what they hold, and that stopping changes nothing."""

import pytest
import torch
from small_runs import Fuse, assert_equal_trees, assert_one_sentence, both, frozen, quick, shoal_of

from shoal.core.errors import ConfigError, StorageError
from shoal.training.folder.run import load
from shoal.training.folder.trajectory import BOUND, RECENT, Trajectory, wanted


@pytest.mark.parametrize("every", [1, 3])
def test_never_more_than_the_bound_and_always_the_first_and_the_recent(every):
    for epoch in range(0, 700, every):
        kept = wanted(epoch, every)
        assert len(kept) <= BOUND
        assert kept[0] == 0
        assert kept[-RECENT:] == list(range(0, epoch + 1, every))[-RECENT:]


def test_what_was_dropped_is_never_wanted_again():
    kept = set(wanted(0, 1))
    for epoch in range(1, 700):
        now = set(wanted(epoch, 1))
        assert now <= kept | {epoch}
        kept = now


def test_a_snapshot_is_the_ensemble_after_its_epoch(tmp_path):
    seen = []
    ensemble = shoal_of(both)
    begin = frozen(ensemble)
    run = quick(
        ensemble,
        epochs=4,
        keep_every=2,
        out=tmp_path / "run",
        callbacks=[lambda event: seen.append(frozen(event.run.ensemble))],
    )
    found = Trajectory(tmp_path / "run")
    assert found.epochs() == [0, 2, 4]
    assert_equal_trees(found.state(0), begin)
    assert_equal_trees(found.state(2), seen[1])
    assert_equal_trees(found.state(4), frozen(run.ensemble))
    assert run.config["keep_every"] == load(tmp_path / "run", both).config["keep_every"] == 2


def test_old_snapshots_make_room(tmp_path):
    quick(epochs=70, keep_every=1, out=tmp_path / "run")
    assert Trajectory(tmp_path / "run").epochs() == wanted(70, 1)


def test_a_run_stopped_and_resumed_has_the_same_snapshots(tmp_path):
    whole = quick(both, epochs=5, keep_every=1, out=tmp_path / "whole", schedule=Fuse())
    with pytest.raises(Fuse.Blown):
        quick(both, epochs=5, keep_every=1, out=tmp_path / "cut", schedule=Fuse(14), save_every=0.0)
    quick(both, epochs=5, keep_every=1, out=tmp_path / "cut", schedule=Fuse(), resume=True)
    one, other = Trajectory(tmp_path / "whole"), Trajectory(tmp_path / "cut")
    assert one.epochs() == other.epochs() == list(range(6))
    for epoch in one.epochs():
        assert_equal_trees(one.state(epoch), other.state(epoch))
    assert torch.equal(one.state(5)["alive"], whole.ensemble.alive)


def test_without_the_setting_there_are_none(tmp_path):
    run = quick(out=tmp_path / "run")
    assert Trajectory(tmp_path / "run").epochs() == []
    assert run.config["keep_every"] is None


def test_mistakes_are_answered_in_a_sentence(tmp_path):
    with pytest.raises(ConfigError) as caught:
        quick(keep_every=1)
    assert_one_sentence(caught.value, "out=")
    with pytest.raises(ConfigError) as caught:
        quick(keep_every=0, out=tmp_path / "run")
    assert_one_sentence(caught.value, "keep_every", "0")
    quick(out=tmp_path / "other", keep_every=1)
    with pytest.raises(StorageError) as caught:
        Trajectory(tmp_path / "other").state(9)
    assert_one_sentence(caught.value, "epoch 9")
