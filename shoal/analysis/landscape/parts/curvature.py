"""Curvature at the members: flat or sharp minima."""

from shoal.analysis.landscape.curvature import hessian_product, top_eigenvalues, trace
from shoal.analysis.landscape.study import Part, Scene, registry

__all__ = ["curvature"]


@registry.register("curvature")
def curvature(scene: Scene) -> Part:
    """Largest eigenvalues and trace of the Hessian of the training loss at every member."""
    product = hessian_product(scene.ensemble, scene.train, scene.run.likelihood)
    weights = {name: tensor.detach() for name, tensor in scene.ensemble.weights.items()}
    values = top_eigenvalues(product, weights, 5, scene.effort.products, scene.seed)
    found = trace(product, weights, max(scene.effort.products // 3, 2), scene.seed)
    scores = {
        "top": float(values[:, 0].mean()),
        "trace": float(found.mean.mean()),
        "weights": sum(tensor[0].numel() for tensor in weights.values()),
    }
    return Part(scores, {"eigenvalues": values.float(), "trace": found.mean, "error": found.error})
