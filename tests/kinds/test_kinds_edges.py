"""Batches that differ in length, inputs without targets, and what is refused in one sentence."""

import kinds_networks as networks
import pytest
import torch
from kinds_table import (
    FEATURES,
    IGNORED,
    IMAGES,
    KINDS,
    LABELS,
    NEXT,
    PIXELS,
    TEXT,
    TOKEN,
)
from small_runs import assert_one_sentence
from torch import nn

import shoal

NAMED = {kind.name: kind for kind in KINDS}
HALF = 6


def fitted(name, data=None, **options):
    kind = NAMED[name]
    members = shoal.Ensemble.init(kind.build, kind.members)
    given = {"steps": 2, "batch_size": HALF, "progress": False, **kind.options, **options}
    return shoal.fit(members, kind.training() if data is None else data, **given)


def padded(labels):
    """Two batches whose sequences are padded to different lengths, as collators do."""
    short = {name: tensor[:HALF, :4] for name, tensor in TEXT.items()}
    own = labels[:HALF, :4] if labels.ndim > 1 else labels[:HALF]
    rest = {name: tensor[HALF:] for name, tensor in TEXT.items()}
    return [{**short, "labels": own}, {**rest, "labels": labels[HALF:]}]


class TestBatchesOfDifferentLengths:
    @pytest.fixture(autouse=True)
    def installed(self):
        pytest.importorskip("transformers")

    @pytest.mark.parametrize("method", ["f-kde", "forde-identity"])
    def test_sequences_with_one_label(self, method):
        batches = padded(LABELS)
        run = fitted("BERT", batches, method=method, steps=4)
        members = shoal.predict(run, batches).members
        for index in range(2):
            member = run.ensemble.member(index)
            wanted = [member(**{n: batch[n] for n in TEXT}).logits for batch in batches]
            torch.testing.assert_close(members[index], torch.cat(wanted).detach())
        found = shoal.evaluate(run, batches, keep=False)
        expected = shoal.evaluate(shoal.predict(run, batches), LABELS)
        assert found.test["nll"] == pytest.approx(expected["nll"])

    def test_tokens_train_and_are_padded_to_be_predicted(self):
        batches = padded(NEXT)
        run = fitted("GPT-2", batches, steps=4)
        for call in (shoal.predict, shoal.evaluate):
            with pytest.raises(shoal.ShoalError) as caught:
                call(run, batches)
            assert_one_sentence(caught.value, "pad")


@pytest.mark.parametrize("name", ["dict of two inputs", "two inputs", "named tuple", "dataclass"])
def test_other_inputs_need_no_targets(name):
    kind = NAMED[name]
    data = {"ood": {"same": kind.inputs}, "shifts": {"none": kind.inputs}}
    found = shoal.evaluate(fitted(name), (kind.inputs, kind.y), keep=False, **data)
    assert found.shifts["none"] == found.test
    assert found.ood["same"]["auroc_entropy"] == pytest.approx(0.5)


def test_graphs_may_be_evaluated_beside_others():
    kind = NAMED["graph network"]
    run = fitted("graph network")
    batches = kind.training()
    found = shoal.evaluate(run, batches, ood={"same": batches}, keep=False)
    whole = shoal.evaluate(run, (kind.inputs, kind.y), keep=False)
    assert found.test["nll"] == pytest.approx(whole.test["nll"])
    assert found.ood["same"]["auroc_entropy"] == pytest.approx(0.5)


@pytest.mark.parametrize("form", ["dict", "loader"])
def test_weights_of_a_structured_batch_are_repetition(form):
    """Beside a batch in which every point stands as often as its weight says."""
    weight = torch.arange(12.0) % 3
    rows = torch.repeat_interleave(torch.arange(12), weight.long())
    kind = NAMED["dict of two inputs"]
    whole = {**kind.inputs, "labels": LABELS, "sample_weight": weight}
    repeated = {name: tensor[rows] for name, tensor in (kind.inputs | {"labels": LABELS}).items()}
    options = {"batch_size": 99, "method": "ensemble", "optimizer": "sgd", "steps": 1}
    one = fitted(kind.name, whole if form == "dict" else [whole], **options)
    other = fitted(kind.name, repeated, **options)
    for name, tensor in one.ensemble.weights.items():
        torch.testing.assert_close(tensor, other.ensemble.weights[name])


@pytest.mark.parametrize("method", ["ensemble", "kde", "f-kde", "f-svgd", "forde-identity"])
def test_ignored_tokens_are_as_if_absent(method):
    """N, the loss and the repulsion count the other tokens only."""
    kind = NAMED["tied weights"]
    more = torch.cat([kind.inputs, kind.inputs[:, :2]], 1)
    ignored = torch.cat([kind.y, torch.full((12, 2), IGNORED)], 1)
    options = {"batch_size": 99, "method": method, "optimizer": "sgd", "lr": 0.1, "steps": 2}
    one, other = (fitted(kind.name, data, **options) for data in (None, (more, ignored)))
    for name, tensor in one.ensemble.weights.items():
        torch.testing.assert_close(tensor, other.ensemble.weights[name])


def test_weights_of_a_structured_test_set_are_repetition():
    kind, weight = NAMED["dict of two inputs"], torch.arange(12.0) % 3
    rows = torch.repeat_interleave(torch.arange(12), weight.long())
    repeated = {name: tensor[rows] for name, tensor in kind.inputs.items()}, LABELS[rows]
    weighted = kind.inputs, LABELS, weight
    run = fitted(kind.name)
    one, other = (shoal.evaluate(run, data, keep=False).test for data in (weighted, repeated))
    assert one["nll"] == pytest.approx(other["nll"])
    one, other = (shoal.evidence(run, data, priors=False) for data in (weighted, repeated))
    assert one.points == other.points == len(rows)
    assert one.log_likelihoods == pytest.approx(other.log_likelihoods)
    assert one.gradient_norms == pytest.approx(other.gradient_norms, rel=1e-4)


class TwoReal(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(2, 3)

    def forward(self, a, b):
        return self.a(a).tanh() + self.b(b)


def two_real(**method):
    data = {"a": FEATURES, "b": FEATURES[:, :2]}, LABELS
    members = shoal.Ensemble.init(TwoReal, 2)
    return shoal.fit(members, data, steps=2, progress=False, method={"name": "forde", **method})


def test_input_gradients_of_a_named_input():
    found = {name: two_real(gradients_of=name).ensemble.weights for name in ("a", "b")}
    assert any(not torch.equal(t, found["b"][name]) for name, t in found["a"].items())


REFUSED = {
    "tokens have no axes": (lambda: fitted("tied weights", method="forde"), "forde-identity"),
    "labels of -100": (
        lambda: fitted("perceptron", (FEATURES, LABELS.where(LABELS > 0, IGNORED))),
        "ignore_index=-100",
    ),
    "two real inputs": (two_real, "gradients_of"),
    "a name of no input": (lambda: two_real(gradients_of="c"), "choose from: a, b"),
    "lazy layers": (lambda: shoal.Ensemble.init(networks.lazy, 2), "call the network once"),
    "several outputs": (lambda: fitted("dict of outputs", outputs=None), "fit(outputs="),
    "no such output": (lambda: fitted("dict of outputs", outputs="other"), "'scores'"),
    "one label for many places": (lambda: fitted("U-Net", (IMAGES, LABELS)), "[B, H, W]"),
    "labels of other places": (lambda: fitted("U-Net", (IMAGES, PIXELS[:, :3])), "(N, 4, 4)"),
    "adversaries of a dict": (
        lambda: fitted("dict of two inputs", adversarial=0.1),
        "leave adversarial out",
    ),
    "augmented dict": (
        lambda: fitted("dict of two inputs", augment="crop-flip"),
        "augment in the loader",
    ),
    "a dict without labels": (lambda: fitted("dict of two inputs", {"token": TOKEN}), "'labels'"),
    "rows that differ": (
        lambda: shoal.predict(fitted("two inputs"), {"features": FEATURES, "token": TOKEN[:3]}),
        "one row per data point",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_one_sentence_says_what_to_do(case):
    call, words = REFUSED[case]
    with pytest.raises(shoal.ShoalError) as caught:
        call()
    assert_one_sentence(caught.value, words)


def test_tokens_of_a_dict_have_no_axes():
    pytest.importorskip("transformers")
    with pytest.raises(shoal.ShoalError) as caught:
        fitted("GPT-2", method="forde")
    assert_one_sentence(caught.value, "forde-identity")
