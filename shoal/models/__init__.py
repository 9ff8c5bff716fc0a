"""Architectures: settings that build a network for a shape of input and a number of outputs."""

from shoal.models.blueprint import Blueprint
from shoal.models.cnn import MediumCNN, SmallCNN
from shoal.models.linear import Linear
from shoal.models.mlp import MLP
from shoal.models.preact import PreActResNet18, WideResNet16x4
from shoal.models.registry import registry
from shoal.models.resnet import ResNet18, ResNet20, ResNet32

__all__ = [
    "MLP",
    "Blueprint",
    "Linear",
    "MediumCNN",
    "PreActResNet18",
    "ResNet18",
    "ResNet20",
    "ResNet32",
    "SmallCNN",
    "WideResNet16x4",
    "registry",
]
