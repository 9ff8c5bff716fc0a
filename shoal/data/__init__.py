"""Data sets: embedded, computed, public ones to download, and the user's own arrays and files.

Importing this package registers every data set and target; nothing is loaded until it is asked
for.
"""

from shoal.data import corruptions, digits, own, pictures, targets, toys, uci
from shoal.data.corruptions import corrupt
from shoal.data.dataset import Dataset, Split
from shoal.data.files import load_file
from shoal.data.human import human_labels
from shoal.data.load import load
from shoal.data.registry import registry
from shoal.data.shifts import rotated
from shoal.data.sources import (
    ArrayBatches,
    Batches,
    LoaderBatches,
    as_split,
    batches_of,
    check_labels,
    input_batches,
)

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
    "digits",
    "human_labels",
    "input_batches",
    "load",
    "load_file",
    "own",
    "pictures",
    "registry",
    "rotated",
    "targets",
    "toys",
    "uci",
]
