"""Is the number of queues to a GPU set in time? python benchmarks/queues.py [-o queues.json]

Ten ResNet18 in bfloat16, each case in a process of its own and all of them in turns:

* eight: the driver's own number, CUDA_DEVICE_MAX_CONNECTIONS=8;
* before: the variable is 32 before Python starts;
* inside: the program sets it to 32 itself, before its first use of the GPU;
* asked: as inside, after torch.cuda.is_available() was called;
* late: as inside, after a tensor was put on the GPU.

Prints JSON: milliseconds a step (the median over the epochs after the first), by case and round.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

NAME = "CUDA_DEVICE_MAX_CONNECTIONS"
CASES = {"eight": "8", "before": "32", "inside": None, "asked": None, "late": None}


def measured(case: str, device: str, quick: bool) -> dict[str, Any]:
    """One case, in this process."""
    import torch

    if case == "asked":
        torch.cuda.is_available()
    elif case == "late":
        torch.zeros(1, device=device)
    os.environ.setdefault(NAME, "32")

    import shoal

    members, batches, epochs, size, side = (2, 2, 2, 4, 8) if quick else (10, 50, 6, 128, 32)
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(size * batches, 3, side, side, generator=generator)
    y = torch.randint(10, (len(x),), generator=generator)
    build = shoal.models.Blueprint(shoal.models.ResNet18(), (3, side, side), 10)
    run = shoal.fit(
        shoal.Ensemble.init(build, members),
        (x, y),
        method="ensemble",
        optimizer="sgd",
        epochs=epochs,
        batch_size=size,
        device=device,
        precision="bfloat16" if device.startswith("cuda") else None,
        progress=False,
    )
    steps = [1000 * row["seconds"] / batches for row in run.history]
    return {"ms": statistics.median(steps[1:]), "epochs": steps, NAME: os.environ.get(NAME)}


def in_a_process(case: str, device: str, quick: bool) -> dict[str, Any]:
    """The same in a fresh process, with the environment of the case."""
    environment = {key: value for key, value in os.environ.items() if key != NAME}
    chosen = CASES[case]
    environment |= {} if chosen is None else {NAME: chosen}
    root = str(Path(__file__).resolve().parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join([root, environment.get("PYTHONPATH", "")])
    command = [sys.executable, __file__, "--case", case, "--device", device]
    command += ["--quick"] if quick else []
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Every case in turns, or one of them here."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda", help="(cuda)")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each case (3)")
    parser.add_argument("--quick", action="store_true", help="small and short: whether it works")
    parser.add_argument("--case", choices=CASES, help="measure this one, in this process")
    parser.add_argument("-o", "--out", help="write the figures there as JSON")
    options = parser.parse_args()
    if options.case is not None:
        print(json.dumps(measured(options.case, options.device, options.quick)))
        return
    found: dict[str, list[dict[str, Any]]] = {case: [] for case in CASES}
    for _ in range(options.rounds):
        for case in CASES:
            found[case].append(in_a_process(case, options.device, options.quick))
            print(f"{case}: {found[case][-1]['ms']:.2f} ms a step", file=sys.stderr, flush=True)
    medians = {case: statistics.median(r["ms"] for r in rounds) for case, rounds in found.items()}
    text = json.dumps({"ms_a_step": medians, "rounds": found}, indent=2)
    print(text)
    if options.out is not None:
        Path(options.out).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
