"""Ten vision transformers in JAX, by `vmap` and `jit`: the peer of `shoal bench --models vit`.

    python benchmarks/jax_vit.py -o docs/benchmarks/jax-vit-h200.json

The same network, batch and precision: width 192, depth 6, 3 heads, patches of 4, batch 128, weights
in float32, arithmetic in bfloat16, SGD. The FoRDE step takes input gradients of the log-probability
of the true class, compares them by an RBF kernel with the median bandwidth, and differentiates them
again. JAX must be installed.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

MEMBERS, BATCH, WIDTH, DEPTH, HEADS, PATCH, CLASSES = 10, 128, 192, 6, 3, 4, 10
TOKENS = (32 // PATCH) ** 2


def member(key: Any) -> dict[str, Any]:
    """The weights of one network."""
    keys = iter(jax.random.split(key, 4 * DEPTH + 3))

    def linear(inputs: int, outputs: int) -> dict[str, Any]:
        weight = jax.random.normal(next(keys), (inputs, outputs)) / inputs**0.5
        return {"w": weight, "b": jnp.zeros(outputs)}

    def norm() -> dict[str, Any]:
        return {"w": jnp.ones(WIDTH), "b": jnp.zeros(WIDTH)}

    def block() -> dict[str, Any]:
        return {
            "before": norm(),
            "qkv": linear(WIDTH, 3 * WIDTH),
            "out": linear(WIDTH, WIDTH),
            "between": norm(),
            "up": linear(WIDTH, 4 * WIDTH),
            "down": linear(4 * WIDTH, WIDTH),
        }

    return {
        "embed": linear(3 * PATCH**2, WIDTH),
        "place": 0.02 * jax.random.normal(next(keys), (TOKENS, WIDTH)),
        "blocks": [block() for _ in range(DEPTH)],
        "norm": norm(),
        "head": linear(WIDTH, CLASSES),
    }


def layer(p: dict[str, Any], x: Any) -> Any:
    """x W + b."""
    return x @ p["w"] + p["b"]


def normalised(p: dict[str, Any], x: Any) -> Any:
    """Layer normalisation, in float32."""
    s = x.astype(jnp.float32)
    s = s - s.mean(-1, keepdims=True)
    s = s * jax.lax.rsqrt(jnp.square(s).mean(-1, keepdims=True) + 1e-5)
    return s.astype(x.dtype) * p["w"] + p["b"]


def outputs(p: dict[str, Any], x: Any) -> Any:
    """Outputs [B, C] of one member for images [B, 3, 32, 32]."""
    p = jax.tree.map(lambda t: t.astype(jnp.bfloat16), p)
    side = 32 // PATCH
    x = x.astype(jnp.bfloat16).reshape(-1, 3, side, PATCH, side, PATCH)
    x = layer(p["embed"], x.transpose(0, 2, 4, 1, 3, 5).reshape(-1, TOKENS, 3 * PATCH**2))
    x = x + p["place"]
    for block in p["blocks"]:
        parts = layer(block["qkv"], normalised(block["before"], x))
        q, k, v = jnp.moveaxis(parts.reshape(*x.shape[:2], 3, HEADS, -1), 2, 0)
        seen = jax.nn.dot_product_attention(q, k, v).reshape(x.shape)
        x = x + layer(block["out"], seen)
        hidden = jax.nn.gelu(layer(block["up"], normalised(block["between"], x)), approximate=False)
        x = x + layer(block["down"], hidden)
    return layer(p["head"], normalised(p["norm"], x).mean(1)).astype(jnp.float32)


def log_probability(p: dict[str, Any], x: Any, y: Any) -> Any:
    """Of the true classes [B]."""
    return jnp.take_along_axis(jax.nn.log_softmax(outputs(p, x)), y[:, None], 1)[:, 0]


def loss(p: dict[str, Any], x: Any, y: Any) -> Any:
    """The members' mean negative log-likelihoods, added up."""
    return -jax.vmap(log_probability, (0, None, None))(p, x, y).mean(1).sum()


def repulsive_loss(p: dict[str, Any], x: Any, y: Any) -> Any:
    """The same and the push on input gradients, whose cotangent is held fixed."""

    def scores(p: dict[str, Any], x: Any) -> Any:
        found = log_probability(p, x, y)
        return found.sum(), found

    slopes = jax.grad(scores, argnums=1, has_aux=True)
    slope, found = jax.vmap(slopes, (0, None))(p, x)
    flat = slope.reshape(MEMBERS, BATCH, -1).astype(jnp.float32)
    unit = flat / (jnp.linalg.norm(flat, axis=-1, keepdims=True) + 1e-12)
    still = jax.lax.stop_gradient(unit)
    apart = still[:, None] - still[None]
    squares = jnp.square(apart).sum(-1)
    kernel = jnp.exp(-squares / (jnp.median(squares) + 1e-6))
    push = (kernel[..., None] * apart).sum(1) / kernel.sum(1)[..., None]
    return -found.mean(1).sum() - (jax.lax.stop_gradient(push) * unit).sum() / BATCH


def timed(value: Any, p: Any, x: Any, y: Any, rounds: int, steps: int) -> dict[str, Any]:
    """Milliseconds per step: medians over rounds."""

    @jax.jit
    def step(p: Any, x: Any, y: Any) -> Any:
        return jax.tree.map(lambda w, g: w - 0.01 * g, p, jax.grad(value)(p, x, y))

    start = time.perf_counter()
    p = jax.block_until_ready(step(p, x, y))
    warm, times = time.perf_counter() - start, []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(steps):
            p = step(p, x, y)
        jax.block_until_ready(p)
        times.append(1000 * (time.perf_counter() - start) / steps)
    return {"ms": statistics.median(times), "rounds_ms": times, "warm_seconds": warm}


def main() -> None:
    """Time both steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("-o", "--out", type=Path)
    asked = parser.parse_args()
    x = jax.random.normal(jax.random.key(1), (BATCH, 3, 32, 32))
    y = jax.random.randint(jax.random.key(2), (BATCH,), 0, CLASSES)
    p = jax.vmap(member)(jax.random.split(jax.random.key(0), MEMBERS))
    rows = {}
    for name, value in {"ensemble": loss, "forde": repulsive_loss}.items():
        rows[name] = timed(value, p, x, y, asked.rounds, asked.steps)
        print(f"{name}: {rows[name]['ms']:.2f} ms, first step {rows[name]['warm_seconds']:.1f} s")
    device = jax.devices()[0].device_kind
    found = {"jax": jax.__version__, "device": device, "members": MEMBERS, "batch": BATCH}
    if asked.out is not None:
        asked.out.write_text(json.dumps(found | {"steps": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
