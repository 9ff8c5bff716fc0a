"""Methods by name: each a cited composition of space, kernel, bandwidth and flow, not a class.

Every name has three forms:

- The corrected form, the default, takes the median over pairs of different members. It truncates
  the spectrum of the spectral estimator as its paper does, and uses the prior on the weights.
- `legacy=True` follows the released code of D'Angelo & Fortuin (2021): the median includes the
  zeros of the diagonal, and all eigenpairs are kept. In function space a functional prior,
  estimated from M draws, replaces the weight prior. With `probabilities=True` prior, drives and
  push all act on the probabilities. Adversarial neighbours join the batch, so members are compared
  there too.
- `calibrated=True` compares whitened members and rescales the push to the size that the posterior
  requires (`shoal.interaction.calibration`). The Stein estimators are as in their own papers. In
  function space the prior is the Gaussian process with the moments of the weight prior's functions.

Repulsion of input gradients (`forde` and its variants) is scaled by the B points of a batch, as in
its paper. `legacy=True` follows the authors' released code: a bandwidth per member with ln M
instead of ln(M + 1), which includes the zero on the diagonal and has no fallback, and components of
the data's second moments instead of the covariance.

The papers of the Stein estimators use a wider kernel (`Median(scale="unit")`). The wider kernel
estimates the score of a given sample better. As a flow it lets particles form clusters that a
smooth score does not resolve, so the corrected forms keep the narrow kernel.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from shoal.core.arguments import checked
from shoal.core.display.notebook import facts_html
from shoal.core.errors import ConfigError
from shoal.core.registry import nearest
from shoal.core.values import check_settings, check_spec, check_value
from shoal.interaction.bandwidths import Median, MemberMedian
from shoal.interaction.estimators import KDE, SGE, SSGE
from shoal.interaction.flows import Stein, Wasserstein
from shoal.interaction.kernels import RBF
from shoal.interaction.points import Batch, Points, points_of
from shoal.interaction.points import registry as points_registry
from shoal.interaction.repulsion import Repulsion
from shoal.interaction.spaces import (
    InputGradients,
    Normalised,
    Outputs,
    Rotated,
    Scaled,
    Space,
    Weights,
)

__all__ = ["METHODS", "Method", "changed", "get", "known"]


@dataclass(frozen=True, repr=False)
class Method:
    """A named way to train an ensemble.

    >>> METHODS["f-kde"]
    Method('f-kde', Outputs, RBF, Wasserstein by KDE, strength 1)

    Attributes:
        name: name of the method, as users type it.
        summary: one sentence.
        repulsion: the repulsion; None for the plain ensemble.
        cite: keys of the bibliography.
        functional_prior: a prior on the outputs, from draws, replaces the weight prior.
        legacy: whether this is the published form.
        settings: changed settings of the space by name, `points` other than the batch, and
            `placebo`.
        calibrated: whether this is the calibrated form.
    """

    name: str
    summary: str
    repulsion: Repulsion | None
    cite: tuple[str, ...]
    functional_prior: bool = False
    legacy: bool = False
    settings: tuple[tuple[str, Any], ...] = ()
    calibrated: bool = False

    def __repr__(self) -> str:
        return f"Method({', '.join([repr(self.name), *map(str, self._facts().values())])})"

    def _repr_html_(self) -> str:
        return facts_html(f"Method {self.name}", {"what": self.summary, **self._facts()})

    def _facts(self) -> dict[str, object]:
        """Components of the repulsion by name, and differences from the default form."""
        form = "legacy" if self.legacy else "calibrated" if self.calibrated else None
        form_facts: dict[str, object] = {} if form is None else {"form": form}
        if self.repulsion is None:
            return {"repulsion": "no repulsion"} | form_facts
        chain: list[Any] = [self.repulsion.space]
        while hasattr(chain[-1], "space"):
            chain.append(chain[-1].space)
        flow = self.repulsion.flow
        parts = [type(flow).__name__, *([flow.estimator] if isinstance(flow, Wasserstein) else [])]
        return {
            "space": " of ".join(type(space).__name__ for space in chain),
            "kernel": type(self.repulsion.kernel).__name__,
            "flow": " by ".join(p if isinstance(p, str) else type(p).__name__ for p in parts),
            "strength": f"strength {self.repulsion.strength:g}",
            **{key: f"{key}={value}" for key, value in self.settings},
            **form_facts,
        }

    def with_strength(self, strength: float | None) -> "Method":
        """The method with another strength; None changes nothing."""
        if strength is None or self.repulsion is None:
            return self
        return replace(self, repulsion=replace(self.repulsion, strength=strength))

    def with_points(self, points: Points) -> "Method":
        """The method with other points at which members are compared."""
        if self.repulsion is None:
            raise ConfigError(f"method '{self.name}' compares no members; leave points out")
        changed = {name: value for name, value in self.settings if name != "points"}
        if not isinstance(points, Batch):
            changed["points"] = points
        repulsion = replace(self.repulsion, points=points)
        return replace(self, repulsion=repulsion, settings=tuple(sorted(changed.items())))


_RDE, _FORDE = "dangelo2021repulsive", "trinh2024input"
_DIRECTIONS = Normalised(InputGradients(), eps=1e-15)


def _forde(space: Space) -> Repulsion:
    return Repulsion(space, RBF(), Median(), Wasserstein(KDE()), per="batch")


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("ensemble", "Plain deep ensemble: members do not repel each other.", None,
               ("lakshminarayanan2017simple",)),
        Method("kde", "Repels weights by a kernel density estimate.",
               Repulsion(Weights(), RBF(), Median(), Wasserstein(KDE())),
               (_RDE, "liu2019understanding")),
        Method("sge", "Repels weights by a Stein gradient estimate.",
               Repulsion(Weights(), RBF(), Median(), Wasserstein(SGE())), (_RDE, "li2018gradient")),
        Method("ssge", "Repels weights by a spectral Stein gradient estimate.",
               Repulsion(Weights(), RBF(), Median(), Wasserstein(SSGE())),
               (_RDE, "shi2018spectral")),
        Method("svgd", "Stein variational gradient descent on the weights.",
               Repulsion(Weights(), RBF(), Median(), Stein()), ("liu2016stein",)),
        Method("f-kde", "Repels outputs by a kernel density estimate.",
               Repulsion(Outputs(), RBF(), Median(), Wasserstein(KDE())), (_RDE,)),
        Method("f-sge", "Repels outputs by a Stein gradient estimate.",
               Repulsion(Outputs(), RBF(), Median(), Wasserstein(SGE())), (_RDE, "li2018gradient")),
        Method("f-ssge", "Repels outputs by a spectral Stein gradient estimate.",
               Repulsion(Outputs(), RBF(), Median(), Wasserstein(SSGE())),
               (_RDE, "shi2018spectral")),
        Method("f-svgd", "Stein variational gradient descent on the outputs.",
               Repulsion(Outputs(), RBF(), Median(), Stein()), ("wang2019function", _RDE)),
        Method("forde", "Repels input gradients, most along principal components of the data.",
               _forde(Scaled(Rotated(_DIRECTIONS, "pca"), "eigenvalues")), (_FORDE,)),
        Method("forde-identity", "Repels input gradients, equally along all input coordinates.",
               _forde(_DIRECTIONS), (_FORDE,)),
        Method("forde-tuned", "Repels input gradients, between `forde` and `forde-identity`.",
               _forde(Scaled(Rotated(_DIRECTIONS, "pca"), "tuned", alpha=0.2)), (_FORDE,)),
        Method("forde-dct", "Repels input gradients, most along cosines of large data variance.",
               _forde(Scaled(Rotated(_DIRECTIONS, "dct"), "eigenvalues")), (_FORDE,)),
    )
}  # fmt: skip


@checked()
def get(name: str, legacy: bool = False, calibrated: bool = False, **settings: Any) -> Method:
    """The method called `name`: corrected, as published, or calibrated.

    >>> get("sge").repulsion.bandwidth, get("sge", legacy=True).repulsion.bandwidth
    (Median(scale='log', legacy=False), Median(scale='log', legacy=True))

    Args:
        name: one of `METHODS`.
        legacy: the published form.
        calibrated: the calibrated form.
        settings: settings of its space, such as fraction=0.25 or alpha=0.4 for input gradients, and
            `points`, where members are compared. `placebo=True` replaces the push of each member by
            a random one of equal norm: a control, which no member's place decides.
    """
    if name not in METHODS:
        raise ConfigError(f"there is no method called '{name}'; {nearest(str(name), METHODS)}")
    return changed(_form(METHODS[name], legacy, calibrated), settings)


def __getattr__(name: str) -> Method:
    """`methods.f_kde` is the method called "f-kde"."""
    word = name.replace("_", "-")
    if word not in METHODS:
        raise AttributeError(f"there is no method called '{word}'; {nearest(word, METHODS)}")
    return METHODS[word]


def __dir__() -> list[str]:
    return [name.replace("-", "_") for name in METHODS]


def known(name: object) -> bool:
    """Whether a method has this name."""
    return isinstance(name, str) and name in METHODS


def changed(method: Method, settings: Mapping[str, Any]) -> Method:
    """The method with other settings of its space, other points, or as a placebo."""
    outside = ("points", "placebo")
    space_settings = {name: value for name, value in settings.items() if name not in outside}
    for setting, value in space_settings.items():
        method = _changed(method, setting, value)
    if "placebo" in settings:
        method = _with_placebo(method, settings["placebo"])
        space_settings |= {"placebo": True} if settings["placebo"] else {}
    method = replace(method, settings=tuple(sorted(space_settings.items())))
    if "points" not in settings:
        return method
    points = settings["points"]
    if isinstance(points, str) or (isinstance(points, Mapping) and "name" in points):
        check_spec("method.points", points, points_registry)
    return method.with_points(points_of(points))


def _with_placebo(method: Method, placebo: Any) -> Method:
    check_value("method.placebo", placebo, bool)
    if method.repulsion is None:
        raise ConfigError(f"method '{method.name}' has no push that a placebo could replace")
    return replace(method, repulsion=replace(method.repulsion, placebo=placebo))


def _changed(method: Method, setting: str, value: Any) -> Method:
    """The method with one changed setting of the space or an inner space."""
    if method.repulsion is None:
        raise ConfigError(f"method '{method.name}' has no setting '{setting}': it has no repulsion")
    layers: list[Any] = [method.repulsion.space]
    while hasattr(layers[-1], "space"):
        layers.append(layers[-1].space)
    names = [{f.name for f in fields(layer) if f.init} - {"space"} for layer in layers]
    depth = next((i for i, known in enumerate(names) if setting in known), None)
    if depth is None:
        known = set().union(*names) | {"points", "placebo"}
        raise ConfigError(
            f"method '{method.name}' has no setting '{setting}'; {nearest(setting, known)}"
        )
    check_settings("method", type(layers[depth]), {setting: value})
    space = replace(layers[depth], **{setting: value})
    for layer in reversed(layers[:depth]):
        space = replace(layer, space=space)
    return replace(method, repulsion=replace(method.repulsion, space=space))


def _form(method: Method, legacy: bool, calibrated: bool) -> Method:
    """The corrected, published or calibrated form."""
    if legacy and calibrated:
        raise ConfigError("a method has one form; give legacy or calibrated, not both")
    if calibrated:
        return _calibrated(method)
    if not legacy:
        return method
    if method.repulsion is None:
        return replace(method, legacy=True)
    if method.repulsion.space.base == "gradients":
        space = _uncentred(method.repulsion.space)
        repulsion = replace(method.repulsion, space=space, bandwidth=MemberMedian())
        return replace(method, repulsion=repulsion, legacy=True)
    flow = method.repulsion.flow
    if isinstance(flow, Wasserstein):
        whole = SSGE(share=1.0, eta=0.01)
        flow = Wasserstein(whole if isinstance(flow.estimator, SSGE) else flow.estimator)
    space = method.repulsion.space
    space = replace(space, published=True) if isinstance(space, Outputs) else space
    repulsion = replace(method.repulsion, space=space, bandwidth=Median(legacy=True), flow=flow)
    functional = space.base == "outputs"
    return replace(method, repulsion=repulsion, functional_prior=functional, legacy=True)


def _uncentred(space: Space) -> Space:
    if isinstance(space, Rotated) and isinstance(space.basis, str):
        basis = "pca-uncentred" if space.basis == "pca" else space.basis
        return replace(space, basis=basis)
    return replace(space, space=_uncentred(space.space)) if isinstance(space, Scaled) else space


def _calibrated(method: Method) -> Method:
    """The calibrated form: whitened members, rescaled push, the Stein papers' settings."""
    repulsion = method.repulsion
    if repulsion is None:
        return replace(method, calibrated=True)
    flow, bandwidth = repulsion.flow, repulsion.bandwidth
    if isinstance(flow, Wasserstein) and not isinstance(flow.estimator, KDE):
        estimator = SGE(eta=1.0) if isinstance(flow.estimator, SGE) else flow.estimator
        flow, bandwidth = Wasserstein(estimator), Median(scale="unit")
    repulsion = replace(repulsion, bandwidth=bandwidth, flow=flow, calibrated=True)
    functional = repulsion.space.base == "outputs"
    return replace(method, repulsion=repulsion, functional_prior=functional, calibrated=True)
