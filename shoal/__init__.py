"""Shoal: deep ensembles as Bayesian particle systems.

    ensemble = shoal.Ensemble.init(build, members=10)
    run      = shoal.fit(ensemble, (x, y), method="f-kde", epochs=20)
    pred     = shoal.predict(run, x_new)
    scores   = shoal.evaluate(pred, y_new)
    shoal.report([run], "report.html")

Each name is imported when it is first used, so that the command line answers before torch loads.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal import data, models
    from shoal.analysis.evidence import evidence
    from shoal.app.api import predict, report
    from shoal.core.errors import (
        CheckpointCorrupt,
        ConfigError,
        DataError,
        ShoalError,
        ShoalWarning,
        StorageError,
    )
    from shoal.data.dataset import Dataset, Split
    from shoal.inference import likelihoods, priors
    from shoal.inference.ensemble import Ensemble
    from shoal.inference.posterior import Posterior
    from shoal.interaction import estimators, flows, kernels, methods, spaces
    from shoal.interaction.methods import Method
    from shoal.interaction.repulsion import Repulsion
    from shoal.prediction import metrics
    from shoal.prediction.metrics import evaluate
    from shoal.prediction.predictive import Predictive
    from shoal.training.adversarial import Adversarial
    from shoal.training.fit import fit
    from shoal.training.grow import grow
    from shoal.training.run import Run, load
    from shoal.training.sample import sample
    from shoal.training.step import StepInfo, forces

# Members run side by side on a GPU. Unless its driver is told before it starts, eight queues lead
# there, and members that share one wait for each other.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

_HOMES = {
    # Train
    "Ensemble": "inference.ensemble",
    "fit": "training.fit",
    "grow": "training.grow",
    "Run": "training.run",
    "load": "training.run",
    "Adversarial": "training.adversarial",
    # Predict and judge
    "predict": "app.api",
    "Predictive": "prediction.predictive",
    "evaluate": "prediction.metrics",
    "metrics": "prediction",
    "report": "app.api",
    "evidence": "analysis.evidence",
    # Compose a repulsion
    "Repulsion": "interaction.repulsion",
    "Method": "interaction.methods",
    "methods": "interaction",
    "spaces": "interaction",
    "kernels": "interaction",
    "estimators": "interaction",
    "flows": "interaction",
    # Say what is inferred
    "Posterior": "inference.posterior",
    "likelihoods": "inference",
    "priors": "inference",
    # Below the training loop
    "forces": "training.step",
    "StepInfo": "training.step",
    "sample": "training.sample",
    # The world
    "Dataset": "data.dataset",
    "Split": "data.dataset",
    "data": "",
    "models": "",
    # What can go wrong
    "ShoalError": "core.errors",
    "ConfigError": "core.errors",
    "DataError": "core.errors",
    "StorageError": "core.errors",
    "CheckpointCorrupt": "core.errors",
    "ShoalWarning": "core.errors",
}

__all__ = [  # noqa: RUF022
    "Ensemble",
    "fit",
    "grow",
    "Run",
    "load",
    "Adversarial",
    "predict",
    "Predictive",
    "evaluate",
    "metrics",
    "report",
    "evidence",
    "Repulsion",
    "Method",
    "methods",
    "spaces",
    "kernels",
    "estimators",
    "flows",
    "Posterior",
    "likelihoods",
    "priors",
    "forces",
    "StepInfo",
    "sample",
    "Dataset",
    "Split",
    "data",
    "models",
    "ShoalError",
    "ConfigError",
    "DataError",
    "StorageError",
    "CheckpointCorrupt",
    "ShoalWarning",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shoal' has no attribute '{name}'")
    home = ".".join(part for part in ("shoal", _HOMES[name]) if part)
    try:
        value = importlib.import_module(f"{home}.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"{home}.{name}":
            raise
        value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
