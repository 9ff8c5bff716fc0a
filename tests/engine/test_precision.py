"""The types that a run calculates in, and that they are left as they were."""

import pytest
import torch
from torch import nn

import shoal
from shoal.engine.precision import calculating_in, rough_products


def allowed():
    return torch.backends.cuda.matmul.allow_tf32


@pytest.fixture(params=[True, False], ids=["tensor float before", "none before"])
def before(request):
    kept, torch.backends.cuda.matmul.allow_tf32 = allowed(), request.param
    yield request.param
    torch.backends.cuda.matmul.allow_tf32 = kept


@pytest.mark.parametrize(("precision", "rough"), [("bfloat16", True), (None, False)])
def test_products_are_rough_only_where_the_networks_are(before, precision, rough):
    ensemble = shoal.Ensemble.init(lambda: nn.Linear(3, 2), 2, seed=0)
    with pytest.raises(ZeroDivisionError), calculating_in(precision, ensemble):
        assert not allowed()
        with rough_products(ensemble.compute):
            assert allowed() == rough
        assert not allowed()
        with rough_products(ensemble.compute):
            raise ZeroDivisionError
    assert allowed() == before
    assert ensemble.groups[0].compute is None


def test_tensor_float_that_was_asked_for_stays(before):
    ensemble = shoal.Ensemble.init(lambda: nn.Linear(3, 2), 2, seed=0)
    with calculating_in("tf32", ensemble), rough_products(ensemble.compute):
        assert allowed()
