"""One small network of every kind that `kinds_table` lists; libraries are imported when used."""

import functools
import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm

from shoal import adapters
from shoal.models import MLP, BatchEnsemble, Blueprint, MultiHead, TabM

CLASSES, PLACES, WORDS, LENGTH = 3, 4, 11, 5
"""Classes of a label, side of an image, size of a vocabulary, length of a sequence."""


def library(name: str) -> ModuleType:
    """A module of an optional library, without the warnings of its import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, CLASSES))


def wide_perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, CLASSES))


def counter() -> nn.Module:
    """The logarithm of one rate."""
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(3, CLASSES),
    )  # fmt: skip


def spectral() -> nn.Module:
    return nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, CLASSES)
    )


def spectral_by_hook() -> nn.Module:
    """The older spectral norm, which a hook computes before every call."""
    return nn.Sequential(spectral_norm(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, CLASSES))


def weight_normed() -> nn.Module:
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, CLASSES)
    )


def orthogonal() -> nn.Module:
    return nn.Sequential(
        parametrizations.orthogonal(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, CLASSES)
    )


def lazy() -> nn.Module:
    """Lazy layers without shapes."""
    return nn.Sequential(nn.LazyLinear(6), nn.Tanh(), nn.LazyLinear(CLASSES))


def lazy_called() -> nn.Module:
    """Lazy layers that a first call has given their shapes."""
    network = lazy()
    network(torch.zeros(1, 4))
    return network


class UNet(nn.Module):
    """One step down, one step up and a skip connection: classes of every pixel [B, C, H, W]."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 3, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(3, 3, 2, stride=2)
        self.last = nn.Conv2d(4, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat([x, self.up(self.down(x).tanh())], 1))


class Recurrent(nn.Module):
    """An LSTM or GRU over a sequence of real vectors; the last state gives the class."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cells = kind(4, 5, batch_first=True)
        self.last = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.cells(x)[0][:, -1])


def lstm() -> nn.Module:
    return Recurrent(nn.LSTM)


def gru() -> nn.Module:
    return Recurrent(nn.GRU)


class Tied(nn.Module):
    """The embedding of tokens is the matrix of the last layer, too; outputs [B, T, C]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 6)
        self.middle = nn.Linear(6, 6)
        self.last = nn.Linear(6, WORDS, bias=False)
        self.last.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.middle(self.embed(tokens)).tanh())


class TwoInputs(nn.Module):
    """A real vector and a token of each data point."""

    def __init__(self) -> None:
        super().__init__()
        self.real, self.embed = nn.Linear(4, 6), nn.Embedding(WORDS, 6)
        self.last = nn.Linear(6, CLASSES)

    def forward(self, features: Tensor, token: Tensor) -> Tensor:
        return self.last((self.real(features) + self.embed(token)).tanh())


class Point(NamedTuple):
    """A batch as a named tuple."""

    features: Tensor
    token: Tensor


@dataclass
class Record:
    """A batch as a dataclass."""

    features: Tensor
    token: Tensor


class OneObject(TwoInputs):
    """The same network with a record of both inputs as its only argument."""

    def forward(self, point: Point | Record) -> Tensor:  # pyright: ignore
        return super().forward(point.features, point.token)


class WithExtra(nn.Module):
    """Returns (logits, hidden units)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x).tanh()
        return self.last(hidden), hidden


class Several(WithExtra):
    """Returns a dict of several outputs."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # pyright: ignore
        scores, hidden = super().forward(x)
        return {"hidden": hidden, "scores": scores}


class Graphs:
    """A hand-made batch of graphs: nodes, edges, and the graph of each node."""

    def __init__(self, nodes: Tensor, edges: Tensor, owner: Tensor, y: Tensor) -> None:
        self.nodes, self.edges, self.owner, self.y = nodes, edges, owner, y

    def to(self, device: torch.device | str) -> "Graphs":
        return Graphs(*(t.to(device) for t in (self.nodes, self.edges, self.owner, self.y)))


class GraphNetwork(nn.Module):
    """One round of messages, and the mean over the nodes of every graph."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.last = nn.Linear(4, 6), nn.Linear(6, CLASSES)

    def forward(self, graphs: Graphs) -> Tensor:
        start, end = graphs.edges
        sent = self.message(graphs.nodes)
        hidden = sent.index_add(0, end, sent[start]).tanh()
        count = len(graphs.y)
        total = hidden.new_zeros(count, hidden.shape[1]).index_add(0, graphs.owner, hidden)
        sizes = torch.bincount(graphs.owner, minlength=count).unsqueeze(-1)
        return self.last(total / sizes)


def gcn() -> nn.Module:
    """A graph convolution of torch_geometric, on the graphs of its own loader."""
    layers = library("torch_geometric.nn")

    class GCN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = layers.GCNConv(4, 6), nn.Linear(6, CLASSES)

        def forward(self, data: object) -> Tensor:
            hidden = self.first(data.x, data.edge_index).tanh()  # pyright: ignore
            return self.last(layers.global_mean_pool(hidden, data.batch))  # pyright: ignore

    return GCN()


def schnet() -> nn.Module:
    """SchNet of torch_geometric, with the neighbours that the data have."""
    models = library("torch_geometric.nn.models")

    class Potential(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = {"hidden_channels": 8, "num_filters": 8, "num_gaussians": 4}
            self.net = models.SchNet(**sizes, num_interactions=1)

        def forward(self, data: Any) -> Tensor:
            net, (i, j) = self.net, data.edge_index
            distance = (data.pos[i] - data.pos[j]).norm(dim=-1)
            atoms, lengths = net.embedding(data.z), net.distance_expansion(distance)
            for block in net.interactions:
                atoms = atoms + block(atoms, data.edge_index, distance, lengths)
            return net.readout(net.lin2(net.act(net.lin1(atoms))), data.batch, dim=0)

    return Potential()


_SMALL = {
    "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def vit() -> nn.Module:
    transformers = library("transformers")
    config = transformers.ViTConfig(
        **_SMALL, image_size=PLACES, patch_size=2, num_channels=1, num_labels=CLASSES
    )
    return transformers.ViTForImageClassification(config)


def bert() -> nn.Module:
    transformers = library("transformers")
    config = transformers.BertConfig(
        **_SMALL, vocab_size=WORDS, max_position_embeddings=LENGTH, num_labels=CLASSES
    )
    return transformers.BertForSequenceClassification(config)


def gpt2() -> nn.Module:
    transformers = library("transformers")
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=8, n_layer=1, n_head=2, n_inner=8,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def pretrained(make: Callable[[], nn.Module]) -> nn.Module:
    """A network that is the same for all tests, with statistics of its own."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = make()
        for layer in network.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.running_mean.normal_(0.0, 0.1)  # pyright: ignore
    return network


low_rank = adapters.lora(pretrained(cnn), rank=2)
last_layers = adapters.last_layer(pretrained(cnn))
scales = adapters.scale(pretrained(cnn))
multi_head = Blueprint(MultiHead(MLP(hidden=(6, 5), activation="tanh")), (4,), CLASSES)
rank_one = Blueprint(BatchEnsemble(MLP(hidden=(6,), activation="tanh")), (4,), CLASSES)
tabm = Blueprint(TabM(hidden=(6, 5), activation="tanh", dropout=0.0), (4,), CLASSES)


@functools.cache
def _adapted(name: str) -> Callable[[], nn.Module]:
    if name == "lora":
        return adapters.lora(pretrained(bert), rank=2)
    peft = library("peft")
    settings = {"r": 2, "target_modules": ["query", "value"], "modules_to_save": ["classifier"]}
    with torch.random.fork_rng(), warnings.catch_warnings():
        # peft asks transformers 5.23 by a name that is deprecated there.
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        model = peft.get_peft_model(pretrained(bert), peft.LoraConfig(**settings))
    return adapters.peft(model)


def low_rank_bert() -> nn.Module:
    """BERT with adapters, made when the library is there."""
    return _adapted("lora")()


def peft_bert() -> nn.Module:
    """The same with the adapters of the library peft."""
    return _adapted("peft")()
