"""Methods by name: each a cited composition of space, kernel, bandwidth and flow, not a class.

Every name has two forms. The corrected one, the default, takes the median over pairs of different
members, gives the Stein estimators the wide kernel and the regularisation of their own papers, and
takes the prior on the weights. `legacy=True` is what the released code of D'Angelo & Fortuin (2021)
does: the median with the zeros of the diagonal, eta = 0.01, no spectral cut-off, and in function
space a functional prior estimated from M draws instead of the weight prior.
"""

from dataclasses import dataclass, replace

from shoal.core.errors import ConfigError
from shoal.core.registry import nearest
from shoal.interaction.bandwidths import Median
from shoal.interaction.estimators import KDE, SGE, SSGE
from shoal.interaction.flows import Stein, Wasserstein
from shoal.interaction.kernels import RBF
from shoal.interaction.repulsion import Repulsion
from shoal.interaction.spaces import Outputs, Weights

__all__ = ["METHODS", "Method", "get"]


@dataclass(frozen=True)
class Method:
    """A named way to train an ensemble.

    Attributes:
        name: what to type.
        summary: one sentence.
        repulsion: None for the plain ensemble.
        cite: keys of the bibliography.
        functional_prior: the weight prior is turned into one on the outputs, by draws.
        legacy: this is the published form.
    """

    name: str
    summary: str
    repulsion: Repulsion | None
    cite: tuple[str, ...]
    functional_prior: bool = False
    legacy: bool = False

    def with_strength(self, strength: float | None) -> "Method":
        """The same method with another strength; None leaves it."""
        if strength is None or self.repulsion is None:
            return self
        return replace(self, repulsion=replace(self.repulsion, strength=strength))


_RDE = "dangelo2021repulsive"
_WIDE = Median(scale="unit")

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("ensemble", "Plain deep ensemble: members trained independently.", None,
               ("lakshminarayanan2017simple",)),
        Method("kde", "Weights repelled by a kernel density estimate.",
               Repulsion(Weights(), RBF(), Median(), Wasserstein(KDE())),
               (_RDE, "liu2019understanding")),
        Method("sge", "Weights repelled by a Stein gradient estimate.",
               Repulsion(Weights(), RBF(), _WIDE, Wasserstein(SGE())), (_RDE, "li2018gradient")),
        Method("ssge", "Weights repelled by a spectral Stein gradient estimate.",
               Repulsion(Weights(), RBF(), _WIDE, Wasserstein(SSGE())), (_RDE, "shi2018spectral")),
        Method("svgd", "Stein variational gradient descent on the weights.",
               Repulsion(Weights(), RBF(), Median(), Stein()), ("liu2016stein",)),
        Method("f-kde", "Functions repelled by a kernel density estimate.",
               Repulsion(Outputs(), RBF(), Median(), Wasserstein(KDE())), (_RDE,)),
        Method("f-sge", "Functions repelled by a Stein gradient estimate.",
               Repulsion(Outputs(), RBF(), _WIDE, Wasserstein(SGE())), (_RDE, "li2018gradient")),
        Method("f-ssge", "Functions repelled by a spectral Stein gradient estimate.",
               Repulsion(Outputs(), RBF(), _WIDE, Wasserstein(SSGE())), (_RDE, "shi2018spectral")),
        Method("f-svgd", "Stein variational gradient descent on the outputs.",
               Repulsion(Outputs(), RBF(), Median(), Stein()), ("wang2019function", _RDE)),
    )
}  # fmt: skip

_LEGACY_ESTIMATORS = {SGE: SGE(eta=0.01), SSGE: SSGE(share=1.0, eta=0.01)}


def get(name: str, legacy: bool = False) -> Method:
    """The method called `name`, corrected or as published.

    >>> get("sge").repulsion.flow.estimator, get("sge", legacy=True).repulsion.flow.estimator
    (SGE(eta=1.0), SGE(eta=0.01))
    """
    if name not in METHODS:
        raise ConfigError(f"there is no method called '{name}'; {nearest(str(name), METHODS)}")
    method = METHODS[name]
    if not legacy:
        return method
    if method.repulsion is None:
        return replace(method, legacy=True)
    flow = method.repulsion.flow
    if isinstance(flow, Wasserstein):
        flow = Wasserstein(_LEGACY_ESTIMATORS.get(type(flow.estimator), flow.estimator))
    repulsion = replace(method.repulsion, bandwidth=Median(legacy=True), flow=flow)
    functional = method.repulsion.space.base == "outputs"
    return replace(method, repulsion=repulsion, functional_prior=functional, legacy=True)
