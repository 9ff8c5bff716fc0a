"""Draw one test image under every corruption at every severity."""

import argparse

import torch

from shoal import data, plots
from shoal.data.corruptions import SEVERITIES, corrupt, registry
from studies.common import test_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset", help="a name from: shoal list datasets")
    parser.add_argument("index", type=int, help="index of the test image")
    parser.add_argument("out", help="a .png file")
    options = parser.parse_args()
    image = test_of(data.load(options.dataset)).x[options.index : options.index + 1]
    rows = {name: sheet_row(image, name, options.index) for name in registry}
    figure = plots.contact_sheet(rows, ["0", *map(str, SEVERITIES)])
    figure.savefig(options.out, dpi=110, facecolor="white")


def sheet_row(image: torch.Tensor, name: str, index: int) -> torch.Tensor:
    """The clean image, then the corrupted image at each severity."""
    return torch.cat([image, *(corrupt(image, name, s, first=index) for s in SEVERITIES)])


if __name__ == "__main__":
    main()
