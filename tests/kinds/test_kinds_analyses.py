"""Landscape and evidence of structured inputs, tokens, dense labels and graphs."""

import warnings

import pytest
import torch
from kinds_table import IGNORED, KINDS, cases
from small_runs import assert_one_sentence
from torch.nn import functional as F

import shoal

pytestmark = pytest.mark.filterwarnings("ignore:members run:shoal.core.errors.ShoalWarning")

CHOSEN = (
    "dict of two inputs", "BERT", "GPT-2", "U-Net with ignored pixels", "graph network", "LSTM",
    "weight norm", "mixed architectures", "low-rank adapters on a CNN", "last layers on a CNN",
    "scales on a CNN", "peft model", "multi-head", "batch-ensemble", "TabM",
)  # fmt: skip
USUAL = (
    "dict of two inputs", "BERT", "U-Net with ignored pixels", "graph network",
    "mixed architectures", "batch-ensemble",
)  # fmt: skip
SOME = [case for case in cases() if case.values[0].name in USUAL]
SOME += [
    pytest.param(*case.values, id=case.id, marks=[*case.marks, pytest.mark.nightly])
    for case in cases()
    if case.values[0].name in CHOSEN and case.values[0].name not in USUAL
]
NOT_HERE = ("trajectories", "averaging", "three-plane")
"""Analyses that need snapshots or three members."""


@pytest.fixture(scope="module", params=SOME)
def studied(request):
    """A kind, and a run of it without a folder."""
    kind = request.param
    members = shoal.Ensemble.init(kind.build, kind.members)
    options = {"steps": 3, "batch_size": 6, "progress": False, **kind.options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", shoal.ShoalWarning)
        return kind, shoal.fit(members, kind.training(), **options)


def losses(kind, run):
    """The sum over targets of every member's loss, by hand, and the number of targets."""
    count = int((kind.y != IGNORED).sum())
    found = []
    for index in range(run.ensemble.members):
        outputs = kind.by_hand(run.ensemble.member(index)).detach()
        found.append(float(kind.loss(outputs, kind.y)) * count)
    return found, count


def test_evidence_counts_targets(studied):
    kind, run = studied
    test = (kind.inputs, kind.y)
    found = shoal.evidence(run, kind.training(), test=test, points=12, flow_steps=2)
    total, count = losses(kind, run)
    assert found.points == count
    assert found.log_likelihoods == pytest.approx([-loss for loss in total], rel=1e-4)
    assert found.learned_priors[0].name == "point masses" or len(found.learned_priors) > 1
    for reason in found.missing.values():
        assert_one_sentence(shoal.ConfigError(reason), "; ")


def test_a_line_ends_at_the_losses_of_its_members(studied):
    kind, run = studied
    test = (kind.inputs, kind.y)
    how = {"quick": True, "points": 3, "steps": 2, "inputs": 12}
    found = shoal.landscape(run, kind.training(), test=test, **how)
    missing = {n: r.scores["missing"] for n, r in found.items() if "missing" in r.scores}
    for reason in missing.values():
        assert_one_sentence(shoal.ConfigError(reason))
    if kind.name == "mixed architectures":
        assert len(missing) == len(found)
        return
    assert set(missing) <= {*NOT_HERE}
    total, count = losses(kind, run)
    ends = found["line"].scores["paths"]["straight"]["ends"]
    assert ends == pytest.approx([loss / count for loss in total], rel=1e-4)


def test_the_hessian_of_tokens_is_that_of_the_mean_loss(double):
    """Of the tokens that count, beside the full Hessian of torch."""
    from shoal.analysis.landscape.analyses.curvature import hessian_product
    from shoal.data.dataset import Split

    kind = next(kind for kind in KINDS if kind.name == "tied weights")
    y = kind.y.masked_fill(kind.y > 6, IGNORED)
    members = shoal.Ensemble.init(kind.build, 2)
    likelihood = shoal.likelihoods.Categorical(ignore_index=IGNORED)
    product = hessian_product(members, Split(kind.inputs, y), likelihood, batch_size=5)
    vectors = {name: torch.randn_like(t) for name, t in members.weights.items()}
    found = product(vectors)
    for index in range(2):
        member = members.member(index)
        weights = list(member.parameters())
        loss = F.cross_entropy(member(kind.inputs).movedim(-1, 1), y)
        slopes = torch.autograd.grad(loss, weights, create_graph=True)
        own = [vectors[name][index] for name, _ in member.named_parameters()]
        wanted = torch.autograd.grad(slopes, weights, own)
        for (name, _), tensor in zip(member.named_parameters(), wanted, strict=True):
            torch.testing.assert_close(found[name][index], tensor)
