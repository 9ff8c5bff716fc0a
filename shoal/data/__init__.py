"""Data sets: built-in, computed and downloaded data sets, and the user's arrays and files.

Importing this package registers every data set and target, and loads none of them.
"""

from shoal.data import corruptions, targets
from shoal.data.batches.sources import (
    ArrayBatches,
    Batches,
    LoaderBatches,
    as_split,
    batches_of,
    check_labels,
    input_batches,
)
from shoal.data.corruptions import corrupt
from shoal.data.dataset import Dataset, Split, registry
from shoal.data.files.raw import human_labels
from shoal.data.load import load, load_file
from shoal.data.sets import builtin, image_sets, uci  # noqa: F401
from shoal.data.sets.images import rotated

__all__ = [
    "ArrayBatches",
    "Batches",
    "Dataset",
    "LoaderBatches",
    "Split",
    "as_split",
    "batches_of",
    "check_labels",
    "corrupt",
    "corruptions",
    "human_labels",
    "input_batches",
    "load",
    "load_file",
    "registry",
    "rotated",
    "targets",
    "uci",
]
