"""Shoal: deep ensembles as Bayesian particle systems.

    ensemble = shoal.Ensemble.init(build, members=10)
    run      = shoal.fit(ensemble, (x, y), epochs=20)
    pred     = shoal.predict(run, x_test)
    scores   = shoal.evaluate(pred, y_test)
    shoal.report(run, "report.html", data=(x_test, y_test), ood={"letters": x_ood})

Each name is imported when it is first used, so that the command line answers before torch loads.
"""

import importlib
from typing import TYPE_CHECKING, Any

from shoal.core import factories as _factories

if TYPE_CHECKING:
    from shoal import data, models
    from shoal.analysis.chains import ChainDiagnostics
    from shoal.core.errors import (
        CheckpointCorrupt,
        ConfigError,
        DataError,
        ShoalError,
        ShoalWarning,
        StorageError,
    )
    from shoal.data.dataset import Dataset, Split
    from shoal.evaluation.analyse import evidence, fidelity, landscape
    from shoal.evaluation.calibrate import calibrate
    from shoal.evaluation.compress import Compressed, compress
    from shoal.evaluation.cross_conformal import cross_conformal
    from shoal.evaluation.evaluate import Evaluation, evaluate
    from shoal.evaluation.out_of_fold import out_of_fold
    from shoal.evaluation.predict import predict
    from shoal.evaluation.worth import Worth
    from shoal.inference import adapters, likelihoods, priors, samplers
    from shoal.inference.ensemble import Ensemble
    from shoal.inference.posterior import Posterior
    from shoal.integrations.export import Exported, export
    from shoal.interaction import estimators, flows, kernels, methods, points, spaces
    from shoal.interaction.methods import Method
    from shoal.interaction.repulsion import Repulsion
    from shoal.page.compare import Comparison, compare
    from shoal.page.report import report
    from shoal.prediction import decisions, metrics
    from shoal.prediction.predictive import Predictive
    from shoal.training.adopt import adopt
    from shoal.training.draw import draw
    from shoal.training.fit import fit
    from shoal.training.folder.run import Run, load
    from shoal.training.forces import forces
    from shoal.training.grow import grow
    from shoal.training.loop.callbacks import Callback, EpochEnd, RunBegin, RunEnd, StepEnd
    from shoal.training.options.adversarial import Adversarial
    from shoal.training.sample import sample
    from shoal.training.step.results import StepInfo
    from shoal.training.stepper import Stepper

_HOMES = {
    # Train
    "Ensemble": "inference.ensemble",
    "fit": "training.fit",
    "grow": "training.grow",
    "draw": "training.draw",
    "adopt": "training.adopt",
    "Run": "training.folder.run",
    "load": "training.folder.run",
    "Adversarial": "training.options.adversarial",
    "Callback": "training.loop.callbacks",
    "RunBegin": "training.loop.callbacks",
    "StepEnd": "training.loop.callbacks",
    "EpochEnd": "training.loop.callbacks",
    "RunEnd": "training.loop.callbacks",
    "adapters": "inference",
    # Predict, evaluate and compare
    "predict": "evaluation.predict",
    "out_of_fold": "evaluation.out_of_fold",
    "calibrate": "evaluation.calibrate",
    "cross_conformal": "evaluation.cross_conformal",
    "Predictive": "prediction.predictive",
    "evaluate": "evaluation.evaluate",
    "Evaluation": "evaluation.evaluate",
    "Worth": "evaluation.worth",
    "ChainDiagnostics": "analysis.chains",
    "metrics": "prediction",
    "decisions": "prediction",
    "report": "page.report",
    "landscape": "evaluation.analyse",
    "evidence": "evaluation.analyse",
    "fidelity": "evaluation.analyse",
    "compare": "page.compare",
    "Comparison": "page.compare",
    # Use elsewhere
    "compress": "evaluation.compress",
    "Compressed": "evaluation.compress",
    "export": "integrations.export",
    "Exported": "integrations.export",
    # Compose a repulsion
    "Repulsion": "interaction.repulsion",
    "Method": "interaction.methods",
    "methods": "interaction",
    "spaces": "interaction",
    "kernels": "interaction",
    "estimators": "interaction",
    "flows": "interaction",
    "points": "interaction",
    # Say what is inferred
    "Posterior": "inference.posterior",
    "likelihoods": "inference",
    "priors": "inference",
    "samplers": "inference",
    # Below the training loop
    "Stepper": "training.stepper",
    "forces": "training.forces",
    "StepInfo": "training.step.results",
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
    "draw",
    "adopt",
    "Run",
    "load",
    "Adversarial",
    "Callback",
    "RunBegin",
    "StepEnd",
    "EpochEnd",
    "RunEnd",
    "adapters",
    "predict",
    "out_of_fold",
    "calibrate",
    "cross_conformal",
    "Predictive",
    "evaluate",
    "Evaluation",
    "Worth",
    "ChainDiagnostics",
    "metrics",
    "decisions",
    "report",
    "landscape",
    "evidence",
    "fidelity",
    "compare",
    "Comparison",
    "compress",
    "Compressed",
    "export",
    "Exported",
    "Repulsion",
    "Method",
    "methods",
    "spaces",
    "kernels",
    "estimators",
    "flows",
    "points",
    "Posterior",
    "likelihoods",
    "priors",
    "samplers",
    "Stepper",
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


def _make_loggers(*arguments: Any) -> Any:
    """`fit` gets its loggers here: it may not import them, and few runs need them."""
    from shoal.integrations.loggers import make_loggers

    return make_loggers(*arguments)


def _tell_worth(*arguments: Any, **options: Any) -> Any:
    """`Run.worth` gets its function here, which stands above a run."""
    from shoal.evaluation.worth import worth

    return worth(*arguments, **options)


def _judge_chains(*arguments: Any, **options: Any) -> Any:
    """`Run.chains` gets its function here, which stands above a run."""
    from shoal.evaluation.analyse import chains

    return chains(*arguments, **options)


_factories |= {"loggers": _make_loggers, "worth": _tell_worth, "chains": _judge_chains}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
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


def _version() -> str:
    """Of the installed package; a source tree that is not installed has none."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("shoal")
    except PackageNotFoundError:
        return "unknown"


def __dir__() -> list[str]:
    return ["__version__", *__all__]
