"""The recipes of docs/recipes.md, taken from the page and run with the real libraries."""

import re
import warnings
from pathlib import Path

import pytest
import torch
from export_cases import bert
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.inference.likelihoods import Categorical

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of both libraries, about loggers and workers
]


def recipe(name):
    """The names that the code block with a class defines."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (code,) = [block for block in blocks if f"class {name}" in block]
    names = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the imports
        exec(compile(code, str(PAGE), "exec"), names)
    return names


def build():
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 2))


def ensemble():
    return shoal.Ensemble.init(build, members=3, seed=0)


@pytest.fixture(scope="module")
def points():
    x = torch.randn(48, 2, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum(1) > 0).long())


class TestLightning:
    @pytest.fixture(scope="class")
    def lightning(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return pytest.importorskip("lightning", reason="lightning is not installed")

    @pytest.fixture(scope="class")
    def module(self, lightning):
        made = recipe("LightningEnsemble")["LightningEnsemble"]
        return lambda: made(ensemble(), 48, method="f-kde", lr=0.02, device="cpu")

    def trainer(self, lightning, folder, epochs, **more):
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        return lightning.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            default_root_dir=folder,
            num_sanity_val_steps=0,
            **quiet,
            **more,
        )

    def test_members_are_those_of_the_same_steps(self, lightning, module, points, tmp_path):
        loader, trained = DataLoader(points, 16), module()
        trainer = self.trainer(lightning, tmp_path, 4)
        trainer.fit(trained, loader, loader)
        alone = shoal.Stepper(ensemble(), n=48, method="f-kde", lr=0.02)
        for _ in range(4):
            for batch in loader:
                alone(batch)
        _same(trained.stepper.ensemble, alone.ensemble)
        assert trained.stepper.step == 12
        logged = trainer.callback_metrics
        pred = shoal.predict(alone.ensemble, points.tensors[0], likelihood=Categorical())
        wanted = shoal.evaluate(pred, points.tensors[1])
        assert float(logged["val_nll"]) == pytest.approx(wanted["nll"], rel=1e-4)
        assert float(logged["val_accuracy"]) == pytest.approx(wanted["accuracy"])

    def test_a_checkpoint_continues_to_the_bit(self, lightning, module, points, tmp_path):
        loader, whole, first, second = DataLoader(points, 16), module(), module(), module()
        self.trainer(lightning, tmp_path, 4).fit(whole, loader)
        begun = self.trainer(lightning, tmp_path, 2)
        begun.fit(first, loader)
        begun.save_checkpoint(tmp_path / "half.ckpt")
        again = self.trainer(lightning, tmp_path, 4)
        again.fit(second, loader, ckpt_path=tmp_path / "half.ckpt")
        _same(whole.stepper.ensemble, second.stepper.ensemble)

    def test_early_stopping_sees_the_ensemble(self, lightning, module, points, tmp_path):
        loader = DataLoader(points, 16)
        stop = lightning.pytorch.callbacks.EarlyStopping(
            "val_nll", patience=1, mode="min", min_delta=10.0
        )
        trainer = self.trainer(lightning, tmp_path, 9, callbacks=[stop])
        trainer.fit(module(), loader, loader)
        assert trainer.current_epoch == 2


class TestHuggingFace:
    @pytest.fixture(scope="class")
    def library(self):
        pytest.importorskip("accelerate", reason="accelerate is not installed")
        return pytest.importorskip("transformers", reason="transformers is not installed")

    @pytest.fixture(scope="class")
    def sentences(self):
        ids = torch.randint(0, 50, (32, 9), generator=torch.Generator().manual_seed(0))
        mask = torch.ones_like(ids)
        labels = (ids[:, 0] > 25).long()
        return [
            {"input_ids": a, "attention_mask": b, "labels": c}
            for a, b, c in zip(ids, mask, labels, strict=True)
        ]

    def trainer(self, library, sentences, folder, steps, **more):
        args = library.TrainingArguments(
            str(folder),
            max_steps=steps,
            per_device_train_batch_size=8,
            learning_rate=5e-3,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=2,
            max_grad_norm=0,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            seed=0,
            **more,
        )
        settings = {"method": "f-kde", "likelihood": Categorical()}
        members = shoal.Ensemble.init(bert, members=2, seed=0)
        return recipe("EnsembleTrainer")["EnsembleTrainer"](
            members,
            args,
            sentences,
            settings,
            eval_dataset=sentences,
            compute_metrics=lambda e: {"hits": (e.predictions.argmax(1) == e.label_ids).mean()},
        )

    def test_it_learns_and_evaluates_the_ensemble(self, library, sentences, tmp_path):
        trainer = self.trainer(library, sentences, tmp_path, 24, save_strategy="no")
        trainer.train()
        found = trainer.evaluate()
        inputs = {
            key: torch.stack([each[key] for each in sentences])
            for key in ("input_ids", "attention_mask")
        }
        labels = torch.stack([each["labels"] for each in sentences])
        ensemble = trainer.stepper.ensemble
        pred = shoal.predict(ensemble, inputs, likelihood=trainer.stepper.likelihood)
        wanted = shoal.evaluate(pred, labels)
        assert trainer.stepper.step == 24
        assert found["eval_loss"] == pytest.approx(wanted["nll"], rel=1e-3)
        assert found["eval_hits"] == pytest.approx(wanted["accuracy"])
        assert wanted["accuracy"] > 0.9

    def test_a_checkpoint_continues(self, library, sentences, tmp_path):
        """Batches, learning rates, members and their optimiser are those of one long run."""
        whole = self.trainer(library, sentences, tmp_path / "whole", 6, save_strategy="no")
        whole.train()
        half = {"save_strategy": "steps", "save_steps": 3}
        self.trainer(library, sentences, tmp_path / "half", 3, **half).train()
        again = self.trainer(library, sentences, tmp_path / "half", 6, **half)
        again.train(resume_from_checkpoint=True)
        assert again.stepper.step == 6
        _same(whole.stepper.ensemble, again.stepper.ensemble)

    def test_the_best_checkpoint_has_the_members(self, library, sentences, tmp_path):
        """A learning rate that ruins the members later: the best ones come back."""
        each = {
            "save_steps": 2,
            "eval_steps": 2,
            "eval_strategy": "steps",
            "save_strategy": "steps",
        }
        each |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
        trainer = self.trainer(library, sentences, tmp_path, 8, **each)
        trainer.stepper = _Ruined(trainer.stepper)
        trainer.train()
        assert 0 < trainer.state.best_global_step < 8
        assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric)


class _Ruined:
    """A stepper whose last steps are far too long."""

    def __init__(self, stepper):
        self.stepper = stepper

    def __call__(self, batch, lr):
        return self.stepper(batch, lr=lr if self.stepper.step < 4 else 1.0)


def _same(one, other):
    for name, tensor in one.state.items():
        assert torch.equal(tensor, other.state[name]), name
