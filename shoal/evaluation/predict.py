"""`shoal.predict`: predictions of a run or an ensemble for new inputs."""

import os
from pathlib import Path
from typing import Any

import torch

from shoal.core.arguments import checked
from shoal.core.errors import ConfigError
from shoal.data.dataset import Dataset
from shoal.evaluation.data_arguments import Inputs, Labelled
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Likelihood
from shoal.prediction import predict as prediction
from shoal.prediction.predictive import ArrayLike, Predictive
from shoal.training.folder.run import Run, load

__all__ = ["predict"]


@checked()
def predict(
    source: Run | Ensemble | str | os.PathLike[str],
    x: Inputs,
    *,
    batch_size: int = 1024,
    device: str | torch.device | None = None,
    likelihood: Likelihood | None = None,
    weights: str | ArrayLike = "uniform",
    data: Dataset | Labelled | None = None,
    out: str | os.PathLike[str] | None = None,
    derivatives_of: str | bool | None = None,
) -> Predictive:
    """Predictions of the members for new inputs, computed in batches and without gradients.

    Args:
        source: a run, an ensemble, or the folder of a run.
        x: an array or tensor [B, ...], a pair (x, y), a torch `Dataset` of points x or (x, y), or
            a loader or other iterable of batches x or (x, y).
        batch_size: number of inputs per forward pass.
        device: device to compute on; None keeps the device of the members.
        likelihood: likelihood of an ensemble's outputs; a run has its own.
        weights: "uniform"; "posterior", by the likelihood of the training data; "stacking", the
            best weights on held-out data; or one number per member.
        data: training data for the weights, if the run cannot load its own: a `Dataset`, or a pair
            (x, y).
        out: file that ends in .safetensors, to which the outputs are written batch by batch. The
            prediction then reads them from the file, and may be larger than the memory. The file
            appears when it is complete; `Predictive.load` opens it again.
        derivatives_of: name of the input by which predictions are differentiated, or True for the
            only real input; `Predictive.derivatives` has the result for every member. None for
            what the run was trained on (`likelihoods.WithDerivatives`), False for none.
    """
    options = {"batch_size": batch_size, "device": device, "likelihood": likelihood, "out": out}
    if isinstance(weights, str) and weights != "uniform":
        source = load(Path(source)) if isinstance(source, str | os.PathLike) else source
        chosen = _named_weights(source, weights, data)
    else:
        chosen = None if isinstance(weights, str) else weights
    return prediction(
        source, x, load=load, weights=chosen, derivatives_of=derivatives_of, **options
    )


def _named_weights(source: Run | Ensemble, name: str, data: Any) -> Any:
    from shoal.analysis.evidence.compute_evidence import member_weights

    if not hasattr(source, "likelihood"):
        raise ConfigError(
            f"'{name}' weights need a run, which knows its likelihood and its data; "
            f"for an ensemble give one number per member"
        )
    return member_weights(source, name, data)
