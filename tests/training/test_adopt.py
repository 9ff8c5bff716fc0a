"""Adopted networks: a run of what was trained elsewhere, in memory and in a folder."""

import copy
import json
import math
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from small_runs import assert_equal_trees, assert_one_sentence, frozen, normed, plain, points, quick
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.core.errors import ConfigError, DataError, ShoalError, ShoalWarning

X, Y = points(80, seed=1)


def trained(build=plain, seed=0, steps=25):
    """A network trained by a plain loop in torch."""
    torch.manual_seed(seed)
    network, (x, y) = build(), points()
    optimizer = torch.optim.Adam(network.parameters(), 0.03)
    for _ in range(steps):
        loss = F.cross_entropy(network(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network


def several(build=plain, count=3):
    return [trained(build, seed) for seed in range(count)]


def literal(modules, x=X):
    with torch.no_grad():
        return torch.stack([copy.deepcopy(module).eval()(x) for module in modules])


def saved(modules, folder, ending="pt", prefix=""):
    folder.mkdir(exist_ok=True)
    for index, module in enumerate(modules):
        state = {prefix + name: tensor for name, tensor in module.state_dict().items()}
        path = folder / f"net{index}.{ending}"
        save_file(state, path) if ending == "safetensors" else torch.save(state, path)
    return folder


def real(width=1):
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, width))


class TestInMemory:
    def test_scores_are_those_computed_by_hand(self):
        modules = several(normed)
        found = shoal.evaluate(shoal.adopt(modules, likelihood="categorical"), (X, Y))
        probs = literal(modules).double().softmax(-1).mean(0)
        right = (probs.argmax(-1) == Y).double().mean()
        assert found.test["accuracy"] == pytest.approx(float(right))
        nll = -probs[torch.arange(len(Y)), Y].log().mean()
        assert found.test["nll"] == pytest.approx(float(nll), rel=1e-5)
        brier = (probs - F.one_hot(Y, 4)).square().sum(-1).mean()
        assert found.test["brier"] == pytest.approx(float(brier), rel=1e-5)

    def test_frozen_networks_predict_and_have_a_landscape_and_evidence(self):
        modules = [network.requires_grad_(False) for network in several()]
        run = shoal.adopt(modules)
        torch.testing.assert_close(shoal.predict(run, X).members, literal(modules))
        found = shoal.landscape(run, points(), test=(X, Y), quick=True, parts=["line", "averaging"])
        assert "missing" not in found["line"].scores
        assert "adopted" in found["averaging"].scores["missing"]
        by_hand = [float(-F.cross_entropy(out, points()[1], reduction="sum"))
                   for out in literal(modules, points()[0])]  # fmt: skip
        evidence = shoal.evidence(run, points(), priors=False)
        np.testing.assert_allclose(evidence.log_likelihoods, by_hand, rtol=1e-5)

    def test_evidence_takes_no_prior_that_is_not_known(self):
        evidence = shoal.evidence(shoal.adopt(several()), points(), priors=False)
        assert not evidence.prior_known and evidence.log_priors == []
        assert "penalised" not in evidence.weightings
        grads = []
        for network in several():
            loss = F.cross_entropy(network(points()[0]), points()[1])
            grads.append(torch.autograd.grad(loss, list(network.parameters())))
        norms = [math.sqrt(sum(float(g.square().sum()) for g in each)) for each in grads]
        np.testing.assert_allclose(evidence.gradient_norms, norms, rtol=1e-4)

    def test_the_run_says_that_its_training_is_not_known(self):
        run = shoal.adopt(several())
        assert run.history == [] and run.config["method"] == "adopted"
        assert "training not known" in repr(run)
        told = {"lr", "optimizer", "prior", "epochs", "seed", "temperature", "batch_size"}
        assert not told & run.config.keys()
        assert any("likelihood" in note for note in run.notes)

    def test_mixed_architectures_work(self):
        modules = [*several(plain, 2), *several(normed, 2)]
        run = shoal.adopt(modules)
        torch.testing.assert_close(shoal.predict(run, X).members, literal(modules))
        assert shoal.evaluate(run, (X, Y)).test["accuracy"] > 0.25

    def test_what_was_noticed_is_warned_of_once_and_noted(self):
        first, second = several(plain, 2)
        with pytest.warns(ShoalWarning) as told:
            run = shoal.adopt([first, second, copy.deepcopy(first)], likelihood="categorical")
        assert len(told) == 1 and run.notes[0].endswith("the same functions.")

    def test_a_named_output_is_used(self):
        class Two(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 4)

            def forward(self, x):
                return {"logits": self.a(x), "other": self.b(x)}

        modules = [Two(), Two()]
        run = shoal.adopt(modules, outputs="other")
        wanted = torch.stack([m.b(X) for m in modules]).detach()
        torch.testing.assert_close(shoal.predict(run, X).members, wanted)


class TestLikelihood:
    def test_integer_targets_are_labels(self):
        assert shoal.adopt(several(), data=points()).likelihood == shoal.likelihoods.Categorical()

    def test_noise_of_real_targets_is_the_residual_on_the_data(self, tmp_path):
        torch.manual_seed(0)
        modules = [real(), real()]
        y = 100 + 20 * X[:, 0]
        run = shoal.adopt(modules, data=(X, y), out=tmp_path / "run")
        square = (literal(modules)[..., 0] - y).double().square().mean()
        assert run.likelihood.noise_std == pytest.approx([float(square.sqrt())], rel=1e-5)
        pred = shoal.predict(shoal.load(tmp_path / "run", real), X)
        torch.testing.assert_close(pred.mean, literal(modules)[..., 0].mean(0))
        found = shoal.evaluate(run, (X, y)).test
        error = (literal(modules)[..., 0].mean(0) - y).square().mean().sqrt()
        assert found["rmse"] == pytest.approx(float(error), rel=1e-5)

    def test_noise_without_data_must_be_named(self):
        with pytest.raises(ConfigError) as error:
            shoal.adopt([real(), real()], likelihood="homoscedastic")
        assert_one_sentence(error.value, "noise_std")
        named = {"name": "gaussian", "noise_std": 0.5}
        run = shoal.adopt([real(), real()], likelihood=named)
        assert run.likelihood == shoal.likelihoods.Gaussian(0.5)

    def test_data_that_do_not_fit_the_networks_are_refused(self):
        with pytest.raises(ShoalError) as error:
            shoal.adopt([real(2), real(2)], data=(X, Y), likelihood="categorical")
        assert_one_sentence(error.value)

    @pytest.mark.parametrize("wrong", ["categorial", 3, {"name": "gaussian", "noise": 1.0}])
    def test_wrong_likelihoods_get_one_sentence(self, wrong):
        with pytest.raises(ConfigError) as error:
            shoal.adopt(several(), likelihood=wrong)
        assert_one_sentence(error.value)


class TestFiles:
    @pytest.mark.parametrize("ending", ["pt", "safetensors"])
    @pytest.mark.parametrize("prefix", ["", "module."])
    def test_members_are_those_that_were_saved(self, ending, prefix, tmp_path):
        modules = several(normed)
        folder = saved(modules, tmp_path / "nets", ending, prefix)
        run = shoal.adopt(folder, build=normed, out=tmp_path / "run")
        torch.testing.assert_close(shoal.predict(run, X).members, literal(modules))
        loaded = shoal.load(tmp_path / "run", normed)
        assert_equal_trees(frozen(loaded.ensemble), frozen(run.ensemble))
        assert loaded.history == [] and loaded.config == json.loads(json.dumps(run.config))
        assert list(loaded.provenance["sources"]) == [f"{folder}/net{i}.{ending}" for i in range(3)]

    def test_building_leaves_the_random_numbers_alone(self, tmp_path):
        folder = saved(several(), tmp_path / "nets")
        torch.manual_seed(7)
        expected = torch.rand(3)
        torch.manual_seed(7)
        shoal.adopt(folder, build=plain)
        assert torch.equal(torch.rand(3), expected)

    def test_double_precision_is_kept(self, tmp_path):
        modules = [network.double() for network in several()]
        run = shoal.adopt(saved(modules, tmp_path / "nets"), build=plain)
        assert run.ensemble.dtype == torch.float64
        found = shoal.predict(run, X.double()).members
        torch.testing.assert_close(found, literal(modules, X.double()), rtol=1e-12, atol=1e-12)

    def test_each_file_goes_to_the_architecture_that_it_fits(self, tmp_path):
        modules = [trained(plain, 0), trained(normed, 1), trained(plain, 2)]
        folder = saved(modules, tmp_path / "nets")
        with pytest.warns(ShoalWarning, match=r"\[0, 2, 1\]"):
            run = shoal.adopt(folder, build=[normed, plain], out=tmp_path / "run")
        ordered = [modules[0], modules[2], modules[1]]
        torch.testing.assert_close(shoal.predict(run, X).members, literal(ordered))
        names = [path.rpartition("/")[2] for path in run.provenance["sources"]]
        assert names == ["net0.pt", "net2.pt", "net1.pt"]
        again = shoal.load(tmp_path / "run", [(plain, 2), (normed, 1)])
        torch.testing.assert_close(shoal.predict(again, X).members, literal(ordered))

    def test_old_batch_norms_and_tied_weights_need_no_extra_names(self, tmp_path):
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
                self.last.weight, self.norm = self.first.weight, nn.BatchNorm1d(3)

            def forward(self, x):
                return self.norm(self.last(self.first(x)))

        module = Tied()
        state = module.state_dict()
        del state["last.weight"], state["norm.num_batches_tracked"]
        torch.save(state, tmp_path / "a.pt")
        run = shoal.adopt([tmp_path / "a.pt"], build=Tied)
        torch.testing.assert_close(shoal.predict(run, X).members, literal([module]))

    def test_weights_of_another_network_name_the_difference(self, tmp_path):
        folder = saved([trained(normed)], tmp_path / "nets")
        with pytest.raises(DataError) as error:
            shoal.adopt(folder, build=plain)
        assert_one_sentence(error.value, "net0.pt", "2.weight")

    @pytest.mark.parametrize(
        ("given", "word"),
        [
            (lambda folder: {"networks": folder}, "build"),
            (lambda folder: {"networks": [folder, plain()], "build": plain}, "not both"),
            (lambda folder: {"networks": folder, "build": plain()}, "function"),
            (lambda folder: {"networks": several(), "build": normed}, "another network"),
            (lambda folder: {"networks": [], "build": plain}, "empty"),
            (lambda folder: {"networks": folder, "build": plain, "out": ""}, "out"),
        ],
    )
    def test_wrong_arguments_get_one_sentence(self, given, word, tmp_path):
        with pytest.raises(ShoalError) as error:
            shoal.adopt(**given(saved(several(), tmp_path / "nets")))
        assert_one_sentence(error.value, word)

    def test_a_folder_with_a_run_is_not_overwritten(self, tmp_path):
        folder = saved(several(), tmp_path / "nets")
        shoal.adopt(folder, build=plain, out=tmp_path / "run")
        with pytest.raises(ConfigError) as error:
            shoal.adopt(folder, build=plain, out=tmp_path / "run")
        assert_one_sentence(error.value, "already holds a run")
        with pytest.raises(DataError):
            shoal.adopt(tmp_path / "run", build=plain)
        with pytest.raises(ConfigError):
            quick(data=points(), out=tmp_path / "run", resume=True)

    def test_a_killed_adoption_can_be_repeated(self, tmp_path, monkeypatch):
        folder = saved(several(), tmp_path / "nets")

        def killed(*_, **__):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr("shoal.training.adopt.save_checkpoint", killed)
            with pytest.raises(KeyboardInterrupt):
                shoal.adopt(folder, build=plain, out=tmp_path / "run")
        shoal.adopt(folder, build=plain, out=tmp_path / "run")
        assert shoal.load(tmp_path / "run", plain).ensemble.members == 3

    def test_a_changed_byte_is_found(self, tmp_path):
        shoal.adopt(saved(several(), tmp_path / "nets"), build=plain, out=tmp_path / "run")
        (file,) = (tmp_path / "run").glob("checkpoints/*/ensemble.safetensors")
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        with pytest.raises(shoal.CheckpointCorrupt):
            shoal.load(tmp_path / "run", plain)


class TestFrozenTrunk:
    """Networks with one pre-trained trunk; the function that makes networks freezes nothing."""

    def networks(self):
        modules = several(normed)
        for module in modules:
            module[0] = copy.deepcopy(modules[0][0]).requires_grad_(False)
        return modules

    def test_the_folder_keeps_the_trunk_once(self, tmp_path):
        modules = self.networks()
        run = shoal.adopt(modules, out=tmp_path / "run")
        loaded = shoal.load(tmp_path / "run", normed)
        assert set(loaded.ensemble.shared) == set(run.ensemble.shared) >= {"0.weight", "0.bias"}
        assert not loaded.ensemble.trained_shared
        torch.testing.assert_close(shoal.predict(loaded, X).members, literal(modules))

    def test_grown_members_have_the_same_trunk(self, tmp_path):
        modules = self.networks()
        shoal.adopt(modules, out=tmp_path / "run")
        run = shoal.load(tmp_path / "run", normed)
        how = {"data": points(), "method": "kde", "epochs": 2, "progress": False}
        grown = shoal.grow(run, 2, **how, out=tmp_path / "grown")
        assert torch.equal(grown.ensemble.shared["0.weight"], modules[0][0].weight)
        for found in (grown, shoal.load(tmp_path / "grown", normed)):
            torch.testing.assert_close(shoal.predict(found, X).members[:3], literal(modules))


class TestGrow:
    def test_new_members_join_those_that_do_not_change(self, tmp_path):
        modules = several(normed)
        run = shoal.adopt(modules, build=normed)
        grown = shoal.grow(run, 2, data=points(), method="f-kde", epochs=2, progress=False)
        found = shoal.predict(grown, X).members
        torch.testing.assert_close(found[:3], literal(modules))
        assert found.shape[0] == 5 and grown.config["frozen"] == 3
        assert grown.ensemble.builds == [normed]

    def test_networks_that_were_frozen_still_get_trained_company(self):
        modules = [network.requires_grad_(False) for network in several()]
        build = lambda: plain().requires_grad_(False)  # noqa: E731
        run = shoal.adopt(modules, build=build)
        before = shoal.Ensemble.init(plain, 5).weights
        grown = shoal.grow(run, 2, data=points(), method="kde", epochs=2, progress=False)
        moved = grown.ensemble.weights
        assert all(not torch.equal(t[3:], before[name][3:]) for name, t in moved.items())

    @pytest.mark.parametrize(
        ("given", "word"),
        [({"data": points()}, "method"), ({"method": "f-kde"}, "data=(x, y)")],
    )
    def test_method_and_data_must_be_given(self, given, word):
        run = shoal.adopt(several(), build=plain)
        with pytest.raises(ConfigError) as error:
            shoal.grow(run, 1, epochs=1, progress=False, **given)
        assert_one_sentence(error.value, word)

    def test_without_a_build_there_are_no_new_members(self):
        with pytest.raises(ConfigError) as error:
            shoal.grow(shoal.adopt(several()), 1, data=points(), method="kde", epochs=1)
        assert_one_sentence(error.value, "build")


def test_no_warning_without_a_reason(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shoal.adopt(saved(several(), tmp_path / "nets"), build=plain, out=tmp_path / "run")


def test_the_code_of_the_page_runs():
    page = Path(__file__).parents[2] / "docs" / "adopt.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    names = {}
    exec(compile(code, str(page), "exec"), names)
    assert names["pred"].members.shape == (3, 50, 3)
    assert 0 <= names["found"].test["accuracy"] <= 1


def test_a_run_in_memory_gets_a_page(tmp_path):
    torch.manual_seed(0)
    run = shoal.adopt([real(), real()], data=(X, X[:, 0]))
    page = shoal.report(run, tmp_path / "page.html", data=(X, X[:, 0])).read_text()
    text = re.sub(r"<(script|style|svg).*?</\1>|<[^>]+>", " ", page, flags=re.DOTALL)
    assert "2 adopted networks" in text and "training are not known" in text
    assert "shoal.adopt(networks" in text and "error on the given data" in text
    assert "seed" not in text and "Training loss" not in text
