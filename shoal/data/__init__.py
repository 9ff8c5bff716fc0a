"""Data sets: built-in, computed and downloaded data sets, and the user's arrays and files.

Importing this package registers every data set and target, and loads none of them.
"""

from shoal.data import (
    builtin as digits,
)
from shoal.data import (
    builtin as toys,
)
from shoal.data import (
    corruptions,
    targets,
    uci,
)
from shoal.data import (
    image_sets as pictures,
)
from shoal.data import (
    load as own,
)
from shoal.data.corruptions import corrupt
from shoal.data.dataset import Dataset, Split, registry
from shoal.data.files import load_file
from shoal.data.images import rotated
from shoal.data.load import load
from shoal.data.raw import human_labels
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
