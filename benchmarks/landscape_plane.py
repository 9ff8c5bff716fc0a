"""How long a plane of weight space takes: OMP_NUM_THREADS=2 python benchmarks/landscape_plane.py

41 x 41 networks between two small CNNs, each evaluated on 2,000 images of 8 x 8 pixels (or --side)
as members of one forward pass. The script prints wall seconds, processor seconds, and the ratio of
the wall seconds to a budget of 60 seconds on two cores.
"""

import argparse
import json
import time

import torch

from shoal.analysis.landscape.planes import plane_through_origin
from shoal.analysis.landscape.survey import survey
from shoal.data.dataset import Split
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Categorical
from shoal.models import Blueprint, SmallCNN

BUDGET = 60.0


def main() -> None:
    """Time one plane."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=41)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--side", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    shape = (1, options.side, options.side)
    pair = Ensemble.init(Blueprint(SmallCNN(), shape, 10), members=2).to(options.device)
    random = torch.Generator().manual_seed(0)
    x = torch.rand(options.images, *shape, generator=random)
    split = Split(x, torch.randint(10, (len(x),), generator=random))
    plane = plane_through_origin(pair, options.points)
    survey(pair, plane.coefficients[:8], split, Categorical())
    wall, processor = time.perf_counter(), time.process_time()
    survey(pair, plane.coefficients, split, Categorical())
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    found = {
        "networks": len(plane.coefficients),
        "images": len(x),
        "threads": torch.get_num_threads(),
        "wall_seconds": round(wall, 1),
        "processor_seconds": round(processor, 1),
        "share_of_budget": round(wall / BUDGET, 2),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
