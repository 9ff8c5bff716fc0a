"""A step that repels input gradients can be captured: nothing in it asks the host for a value."""

import pytest
import torch
from host_questions import Questions, as_on_a_gpu

from shoal.engine.members.precision import calculating_in
from shoal.experiment.bench.agreement import SmoothCNN
from shoal.experiment.bench.battery import Case, trainer
from shoal.experiment.bench.networks import Network
from shoal.models import SmallCNN


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", ["forde", "forde+fraction=0.5", "forde-identity"])
@pytest.mark.parametrize("network", [SmoothCNN(), SmallCNN((4, 8))], ids=["coupled", "separate"])
def test_the_host_is_asked_nothing(monkeypatch, network, method, precision):
    as_on_a_gpu(monkeypatch)
    named = Network("network", network, (3, 8, 8))
    case = Case(named, 3, 4, precision, "sgd", torch.device("cpu"), 8, 0.1)
    ensemble = case.make()
    (x, y), step = case.data(), torch.tensor(3)
    with calculating_in(precision, ensemble):
        made = trainer(case, ensemble, method, "loop+eager", 9, strength=10.0)
        made.mover.move(
            x[:4], y[:4], 1.0, step
        )  # what is found out once is found out before a capture
        before = {name: weight.detach().clone() for name, weight in ensemble.weights.items()}
        with Questions() as questions:
            made.mover.move(x[:4], y[:4], 1.0, step)
    assert questions.asked == []
    assert not any(torch.equal(before[name], weight) for name, weight in ensemble.weights.items())


def test_a_question_would_be_noticed():
    with Questions() as questions:
        x = torch.ones(3)
        x[x > 0]
        float(x.sum())
    assert [name for name, _ in questions.asked] == [
        "aten.index.Tensor",
        "aten._local_scalar_dense.default",
    ]
