"""Loaders, torch data sets and streams as training data: read once, counted or not, resumed."""

import itertools
import signal

import pytest
import torch
from small_runs import (
    BATCH,
    POINTS,
    Fuse,
    assert_one_sentence,
    assert_same_run,
    both,
    differ,
    plain,
    points,
    quick,
    shoal_of,
)
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import shoal
from shoal.core.errors import ConfigError, DataError, ShoalWarning
from shoal.data.batches import loaders
from shoal.data.batches.sources import batches_of

X, Y = points()


class Counted:
    """Batches, and how often somebody began to read them and how many were read."""

    def __init__(self, batches=None):
        self.pairs = list(zip(X.split(BATCH), Y.split(BATCH), strict=True))
        self.opened = self.read = 0
        self.endless = batches is None

    def __iter__(self):
        self.opened += 1
        for pair in itertools.cycle(self.pairs) if self.endless else self.pairs:
            self.read += 1
            yield pair


class CountedLoader(DataLoader):
    opened = 0

    def __iter__(self):
        self.opened += 1
        return super().__iter__()


class Pairs(Dataset):
    """A data set that is indexed."""

    def __len__(self):
        return POINTS

    def __getitem__(self, i):
        return X[i], int(Y[i])


class Inputs(Pairs):
    def __getitem__(self, i):
        return X[i]


class Stream(IterableDataset):
    """A data set that is iterated over, by default without end."""

    def __init__(self, rounds=None, alone=False):
        self.rounds, self.alone = rounds, alone

    def __iter__(self):
        rounds = itertools.count() if self.rounds is None else range(self.rounds)
        for _ in rounds:
            yield from X if self.alone else zip(X, Y, strict=True)


class Sized(Stream):
    def __len__(self):
        return POINTS


class Shaken(Stream):
    def __iter__(self):
        return ((x + 0.1 * torch.randn(3), y) for x, y in super().__iter__())


FORMS = {
    "torch dataset": Pairs,
    "stream": lambda: Stream(1),
    "stream with a length": lambda: Sized(1),
    "loader of a stream": lambda: DataLoader(Stream(1), BATCH),
    "list of batches": lambda: list(zip(X.split(BATCH), Y.split(BATCH), strict=True)),
    "iterable of batches": lambda: Counted("finite"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", [{"epochs": 2}, {"steps": 8}], ids=str)
def test_whatever_gives_points_or_batches_trains_as_the_arrays_do(form, options):
    run = quick(data=FORMS[form](), method="kde", **options)
    assert run.provenance["data"] == {"points": POINTS, "sha256": None}
    assert run.history[-1]["step"] == 8
    if form != "torch dataset":  # which is shuffled
        batches = list(zip(X.split(BATCH), Y.split(BATCH), strict=True))
        one = quick(data=batches, method="kde", temperature=0.0, prior="flat", **options)
        other = quick(data=FORMS[form](), method="kde", temperature=0.0, prior="flat", **options)
        assert not differ(one.ensemble.weights, other.ensemble.weights)


@pytest.mark.parametrize(
    "data",
    [Pairs(), Inputs(), Stream(1), Stream(1, alone=True), (X, Y), [X[:7], X[7:]], X.split(9)],
    ids=["pairs", "inputs", "stream", "stream of inputs", "pair", "list", "tuple of five"],
)
def test_the_same_forms_are_predicted_on(data):
    run = quick()
    expected = shoal.predict(run, X).members
    torch.testing.assert_close(shoal.predict(run, data, batch_size=16).members, expected)


def test_two_arrays_of_one_shape_are_not_taken_for_a_pair():
    run = quick()
    with pytest.raises(DataError) as caught:
        shoal.predict(run, X.split(POINTS // 2))
    assert_one_sentence(caught.value, "two batches", "list [a, b]")


class TestOpenings:
    @pytest.mark.parametrize("likelihood", [None, "categorical"])
    def test_a_loader_is_opened_once_for_each_epoch(self, likelihood):
        loader = CountedLoader(Pairs(), batch_size=BATCH, shuffle=True)
        quick(data=loader, epochs=3, likelihood=likelihood)
        assert loader.opened == 3

    def test_also_where_a_trial_finds_the_fastest_way(self):
        loader = CountedLoader(Pairs(), batch_size=BATCH)
        quick(data=loader, steps=300)
        assert loader.opened == 300 * BATCH // POINTS

    def test_a_stream_of_unknown_length_is_opened_once_for_each_pass(self):
        stream = Counted("finite")
        quick(data=stream, steps=10)
        assert (stream.opened, stream.read) == (3, 10)

    def test_with_epochs_it_is_counted_by_one_pass_more(self):
        stream = Counted("finite")
        quick(data=stream, epochs=2)
        assert (stream.opened, stream.read) == (3, 12)

    def test_the_batches_are_those_of_a_fresh_epoch(self):
        def source():
            return batches_of(DataLoader(Shaken(1), BATCH), seed=3, steps=20)

        looked, fresh = source(), source()
        assert torch.equal(looked.first()[0], looked.first()[0])
        for one, other in zip(
            itertools.islice(looked.batches(0), 6),
            itertools.islice(fresh.batches(0), 6),
            strict=True,
        ):
            assert torch.equal(one[0], other[0])

    def test_workers_leave_the_signals_that_stop_a_run_to_it(self):
        class Masks(Pairs):
            def __getitem__(self, i):
                assert get_worker_info() is not None
                blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
                return X[i], int(signal.SIGINT in blocked and signal.SIGTERM in blocked)

        source = batches_of(DataLoader(Masks(), BATCH, num_workers=1))
        assert all(y.all() for _, y in source.batches(0))
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


class TestEndless:
    @pytest.mark.parametrize("form", ["stream", "loader", "batches", "generator"])
    def test_it_starts_and_reads_no_more_than_its_steps(self, form):
        counted = Counted()
        data = {
            "stream": Stream(),
            "loader": DataLoader(Stream(), BATCH),
            "batches": counted,
            "generator": iter(counted),
        }[form]
        run = quick(data=data, steps=7)
        assert run.history[-1]["step"] == 7
        assert counted.read == (7 if form in ("batches", "generator") else 0)
        assert run.provenance["data"] == {"points": 7 * BATCH, "sha256": None}
        assert f"{7 * BATCH} data points" in run.notes[0] and "__len__" in run.notes[0]

    def test_a_twentieth_of_the_steps_is_an_epoch(self):
        rows = quick(data=Stream(), steps=50).history
        assert [row["step"] for row in rows] == [*range(3, 51, 3), 50]

    def test_its_length_sets_n(self):
        run = quick(data=Sized(), steps=7)
        assert run.provenance["data"]["points"] == POINTS and run.notes == quick(steps=7).notes

    def test_n_is_what_the_posterior_uses(self):
        """A stream of twice the points has half the prior: the arrays twice over, in one batch."""
        twice = torch.cat([X, X]), torch.cat([Y, Y])
        options = {"method": "ensemble", "optimizer": "sgd", "lr": 0.1}
        stream = quick(data=Stream(), steps=2, batch_size=POINTS, **options)
        arrays = quick(data=twice, steps=2, batch_size=2 * POINTS, **options)
        for name, weight in stream.ensemble.weights.items():
            torch.testing.assert_close(weight, arrays.ensemble.weights[name])

    def test_methods_that_look_at_the_inputs_first_read_as_much_as_training(self):
        counted = Counted()
        run = quick(data=counted, steps=4, method="forde")
        assert run.history[-1]["step"] == 4 and counted.read <= 4 * counted.opened
        with pytest.raises(DataError) as caught:
            quick(data=iter(Counted()), steps=4, method="forde")
        assert_one_sentence(caught.value, "only once")

    def test_without_steps_it_says_what_to_type(self, monkeypatch):
        class Long(Counted):
            def __iter__(self):
                return itertools.islice(super().__iter__(), 6)

        monkeypatch.setattr(loaders, "_MANY", 5)
        with pytest.warns(ShoalWarning, match="type steps=10000 instead of epochs"):
            quick(data=Long(), epochs=1)

    def test_a_generator_without_steps_or_with_too_many(self):
        with pytest.raises(DataError) as caught:
            quick(data=iter(Counted()), epochs=2)
        assert_one_sentence(caught.value, "read only once")
        with pytest.raises(DataError) as caught:
            quick(data=iter(Counted("finite")), steps=9)
        assert_one_sentence(caught.value, "read only once", "9 steps")

    def test_a_stream_that_cannot_begin_anew(self):
        class Spent(Counted):
            def __iter__(self):
                return itertools.islice(super().__iter__(), 0 if self.opened else None)

        with pytest.raises(DataError) as caught:
            quick(data=Spent("finite"), steps=9)
        assert_one_sentence(caught.value, "pass 2", "start again")

    @pytest.mark.parametrize("wrong", ["a", 0, 2.5])
    def test_wrong_steps_are_refused_as_ever(self, wrong):
        with pytest.raises(ConfigError, match="steps must be"):
            quick(data=Stream(), steps=wrong)


class TestCounting:
    def test_the_first_pass_counts_what_was_guessed(self):
        seen = []
        run = quick(
            data=Stream(1),
            steps=40,
            method="ensemble",
            callbacks=[lambda event: seen.append(event.run.provenance["data"]["points"])],
        )
        assert seen == [400, 400, *([POINTS] * 18)]
        assert "400 data points" in run.notes[0] and "counted 40 data points" in run.notes[1]

    def test_from_then_on_the_posterior_has_it(self):
        """Weight decay of the prior, 1 / N, after the first pass is that of the arrays."""
        from shoal.training.loop.trainer import Trainer
        from shoal.training.options.options import Options
        from shoal.training.options.settings import Settings

        def trainer(data):
            options = Options(
                method="ensemble", likelihood="categorical", steps=12, batch_size=BATCH
            )
            settings = Settings.resolve(options)
            return Trainer(shoal_of(), settings, batches_of(data, BATCH, steps=12))

        stream, arrays = trainer(Stream(1)), trainer((X, Y))
        decay = [t.mover.optimizer.param_groups[0]["weight_decay"] for t in (stream, arrays)]
        assert decay == pytest.approx([1 / (12 * BATCH), 1 / POINTS])
        steps = stream.run()
        for step in range(1, 13):
            next(steps)
            found = stream.mover.optimizer.param_groups[0]["weight_decay"]
            assert found == pytest.approx(decay[step > POINTS // BATCH]), step
            assert stream.mover.posterior.n == (POINTS if step > POINTS // BATCH else 12 * BATCH)

    def test_a_loader_that_knows_its_batches_alone(self):
        class Half(Counted):
            def __len__(self):
                return len(self.pairs)

        data = Half("finite")
        data.pairs[-1] = X[-3:], Y[-3:]
        run = quick(data=data, epochs=2)
        assert data.opened == 2
        assert run.provenance["data"]["points"] == POINTS - BATCH + 3
        assert f"N is {POINTS}, 4 batches of {BATCH}" in run.notes[0]
        assert str(POINTS - BATCH + 3) in run.notes[1]


class TestResuming:
    @pytest.mark.parametrize("at", [2, 4, 5, 9, 17])
    @pytest.mark.parametrize("rounds", [None, 1], ids=["endless", "ends"])
    def test_a_stream_goes_on_where_it_was(self, at, rounds, tmp_path):
        def options():
            data = DataLoader(Shaken(rounds), BATCH)
            return {"data": data, "steps": 25, "method": "kde"}

        one = quick(both, schedule=Fuse(), out=tmp_path / "whole", **options())
        with pytest.raises(Fuse.Blown):
            quick(both, schedule=Fuse(at), out=tmp_path / "part", save_every=0.0, **options())
        again = shoal_of(both, seed=7)
        other = quick(again, schedule=Fuse(), out=tmp_path / "part", resume=True, **options())
        assert_same_run(one, other)
        assert one.notes == other.notes
        assert one.provenance["data"] == other.provenance["data"]

    def test_a_fresh_generator_is_read_up_to_where_the_run_was(self, tmp_path):
        one = quick(data=iter(Counted()), schedule=Fuse(), steps=9)
        with pytest.raises(Fuse.Blown):
            quick(data=iter(Counted()), schedule=Fuse(5), steps=9, out=tmp_path, save_every=0.0)
        again = {"schedule": Fuse(), "steps": 9, "out": tmp_path, "resume": True}
        assert_same_run(one, quick(shoal_of(seed=7), iter(Counted()), **again))

    def test_arrays_are_not_a_stream(self, tmp_path):
        quick(steps=4, out=tmp_path)
        with pytest.raises(ConfigError, match="trained on other data|has data ="):
            quick(plain, Stream(), steps=4, out=tmp_path, resume=True)
