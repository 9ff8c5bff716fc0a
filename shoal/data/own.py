"""The data set `file`: whatever the user has on disk."""

import os

from shoal.core.errors import ConfigError, DataError
from shoal.data.arrays import check_labels
from shoal.data.dataset import Dataset, Split
from shoal.data.files import load_file, title
from shoal.data.outsiders import outsiders
from shoal.data.picture_folder import class_folders
from shoal.data.registry import registry

__all__ = ["file_dataset"]


@registry.register("file")
def file_dataset(
    train: str = "",
    test: str | None = None,
    ood: str | tuple[str, ...] = (),
    shifts: str | tuple[str, ...] = (),
    target: str | None = None,
) -> Dataset:
    """Your own data from .npz, .npy or .csv files, or from folders of images.

    Args:
        train: file with inputs and targets, or folder with a folder of images for each class.
        test: file or folder like it.
        ood: inputs of another kind: files or folders, called by their names, or data sets.
        shifts: file or files with inputs and targets that differ in something.
        target: what the last column of a table is, `"class"` or `"value"`; see `load_file`.
    """
    if not train:
        raise ConfigError("dataset 'file' needs a file to train on; type train = 'your.npz'")
    known = load_file(train, target)
    shape = tuple(known.x.shape[1:])
    pictures = os.path.isdir(train)
    classes = class_folders(train) if pictures else None

    def like(path: str) -> Split:
        return load_file(path, target, shape=shape, classes=classes)

    data = Dataset(
        name=title(train),
        train=known,
        test=None if test is None else like(test),
        shifts={title(p): like(p) for p in _paths(shifts)},
        ood=outsiders(ood, shape),
        classes=classes,
        pixel_range=(0.0, 1.0) if pictures else None,
    )
    _check_together(data)
    return data


def _check_together(data: Dataset) -> None:
    if data.train.y is None:
        raise DataError(
            f"the training file of '{data.name}' has no targets; add an array y, "
            f"or type target = 'class' to read the last column"
        )
    labelled = {**({} if data.test is None else {"test": data.test}), **data.shifts}
    for name, part in labelled.items():
        if tuple(part.x.shape[1:]) != data.input_shape:
            raise DataError(
                f"inputs of '{name}' have shape {tuple(part.x.shape[1:])}, "
                f"those to train on {data.input_shape}; they must agree"
            )
        if part.y is None:
            raise DataError(f"the file of '{name}' has no targets, which are needed to judge by")
        if data.has_classes:
            check_labels(part.y, data.outputs)


def _paths(paths: str | tuple[str, ...]) -> tuple[str, ...]:
    return (paths,) if isinstance(paths, str) else tuple(paths)
