"""Figures of every method on the published toy problems: python -m studies.toys

The script writes regression.png, classification.png and particles.png beside itself, one panel per
method. All panels have the same data, networks, seeds, number of steps and strength (1, or
--strength). It takes about two minutes on two cores.
"""

import argparse

import torch

import shoal
from shoal.data import targets
from shoal.models import MLP, Blueprint
from shoal.plots.toys import band, particles, plane
from studies import RESULTS
from studies.common import sheet

FOLDER = RESULTS / "toys"
METHODS = list(shoal.methods.METHODS)


def train(data, method, strength, likelihood, epochs, batch_size):
    """Twenty members of two hidden layers, as in the experiments of the same names."""
    blueprint = Blueprint(MLP((50, 50)), data.input_shape, data.outputs)
    return shoal.fit(
        shoal.Ensemble.init(blueprint, members=20, seed=0),
        data,
        method=method,
        strength=strength,
        likelihood=likelihood,
        lr=1e-2,
        schedule="cosine",
        epochs=epochs,
        batch_size=batch_size,
        progress=False,
    )


def regression(strength):
    """Mean and two standard deviations over the input range."""
    data = shoal.data.registry["toy-regression"]()
    x = torch.linspace(0, 7, 200)[:, None]
    for method in METHODS:
        run = train(data, method, strength, shoal.likelihoods.Gaussian(0.25), 300, 30)
        pred = shoal.predict(run, x)
        yield band(
            x[:, 0],
            pred.mean.flatten(),
            pred.stddev.flatten(),
            (data.train.x[:, 0], data.train.y),
            method,
            method,
        )


def classification(strength):
    """Predictive entropy over the plane."""
    data = shoal.data.registry["toy-classification"]()
    side = torch.linspace(-12, 12, 80)
    up, across = torch.meshgrid(side, side, indexing="ij")
    grid = torch.stack([across.flatten(), up.flatten()], -1)
    for method in METHODS:
        run = train(data, method, strength, None, 200, 50)
        values = shoal.predict(run, grid).entropy().reshape(80, 80)
        yield plane(side, side, values, (data.train.x, data.train.y), method)


def sampling():
    """Particles on the contours of the synthetic targets."""
    for name in ("gaussian", "mixture", "funnel"):
        target = targets.registry.make(name)
        start = torch.randn(100, 2, generator=torch.Generator().manual_seed(0))
        for method in ("ensemble", "kde", "sge", "ssge", "svgd"):
            found = shoal.sample(
                target.log_density, start, method=method, steps=1500, lr=0.05, optimizer="adam"
            )
            yield particles(target, found, None, method, f"{name}: {method}")


def main():
    """Make all three figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strength", type=float, default=1.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sheet(regression(options.strength), 3, FOLDER / "regression.png")
    sheet(classification(options.strength), 3, FOLDER / "classification.png")
    sheet(sampling(), 5, FOLDER / "particles.png")


if __name__ == "__main__":
    main()
