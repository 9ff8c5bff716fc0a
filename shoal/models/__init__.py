"""Architectures: settings that build a network for a shape of input and a number of outputs."""

from shoal.models.blueprint import Blueprint
from shoal.models.cnn import SmallCNN
from shoal.models.linear import Linear
from shoal.models.mlp import MLP
from shoal.models.registry import registry
from shoal.models.resnet import ResNet18

__all__ = ["MLP", "Blueprint", "Linear", "ResNet18", "SmallCNN", "registry"]
