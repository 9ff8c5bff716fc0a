"""Networks of every family with their inputs, for exported files."""

import torch
from torch import nn

from shoal.inference import adapters
from shoal.inference.ensemble import Ensemble
from shoal.models.vit import ViT


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.cell(x)[0][:, -1])


def perceptron(outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, outputs))


def convolutional() -> nn.Module:
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)]
    return nn.Sequential(*layers)


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_labels": 3}
    sizes |= {"num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": 20}
    return BertForSequenceClassification(BertConfig(**sizes))


def tokens(count: int = 9) -> dict[str, torch.Tensor]:
    mask = (torch.arange(9) < torch.randint(3, 10, (count, 1))).long()
    return {"input_ids": torch.randint(0, 50, (count, 9)), "attention_mask": mask}


def disturbed(ensemble: Ensemble) -> Ensemble:
    """Running statistics and weights that are not those of a new network."""
    for name, tensor in ensemble.buffers.items():
        if tensor.is_floating_point() and "running" in name:
            tensor.uniform_(0.5, 2.0)
    return ensemble


CASES = {
    "perceptron": lambda: (Ensemble.init(perceptron, members=3), torch.randn(9, 5)),
    "cnn with batch norm": lambda: (
        disturbed(Ensemble.init(convolutional, members=3)),
        torch.randn(9, 1, 8, 8),
    ),
    "vit": lambda: (
        Ensemble.init(lambda: ViT(width=16, depth=2, heads=2).build((1, 8, 8), 3), members=2),
        torch.randn(9, 1, 8, 8),
    ),
    "gru": lambda: (Ensemble.init(Recurrent, members=2), torch.randn(9, 5, 4)),
    "bert": lambda: (Ensemble.init(bert, members=2), tokens()),
    "lora": lambda: (
        Ensemble.init(adapters.lora(perceptron(), rank=2), members=3),
        torch.randn(9, 5),
    ),
    "lora on bert": lambda: (Ensemble.init(adapters.lora(bert(), rank=2), members=2), tokens()),
}
"""Ensemble and inputs by name."""
