"""The kernels of whole stages against literal formulas and against the stages without them."""

import math

import pytest
import reference
import torch
from torch.nn import functional as F
from triton_ready import runs_kernels

from shoal.engine.kernels import fused

pytestmark = [
    runs_kernels(fused.step_kernels),
    pytest.mark.filterwarnings("ignore:Conversion of an array"),  # Triton's interpreter
    pytest.mark.filterwarnings("ignore:invalid value"),
    pytest.mark.filterwarnings("ignore:divide by zero"),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN, INF = math.nan, math.inf
LITERAL = {
    "rbf": reference.rbf,
    "laplace": reference.laplace,
    "imq": reference.imq,
    "matern-1.5": reference.matern32,
    "matern-2.5": reference.matern52,
}


def points(members, dead=()):
    """Coordinates, their Gram matrix about the centre of the finite members, and these."""
    z = torch.randn(members, 5, generator=torch.Generator().manual_seed(members)).double()
    alive = torch.ones(members, dtype=torch.bool)
    alive[list(dead)] = False
    y = torch.where(alive[:, None], z - z[alive].mean(0), 0.0)
    return y, (y @ y.mT).float()[None].to(DEVICE), alive


def matrices(gram, alive, *choices, **settings):
    found = fused.interaction_kernels.matrices(gram, alive.to(DEVICE), *choices, **settings)
    return found._replace(
        **{n: t.cpu().double() for n, t in found._asdict().items() if t is not None}
    )


class TestMatrices:
    @pytest.mark.parametrize("flow", ["kde", "svgd"])
    @pytest.mark.parametrize("kernel", LITERAL)
    def test_fixed_bandwidth_is_the_textbook(self, kernel, flow):
        z, gram, alive = points(6)
        K, push = reference.interaction(flow, False, z, LITERAL[kernel], 1.7)
        found = matrices(gram, alive, kernel, "stein" if flow == "svgd" else flow, h2=1.7)
        torch.testing.assert_close(found.K, K, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(found.B[0] @ z, push, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(found.lengths, push.norm(dim=1), rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(found.summary, torch.tensor([1.7, 36 / K.sum()]).double(),
                                   rtol=1e-5, atol=0)  # fmt: skip
        if flow == "svgd":
            torch.testing.assert_close(found.mix, K / 6, rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("scale", ["log", "unit"])
    @pytest.mark.parametrize("legacy", [False, True])
    @pytest.mark.parametrize("members", [2, 3, 4, 7, 17, 33])
    def test_median_bandwidth_is_the_textbook(self, members, legacy, scale):
        z, gram, alive = points(members)
        every = {"logarithm": scale == "log", "every": legacy}
        found = matrices(gram, alive, "rbf", "kde", **every)
        h2 = reference.median_h2(z, legacy, scale)
        assert float(found.h2) == pytest.approx(h2, rel=1e-4)

    @pytest.mark.parametrize("dead", [(0,), (2, 5), (0, 1, 2, 3, 4, 5, 6, 7)])
    def test_diverged_members_do_not_count(self, dead):
        z, gram, alive = points(9, dead)
        found = matrices(gram, alive, "rbf", "kde")
        K, push = reference.interaction("kde", False, z[alive])
        torch.testing.assert_close(found.K[alive][:, alive], K, rtol=1e-4, atol=1e-6)
        assert not found.K[~alive].any() and not found.B[0, ~alive].any()
        torch.testing.assert_close((found.B[0] @ z)[alive], push, rtol=1e-3, atol=1e-5)

    @pytest.mark.parametrize("alike", [3, 5])
    def test_coincident_members_have_the_mean_distance(self, alike):
        z = torch.zeros(5, 2)
        z[alike:, 0] = 2.0
        z = z - z.mean(0)
        found = matrices((z @ z.mT)[None].to(DEVICE), torch.ones(5, dtype=torch.bool), "rbf", "kde")
        d2 = torch.pdist(z).square()
        middle = float(d2.median() if alike == 5 else d2.quantile(0.5))
        want = middle / (2 * math.log(6)) if middle > 0 else float(d2.mean()) or 1.0
        assert float(found.h2) == pytest.approx(want, rel=1e-5)

    def test_the_laplacian_is_left_to_an_estimator(self):
        _, gram, alive = points(5)
        found = matrices(gram, alive, "rbf", "laplacian")
        kde = matrices(gram, alive, "rbf", "kde")
        torch.testing.assert_close(found.B / found.K.sum(1)[:, None], kde.B, rtol=1e-5, atol=1e-7)
        assert found.lengths is None


class TestCategorical:
    def problem(self, members, count, classes, columns):
        generator = torch.Generator().manual_seed(count)
        outputs = 3 * torch.randn(members, count, classes, generator=generator)
        y = torch.randint(classes, (count,), generator=generator)
        outputs = outputs.mT.contiguous().mT if columns else outputs
        return outputs.to(DEVICE), y.to(DEVICE), torch.ones(members, dtype=torch.bool).to(DEVICE)

    @pytest.mark.parametrize("columns", [False, True])
    @pytest.mark.parametrize("shape", [(3, 7, 10), (2, 128, 10), (1, 1, 1), (2, 30, 300)])
    @pytest.mark.parametrize("factor", [1.0, 0.5, "tensor"])
    def test_equals_the_cross_entropy(self, shape, columns, factor):
        outputs, y, alive = self.problem(*shape, columns)
        given = torch.tensor(0.3, device=DEVICE) if factor == "tensor" else factor
        loss, found, gradient, drive, lengths = fused.likelihood_kernels.categorical(
            outputs, y, alive, given, apart=False
        )
        live = outputs.double().requires_grad_()
        exact = torch.stack([F.cross_entropy(each, y) for each in live])
        (slope,) = torch.autograd.grad(-exact.sum(), live)
        torch.testing.assert_close(loss.double(), exact.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradient.double(), slope, rtol=1e-4, atol=1e-7)
        want = float(given) * slope
        torch.testing.assert_close(drive.double(), want, rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(
            lengths.double(), want.flatten(1).norm(dim=1), rtol=1e-4, atol=1e-7
        )
        assert found.all() and gradient.stride() == outputs.stride()
        assert (drive is gradient) == (factor == 1.0)

    @pytest.mark.parametrize("shape", [(3, 7, 10), (2, 128, 10), (2, 30, 300)])
    def test_members_may_have_labels_of_their_own(self, shape):
        outputs, y, alive = self.problem(*shape, True)
        labels = torch.stack([(y + member) % shape[2] for member in range(shape[0])])
        assert fused.likelihood_kernels.takes(outputs, labels)
        found = fused.likelihood_kernels.categorical(outputs, labels, alive, 0.5, apart=False)
        for member, mine in enumerate(labels):
            one = slice(member, member + 1)
            alone = fused.likelihood_kernels.categorical(outputs[one], mine, alive[one], 0.5, False)
            for whole, part in zip(found, alone, strict=True):
                assert torch.equal(whole[one], part)

    @pytest.mark.parametrize("value", [NAN, INF, -INF])
    def test_a_diverged_member_stays_alone(self, value):
        outputs, y, alive = self.problem(4, 9, 3, True)
        exact = fused.likelihood_kernels.categorical(outputs, y, alive, 1.0, apart=True)
        outputs[1, 4, int(y[4])] = value
        alive[3] = False
        found = fused.likelihood_kernels.categorical(outputs, y, alive, 1.0, apart=True)
        assert found.alive.tolist() == [True, False, True, False]
        assert not found.gradient[1].any() and not found.drive[3].any()
        for one, other in zip(found, exact, strict=True):
            assert torch.equal(one[[0, 2]], other[[0, 2]])
        assert found.drive.data_ptr() != found.gradient.data_ptr()

    def test_other_shapes_are_left_to_torch(self):
        outputs, y, _ = self.problem(2, 6, 3, False)
        takes = fused.likelihood_kernels.takes
        assert takes(outputs, y)
        assert not takes(outputs, F.one_hot(y, 3).float())
        assert not takes(outputs[:, ::2], y[::2]) and not takes(outputs[:, None], y)
        assert not takes(torch.empty(1, 2**13, 10), torch.zeros(2**13, dtype=torch.int64))


class TestManyCategorical:
    """Outputs of tokens and places, with and without weights of the targets."""

    def problem(self, shape, channels_first=False, weighted=False):
        generator = torch.Generator().manual_seed(len(shape))
        outputs = 3 * torch.randn(shape, generator=generator)
        if channels_first:
            outputs = outputs.movedim(-1, 2).contiguous().movedim(2, -1)
        y = torch.randint(shape[-1], shape[1:-1], generator=generator)
        weight = torch.rand(shape[1:-1], generator=generator) if weighted else None
        if weight is not None:
            weight[0], y[0] = 0.0, -100
            weight = weight.to(DEVICE)
        return outputs.to(DEVICE), y.to(DEVICE), weight

    @pytest.mark.parametrize("weighted", [False, True])
    @pytest.mark.parametrize("factor", [1.0, 0.5, "tensor"])
    @pytest.mark.parametrize(
        ("shape", "first"),
        [((2, 3, 5, 7), False), ((2, 2, 5000), False), ((2, 2, 3, 4, 5), True), ((1, 2, 1), False)],
    )
    def test_equals_the_cross_entropy(self, shape, first, factor, weighted):
        outputs, y, weight = self.problem(shape, first, weighted)
        alive = torch.ones(len(outputs), dtype=torch.bool, device=DEVICE)
        given = torch.tensor(0.3, device=DEVICE) if factor == "tensor" else factor
        assert fused.likelihood_kernels.takes_many(outputs, y, weight)
        loss, found, gradient, drive, lengths = fused.likelihood_kernels.many_categorical(
            outputs, y, weight, alive, given, apart=False
        )
        live = outputs.double().requires_grad_()
        each = live.log_softmax(-1).gather(-1, y.clamp(min=0).expand(live.shape[:-1])[..., None])
        each = each.squeeze(-1).flatten(1)
        w = torch.ones_like(y, dtype=torch.double) if weight is None else weight.double()
        exact = (each * w.flatten()).sum(1) / w.sum()
        (slope,) = torch.autograd.grad(exact.sum(), live)
        torch.testing.assert_close(loss.double(), -exact.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradient.double(), slope, rtol=1e-4, atol=1e-7)
        want = float(given) * slope
        torch.testing.assert_close(drive.double(), want, rtol=1e-4, atol=1e-7)
        norms = want.flatten(1).norm(dim=1)
        torch.testing.assert_close(lengths.double(), norms, rtol=1e-4, atol=1e-7)
        assert found.all() and gradient.stride() == outputs.stride()
        assert (drive is gradient) == (factor == 1.0)

    def test_labels_of_their_own_and_a_diverged_member(self):
        outputs, y, _ = self.problem((4, 2, 3, 5))
        labels = torch.stack([(y + member) % 5 for member in range(4)])
        outputs[1, 0, 2, 3] = NAN
        alive = torch.tensor([True, True, True, False], device=DEVICE)
        many = fused.likelihood_kernels.many_categorical
        found = many(outputs, labels, None, alive, 1.0, apart=True)
        assert found.alive.tolist() == [True, False, True, False]
        assert not found.gradient[1].any() and not found.drive[3].any()
        assert found.drive.data_ptr() != found.gradient.data_ptr()
        alone = many(outputs[2:3], labels[2], None, alive[2:3], 1.0, apart=True)
        for whole, part in zip(found, alone, strict=True):
            assert torch.equal(whole[2:3], part)

    def test_other_shapes_are_left_to_torch(self):
        outputs, y, weight = self.problem((2, 3, 4, 5), weighted=True)
        takes = fused.likelihood_kernels.takes_many
        assert takes(outputs, y, weight)
        assert not takes(outputs, F.one_hot(y.clamp(min=0), 5).float(), None)
        assert not takes(outputs[:, :, ::2], y[:, ::2], None)
        assert not takes(outputs, y, weight.expand(2, -1, -1))


class TestBookkeeping:
    def test_measures_are_means_over_finite_members(self):
        drive = torch.tensor([3.0, NAN, 4.0, 100.0], device=DEVICE)
        push = torch.tensor([1.0, 1.0, INF, 100.0], device=DEVICE)
        alive = torch.tensor([True, True, True, False], device=DEVICE)
        kernel = torch.tensor([0.7, 2.5], device=DEVICE)
        measures = fused.step_kernels.measures
        want = [math.sqrt(25 / 3), math.sqrt(2 / 3)]
        assert measures(drive, push, alive, kernel).tolist() == pytest.approx([*want, 0.7, 2.5])
        assert measures(drive, None, alive).tolist() == pytest.approx([want[0], 0.0, 0.0, 3.0])
        assert measures(drive, None, alive & False).tolist() == [0.0, 0.0, 0.0, 1.0]

    def test_history_is_summed(self):
        sums = torch.arange(8.0, device=DEVICE)
        ratio_max = torch.tensor(0.25, device=DEVICE)
        lived = torch.tensor([4, 5, 6], device=DEVICE)
        loss = torch.tensor([0.5, 1.5, 2.5], device=DEVICE)
        alive = torch.tensor([True, False, True], device=DEVICE)
        for push, largest in ((1.0, 0.5), (0.0, 0.5), (NAN, 0.5)):
            found = torch.tensor([2.0, push, 3.0, 4.0], device=DEVICE)
            fused.step_kernels.add_to_history(sums, ratio_max, lived, found, loss, alive)
            assert float(ratio_max) == largest
        assert lived.tolist() == [7, 5, 9]
        assert sums[[0, 1, 3, 4]].tolist() == [3.0, 7.0, 12.0, 16.0]
        assert sums[5:].tolist() == [6.5, 10.5, 14.5]

    def test_batches_come_in_order(self):
        order = torch.arange(600, device=DEVICE).flip(0).view(2, 300)
        pace = torch.tensor([[0.1, 1.0], [0.2, 0.9], [0.3, 0.8]], device=DEVICE)
        places, rate = torch.tensor([0, 1], device=DEVICE), torch.tensor(0.0, device=DEVICE)
        done = torch.zeros((), dtype=torch.int32, device=DEVICE)
        x, y = torch.randn(600, 3, 5, device=DEVICE), torch.arange(600, device=DEVICE) % 7
        for batch, size in ((0, 300), (1, 7)):
            given = places, order, pace, rate, done, (x, y)
            inputs, targets, factor, step = fused.step_kernels.next_batch(*given, size)
            rows = order[batch, :size]
            assert torch.equal(inputs, x[rows]) and torch.equal(targets, y[rows])
            assert int(done) == 0
            assert (float(rate), float(factor)) == pytest.approx(tuple(pace[batch + 1].tolist()))
            assert int(step) == batch + 1 and places.tolist() == [batch + 1, batch + 2]

    @pytest.mark.parametrize("dtype", [torch.float16, torch.uint8, torch.float64, torch.bool])
    def test_rows_of_any_type_are_copied_in_words(self, dtype):
        x = torch.arange(48, device=DEVICE).reshape(6, 8).to(dtype)
        words = fused.step_kernels.in_words(x)
        assert words.shape == (6, 2 * x.element_size())
        assert torch.equal(words.view(dtype), x)

    def test_rows_that_are_no_words_are_not_copied(self):
        x = torch.zeros(4, 3, dtype=torch.float16, device=DEVICE)
        for other in (x, x.mT, torch.zeros(4, 4, device=DEVICE).mT[:2], object()):
            assert fused.step_kernels.in_words(other) is None
