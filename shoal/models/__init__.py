"""Architectures: settings that build a network for an input shape and a number of outputs."""

from shoal.models.blueprint import Blueprint, registry
from shoal.models.cnn import MediumCNN, SmallCNN
from shoal.models.mlp import MLP, LinearModel
from shoal.models.resnet import PreActResNet18, ResNet18, ResNet20, ResNet32, WideResNet16x4

__all__ = [
    "MLP",
    "Blueprint",
    "LinearModel",
    "MediumCNN",
    "PreActResNet18",
    "ResNet18",
    "ResNet20",
    "ResNet32",
    "SmallCNN",
    "WideResNet16x4",
    "registry",
]
