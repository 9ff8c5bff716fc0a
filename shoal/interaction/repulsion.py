r"""The repulsion: from coordinates of the members to the matrices of the push.

With $K_{ij} = \frac1S \sum_s φ(d²_{sij} / h²_s)$ and $W_s = 2 ∂K / ∂d²_s$, the summed gradient of
the kernel at site s is $L_s z_s$ with $L_s = \mathrm{diag}(W_s 1) - W_s$:

$$ \sum_j ∇_{z_i} k(z_i, z_j) = \sum_j W_{ij} (z_i - z_j) = (L z)_i. $$

Distances come from the summed Gram matrices of the leaves; nothing is flattened, and no tensor has
size M x M x D. Coordinates are first centred over the members. Centring is exact, since the rows of
L sum to zero, and it avoids rounding errors for members close to each other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.core.arguments import check_fields, not_negative
from shoal.core.differentiate import with_pullback
from shoal.core.errors import ConfigError
from shoal.core.registry import Registry, nested_field
from shoal.core.tree import add_scaled, member_norms, rows
from shoal.core.types import Leaves, Tree
from shoal.engine.kernels import fused
from shoal.engine.kernels.fused import kernel_supports
from shoal.interaction import bandwidths, flows, kernels, points, spaces
from shoal.interaction.bandwidths import Bandwidth, Fixed, Median, MemberMedian
from shoal.interaction.calibration import Whitening, stein_factor
from shoal.interaction.cloud import Cloud, few_coordinates
from shoal.interaction.estimators import KDE
from shoal.interaction.flows import Flow, Stein, Wasserstein
from shoal.interaction.kernels import IMQ, RBF, Kernel, Laplace, LinearKernel, Matern
from shoal.interaction.points import Batch, Points, points_of
from shoal.interaction.spaces import Outputs, Space, innermost

__all__ = [
    "Interaction",
    "Push",
    "Repulsion",
    "interact",
    "interact_in",
    "is_centred",
    "kernel_choices",
    "registry",
    "repel",
    "weighted_space",
]

registry = Registry("repulsion")


@registry.register("repulsion")
@dataclass(frozen=True)
class Repulsion:
    r"""The repulsive force between members: six independent choices.

    With points other than the batch, z_i is what member i gives at P points, and J_i its derivative
    there. The drive stays that of the B data points of the batch:

    $$ v_i = \sum_j mix_{ij} \, drive_j(batch) - (T / N) \, strength \, J_i(points)^T (B z)_i. $$

    The push is the score of the members' density at the points, which no number of points rescales:
    T / N stays. With a median bandwidth, a point that comes twice counts once: d² and h² double,
    and the force on each copy halves.
    The Stein flow takes K from the points and mixes the drives of the batch.

    Attributes:
        space: coordinates in which members are compared.
        kernel: similarity as a function of distance.
        bandwidth: length scale of the kernel.
        flow: from similarity to velocity.
        strength: factor of the push; 1 for the posterior.
        per: "data" scales the push by 1 / N, as the posterior requires; "batch" scales it by 1 / B,
            which makes the push N / B times stronger, for B data points of the batch.
        calibrated: compare whitened members and rescale the push, see `calibration`.
        points: inputs at which members are compared, for outputs and input gradients: an entry of
            `shoal.points`, its name, or inputs of your own.
        placebo: replace the push of each member by a random push of equal norm, see
            `training.step.placebo`.
    """

    space: Space = nested_field(spaces.registry, Outputs)
    kernel: Kernel = nested_field(kernels.registry, RBF)
    bandwidth: Bandwidth = nested_field(bandwidths.registry, Median)
    flow: Flow = nested_field(flows.registry, Wasserstein)
    strength: float = 1.0
    per: str = "data"
    calibrated: bool = False
    points: Points = nested_field(points.registry, Batch, later=True)
    placebo: bool = False

    def __post_init__(self) -> None:
        check_fields(self, strength=not_negative)
        object.__setattr__(self, "points", points_of(self.points))
        if not isinstance(self.points, Batch):
            self._check_points()
        if self.per not in ("data", "batch"):
            raise ConfigError(f"repulsion must be per 'data' or per 'batch', not '{self.per}'")
        if self.per == "batch" and self.space.base == "weights":
            raise ConfigError("weights do not depend on a batch; set per='data'")
        if isinstance(self.kernel, LinearKernel) and not isinstance(self.flow, Stein):
            raise ConfigError("the linear kernel is not a density; use it with the Stein flow")
        if isinstance(self.kernel, LinearKernel) and self.calibrated:
            raise ConfigError("the linear kernel needs no calibration; leave calibrated out")

    def in_step(self, **changes: Any) -> "Repulsion":
        """A copy for one step, whose strength may be a tensor on the device: a check would wait."""
        other = object.__new__(Repulsion)
        other.__dict__.update(self.__dict__, **changes)
        return other

    def _check_points(self) -> None:
        if self.space.base == "weights":
            raise ConfigError(
                "weights are compared without inputs; leave points out, or choose a method such "
                "as 'f-kde'"
            )
        if getattr(innermost(self.space), "fraction", 1.0) < 1:
            raise ConfigError(
                "fraction is a share of the batch; with other points leave fraction out and set "
                "the count of the points"
            )


@dataclass(frozen=True)
class Interaction:
    """The matrices of one step.

    Attributes:
        mix: matrix that mixes the drives [M, M]; None if each member follows its own.
        B: the push is B z at each site [S, M, M].
        K: kernel matrix [M, M].
        h2: squared bandwidth [S, 1, 1] or [S, 1, M].
        cloud: the coordinates that B acts on, and the finite members.
        known: squared bandwidth and effective number of members [2], if a kernel has found them.
        lengths: |B z| of each member [M], if a kernel has found them.
    """

    mix: Tensor | None
    B: Tensor
    K: Tensor
    h2: Tensor
    cloud: Cloud
    known: Tensor | None = None
    lengths: Tensor | None = None

    @property
    def effective(self) -> Tensor:
        """Effective number of members under the kernel, M² / sum K: 1 if all agree, at most M."""
        members = self.K.diagonal().sum()
        return members.square() / self.K.sum()

    @property
    def summary(self) -> Tensor:
        """Squared bandwidth, a mean over sites and finite members, and effective members [2]."""
        if self.known is not None:
            return self.known
        h2, alive = self.h2, self.cloud.alive
        if h2.shape[-1] > 1:  # one bandwidth per member: finite members count
            h2 = torch.where(alive, h2, 0.0).sum(-1) / alive.sum().clamp(min=1)
        h2 = h2.mean()
        return torch.stack([h2, self.effective.to(h2.dtype)])


def interact(
    repulsion: Repulsion,
    leaves: Leaves,
    alive: Tensor,
    weight: Tensor | None = None,
    cloud_of: Callable[..., Cloud] = Cloud.of,
) -> Interaction:
    """Matrices of the repulsion between the finite members at the given coordinates.

    Args:
        repulsion: the five choices.
        leaves: coordinates [M, S, D].
        alive: which members are finite [M].
        weight: weight of each site [S] in the mean over sites; None for equal weights.
        cloud_of: makes the cloud from leaves, finite members and `centred`.
    """
    if weight is None and cloud_of == Cloud.of and few_coordinates(leaves):
        choices = kernel_choices(repulsion, leaves[0], len(alive))
        if choices is not None:
            cloud, matrices = Cloud.with_matrices(leaves, alive, choices)
            return _by_kernel(repulsion, cloud, choices, matrices)
    cloud = cloud_of(leaves, alive, centred=is_centred(repulsion))
    return interact_in(repulsion, cloud, weight)


def is_centred(repulsion: Repulsion) -> bool:
    """Whether coordinates are taken relative to their centre: for kernels of distances."""
    return not isinstance(repulsion.kernel, LinearKernel)


def interact_in(repulsion: Repulsion, cloud: Cloud, weight: Tensor | None = None) -> Interaction:
    """`interact` for members whose Gram matrix is known."""
    kernel = repulsion.kernel
    gram, alive = cloud.gram, cloud.alive
    alone = weight is None and len(gram) == 1
    choices = kernel_choices(repulsion, gram, len(alive)) if alone else None
    if choices is not None:
        matrices = fused.interaction_kernels.matrices(gram, alive, **choices)
        return _by_kernel(repulsion, cloud, choices, matrices)
    pair, whitening = alive[:, None] & alive, None
    if isinstance(kernel, LinearKernel):
        K, L = kernel.matrices(gram, alive.sum())
        L, h2 = torch.where(pair, L, 0.0), torch.ones_like(K[:, :1, :1])
    else:
        whitening = Whitening.of(gram, alive) if repulsion.calibrated else None
        unbounded = isinstance(repulsion.bandwidth, MemberMedian)  # 1 / h2 can be 1e12
        compared = gram if whitening is None else whitening.gram
        d2 = _squared_distances(compared, rounding=8.0 if unbounded else 0.0)
        h2 = repulsion.bandwidth(d2, alive)
        u, apart = d2 / h2, pair & (d2 > 0) if unbounded else pair
        K, L = kernel.value(u), _laplacian(kernel.slope(u), h2, apart)
    K = torch.where(pair, K, 0.0)
    if weight is None:
        K = K.mean(0)
    else:
        share = (weight / weight.sum()).to(K)[:, None, None]
        K, L = (share * K).sum(0), len(K) * share * L
    mix, B = repulsion.flow(K, L, alive.sum().clamp(min=1))
    if whitening is not None:
        B = stein_factor(mix, B, whitening.gram) * B @ whitening.inverse
    return Interaction(mix, B, K, h2, cloud)


def kernel_choices(repulsion: Repulsion, like: Tensor, members: int) -> dict[str, Any] | None:
    """The choices as settings of the kernel that makes all matrices; None if it cannot.

    Args:
        repulsion: the choices.
        like: a tensor with the device and type of the Gram matrix at one site.
        members: M.
    """
    if repulsion.calibrated or not kernel_supports(like):
        return None
    return _settings(repulsion) if members <= fused.interaction_kernels.LARGEST else None


def _settings(repulsion: Repulsion) -> dict[str, Any] | None:
    kernel, bandwidth, flow = repulsion.kernel, repulsion.bandwidth, repulsion.flow
    names = {RBF: "rbf", Laplace: "laplace", IMQ: "imq"}
    name = f"matern-{kernel.nu}" if type(kernel) is Matern else names.get(type(kernel))
    if name is None or type(flow) not in (Wasserstein, Stein):
        return None
    kde = type(flow) is Wasserstein and type(flow.estimator) is KDE
    kind = "stein" if type(flow) is Stein else "kde" if kde else "laplacian"
    if type(bandwidth) is Fixed:
        return {"kernel": name, "flow": kind, "h2": bandwidth.h2}
    if type(bandwidth) is not Median:
        return None
    how = {"logarithm": bandwidth.scale == "log", "every": bandwidth.legacy}
    return {"kernel": name, "flow": kind, **how}


def _by_kernel(
    repulsion: Repulsion, cloud: Cloud, choices: dict[str, Any], matrices: Any
) -> Interaction:
    mix, B = matrices.mix, matrices.B
    if choices["flow"] == "laplacian":
        mix, B = repulsion.flow(matrices.K, B, cloud.alive.sum().clamp(min=1))
    return Interaction(mix, B, matrices.K, matrices.h2, cloud, matrices.summary, matrices.lengths)


def repel(
    repulsion: Repulsion,
    base: Tree,
    alive: Tensor,
    gather: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    own: slice = slice(None),
    weight: Tensor | None = None,
    cloud_of: Callable[..., Cloud] = Cloud.of,
) -> "Push":
    """The push J^T (B z) on the base tensors, not yet added to anything.

    Args:
        repulsion: the five choices.
        base: tensors [M, ...] of the trained members.
        alive: which of all members are finite [M].
        gather: adds the coordinates of frozen members.
        own: which of all members are trained.
        weight: weight of each row of the outputs [B, ...], or of each data point [B] for input
            gradients; None for equal weights.
        cloud_of: makes the cloud; members of other processes join here.
    """
    leaves, pull = with_pullback(weighted_space(repulsion, weight), base)
    sites = weight if repulsion.space.base == "gradients" else None
    interaction = interact(repulsion, [gather(leaf) for leaf in leaves], alive, sites, cloud_of)
    whole = interaction.cloud.whole_rows
    isometric = repulsion.space.isometric and weight is None and not whole
    lengths = None if interaction.lengths is None else interaction.lengths[own]
    rows = slice(None) if whole else own
    return Push(interaction, interaction.B[:, rows], pull, isometric, lengths)


def weighted_space(repulsion: Repulsion, weight: Tensor | None) -> Callable[[Tree], Leaves]:
    """The space, with weights of the rows if it is of outputs."""
    space = repulsion.space
    if weight is None or space.base != "outputs":
        return space
    return lambda base: space({**base, "weight": weight})


@dataclass(frozen=True)
class Push:
    """The repulsive force: B z is a constant cotangent at the coordinates.

    Attributes:
        interaction: the matrices.
        B: rows of B for the trained members [S, m, M].
        pull: J^T, one backward pass through the space.
        isometric: J only reorders numbers.
        lengths: |B z| of each trained member [m]; None if not yet known.
    """

    interaction: Interaction
    B: Tensor
    pull: Callable[[Sequence[Tensor]], Tree]
    isometric: bool
    lengths: Tensor | None = None

    def tree(self) -> Tree:
        """J^T (B z), tensors like the base."""
        return self.pull(self.interaction.cloud.times(self.B))

    def added_to(
        self,
        drive: Tree,
        scale: float | Tensor,
        multiples: Sequence[float] | None = None,
        driven: Tensor | None = None,
    ) -> tuple[Tree, Tensor, Tensor]:
        """drive + scale J^T (B z), and the norms of the drive and of J^T (B z) [M].

        `multiples` of the base tensors belong to the drive, see `cloud.adds_multiples`. `driven`
        has the norms of the drive if they are known.
        """
        cloud = self.interaction.cloud
        if not self.isometric or isinstance(scale, Tensor):
            push = self.tree()
            driven = member_norms(drive) if driven is None else driven
            return add_scaled(drive, push, scale), driven, member_norms(push)
        given = [rows(t) for t in drive.values()]
        flat, found = cloud.added_to(given, self.B, scale, multiples, driven is None)
        moved = {name: m.view_as(t) for (name, t), m in zip(drive.items(), flat, strict=True)}
        found = found if driven is None else driven
        assert found is not None
        return moved, found, self.norms

    @property
    def norms(self) -> Tensor:
        """|B z| of each trained member [m]."""
        if self.lengths is not None:
            return self.lengths
        # |B z|² from the Gram matrix of z, without reading the coordinates again.
        gram = self.interaction.cloud.gram
        return (self.B @ gram * self.B).sum((0, 2)).clamp(min=0).sqrt()


def _squared_distances(gram: Tensor, rounding: float = 0.0) -> Tensor:
    """d2 [S, M, M]; zero for members that agree up to `rounding` times the type's precision."""
    squares = gram.diagonal(dim1=-2, dim2=-1)
    sums = squares.unsqueeze(-1) + squares.unsqueeze(-2)
    d2 = sums.sub(gram, alpha=2).clamp(min=0)
    d2.diagonal(dim1=-2, dim2=-1).zero_()  # remove rounding errors
    return torch.where(d2 < rounding * torch.finfo(d2.dtype).eps * sums, 0, d2) if rounding else d2


def _laplacian(slope: Tensor, h2: Tensor, pair: Tensor) -> Tensor:
    """L = diag(W 1) - W with W = 2 φ'(u) / (S h²) for pairs of finite members."""
    W = torch.where(pair, slope / (0.5 * len(slope) * h2), 0.0)
    L = -W
    L.diagonal(dim1=-2, dim2=-1).add_(W.sum(-1))
    return L
