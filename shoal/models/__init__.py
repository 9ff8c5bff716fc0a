"""Architectures: settings that build a network for an input shape and a number of outputs."""

from shoal.models.blueprint import Blueprint, registry
from shoal.models.cnn import MediumCNN, SmallCNN
from shoal.models.mlp import MLP, LinearModel
from shoal.models.parameter_sharing import (
    BatchEnsemble,
    MultiHead,
    RankOneConv2d,
    RankOneLinear,
    TabM,
)
from shoal.models.resnet import PreActResNet18, ResNet18, ResNet20, ResNet32, WideResNet16x4
from shoal.models.table import PeriodicMLP, TableMLP
from shoal.models.vit import ViT

__all__ = [
    "MLP",
    "BatchEnsemble",
    "Blueprint",
    "LinearModel",
    "MediumCNN",
    "MultiHead",
    "PeriodicMLP",
    "PreActResNet18",
    "RankOneConv2d",
    "RankOneLinear",
    "ResNet18",
    "ResNet20",
    "ResNet32",
    "SmallCNN",
    "TabM",
    "TableMLP",
    "ViT",
    "WideResNet16x4",
    "registry",
]
