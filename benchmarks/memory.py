"""What does a limit of memory cost? python benchmarks/memory.py [-o memory.json]

Ten networks, batch 128, bfloat16, SGD; every case is a run of `shoal.fit` of its own. A case names
the method, and the engine or the limit. Limits such as 0.5x are relative to what the same method
takes without a limit.

Prints JSON, one row per case: milliseconds per step (median over the epochs after the first), MiB
that the allocator held and that tensors took at most, MiB predicted, and members at a time.
"""

import argparse
import gc
import json
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import shoal

MIB = 2**20
CASES = (
    ("resnet18", "ensemble", "auto", None),
    ("resnet18", "ensemble", "auto", "auto"),
    ("resnet18", "ensemble", "chunk:1", None),
    ("resnet18", "ensemble", "auto", "8GiB"),
    ("resnet18", "ensemble", "auto", "5GiB"),
    ("resnet18", "ensemble", "auto", "0.7x"),
    ("resnet18", "ensemble", "auto", "0.5x"),
    ("resnet18", "ensemble", "auto", "0.38x"),
    ("resnet18", "ensemble", "chunk:5", None),
    ("resnet18", "f-kde", "auto", None),
    ("resnet18", "f-kde", "auto", "0.6x"),
    ("vit", "ensemble", "auto", None),
    ("vit", "ensemble", "auto", "0.6x"),
    ("vit", "ensemble", "auto", "0.35x"),
    ("vit", "f-kde", "auto", None),
    ("vit", "f-kde", "auto", "0.6x"),
    ("resnet18", "forde", "auto", None),
    ("resnet18", "forde", "auto", "0.6x"),
    ("resnet18", "ensemble", "auto", "900MiB"),
)


def measured(
    case: tuple[str, str, str, Any], memory: Any, device: str, quick: bool
) -> dict[str, Any]:
    """One run; an error is its row."""
    model, method, engine, _ = case
    members, batches, epochs, size, side = (3, 2, 2, 4, 8) if quick else (10, 30, 3, 128, 32)
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(size * batches, 3, side, side, generator=generator)
    y = torch.randint(10, (len(x),), generator=generator)
    kind = shoal.models.ResNet18() if model == "resnet18" else shoal.models.ViT()
    build = shoal.models.Blueprint(kind, (3, side, side), 10)
    on_gpu = device.startswith("cuda")
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_reserved() if on_gpu else 0
    began = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            run = shoal.fit(
                shoal.Ensemble.init(build, members, seed=0), (x, y), method=method,
                optimizer="sgd", epochs=epochs, batch_size=size, device=device, engine=engine,
                precision="bfloat16" if on_gpu else None, memory=memory, progress=False,
            )  # fmt: skip
        except (shoal.ShoalError, RuntimeError) as error:
            return {"error": f"{type(error).__name__}: {error}"[:300]}
    steps = [1000 * row["seconds"] / batches for row in run.history]
    told = run.provenance.get("memory", {})
    return {
        "ms": statistics.median(steps[1:]),
        "epochs_ms": steps,
        "held_mib": (torch.cuda.max_memory_reserved() - held) / MIB if on_gpu else None,
        "tensors_mib": torch.cuda.max_memory_allocated() / MIB if on_gpu else None,
        "predicted_mib": None if not told.get("predicted") else told["predicted"] / MIB,
        "limit_mib": None if not told.get("limit") else told["limit"] / MIB,
        "chunk": told.get("chunk"),
        "light": told.get("light"),
        "loss": run.history[-1]["loss"],
        "seconds": time.monotonic() - began,
        "warnings": [str(each.message)[:160] for each in caught],
        "notes": run.notes,
    }


def main() -> None:
    """All cases, until the time is up."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=75, help="start no case after this time")
    parser.add_argument("--quick", action="store_true", help="tiny data, to try the script")
    parser.add_argument("-o", "--out", type=Path, help="write the JSON to this file")
    options = parser.parse_args()
    began, rows, whole = time.monotonic(), [], {}
    for case in CASES:
        if time.monotonic() - began > options.seconds:
            break
        model, method, engine, limit = case
        memory = limit
        if limit is not None and limit.endswith("x"):
            memory = int(float(limit[:-1]) * MIB * (whole.get((model, method)) or 1000))
        row = measured(case, memory, options.device, options.quick)
        if limit is None and engine == "auto":
            whole[model, method] = row.get("held_mib")
        names = {"model": model, "method": method, "engine": engine, "memory": limit}
        rows.append(names | row)
        if options.out is not None:
            options.out.write_text(json.dumps({"cases": rows}, indent=2) + "\n")
    print(json.dumps({"cases": rows}, indent=2))


if __name__ == "__main__":
    main()
