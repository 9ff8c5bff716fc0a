"""Members in blocks against all members on the device: processor time of a step, and memory.

    python benchmarks/offload.py

Each case runs in a process of its own, on one core. The peak is that of the process after the first
steps, without what it took before the ensemble.
"""

import subprocess
import sys
import time

MEMBERS, WIDTH, BATCH, STEPS = 40, 512, 128, 6


def measure(method: str, offload: str) -> None:
    """Train, and print milliseconds per step and MiB."""
    import torch
    from torch import nn

    import shoal

    def build() -> nn.Module:
        layers = [nn.Linear(64, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()]
        return nn.Sequential(*layers, nn.Linear(WIDTH, 4))

    torch.set_num_threads(1)
    before, times = peak("VmRSS"), []

    def tick(event: shoal.EpochEnd) -> None:
        times.append(time.process_time())
        if len(times) == 1:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")  # forget the peak so far
        if len(times) == STEPS - 1:
            print(f"{1000 * (times[-1] - times[0]) / (STEPS - 2):.0f}", end=" ")
            print(f"{(peak('VmHWM') - before) / 2**20:.0f}")

    data = torch.randn(BATCH, 64), torch.arange(BATCH) % 4
    ensemble = shoal.Ensemble.init(build, MEMBERS)
    blocks = {} if offload == "none" else {"resident": 4, "offload": offload}
    options = {"method": method, "batch_size": BATCH, "epochs": STEPS, "callbacks": [tick]}
    shoal.fit(ensemble, data, progress=False, **options, **blocks)


def peak(key: str) -> int:
    """Bytes that the system counts for this process."""
    with open("/proc/self/status") as file:
        return next(int(row.split()[1]) << 10 for row in file if row.startswith(f"{key}:"))


if __name__ == "__main__":
    if len(sys.argv) == 3:
        measure(*sys.argv[1:])
    else:
        for method in ("ensemble", "f-kde", "kde"):
            for offload in ("none", "host", "disk"):
                command = [sys.executable, __file__, method, offload]
                found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
                ms, size = found.split()
                print(f"{method:9} {offload:5} {ms:>5} ms {size:>5} MiB", flush=True)
