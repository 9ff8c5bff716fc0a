"""Write a file beside its place, open it again, compare it with `predict`, and move it there."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.display.text import counted
from shoal.core.errors import ConfigError
from shoal.core.storage.disk import replacing, sync
from shoal.integrations.export.formats import traced

__all__ = ["SIZES", "TOLERANCES", "Answers", "Exported", "written"]

SIZES = (1, 7, 64)
"""Batch sizes at which a file is compared with `predict`."""

TOLERANCES = {None: 1e-5, "float16": 1e-2, "int8": 0.1}
"""Largest allowed difference by precision, relative to the largest value of an output or to 1."""


@dataclass(frozen=True)
class Exported:
    """A written file.

    Attributes:
        path: the file.
        outputs: names of the outputs, in order.
        differences: largest difference of each output from `predict`, relative to the output's
            largest value or to 1, over batches of 1, 7 and 64 inputs.
        bytes: size of the file.
        metadata: what the file says about itself, as plain values.
    """

    path: Path
    outputs: tuple[str, ...]
    differences: dict[str, float]
    bytes: int
    metadata: dict[str, Any]

    @property
    def difference(self) -> float:
        """The largest difference of all outputs."""
        return max(self.differences.values())

    def __repr__(self) -> str:
        size = f"{counted(self.metadata['members'], 'member')}, {self.bytes:,} bytes"
        return f"Exported({str(self.path)!r}, {size}, difference {self.difference:.1e})"


Answers = Callable[[int], dict[str, Tensor]]
"""From a number of data points to the outputs of a file for the first of them, by name."""


def written(
    module: nn.Module,
    path: Path,
    example: Sequence[Tensor],
    expected: Mapping[str, Tensor],
    facts: dict[str, Any],
    limit: float,
    write: Callable[[Any, Path], None],
    opened: Callable[[Path], Answers],
) -> Exported:
    """The file of a module, if it gives what `predict` gives.

    Args:
        module: from the input tensors to outputs by name.
        path: the file to create or replace.
        example: input tensors.
        expected: the outputs of `predict` for as many data points as the largest of `SIZES`.
        facts: the metadata.
        limit: the largest allowed difference.
        write: writes the traced program to a path.
        opened: opens the file again.
    """
    with torch.no_grad():
        module(*example)  # learns which steps are random, before tracing
    program = traced(module, example)
    with replacing(path, sum(t.nbytes for t in module.parameters())) as temporary:
        write(program, temporary)
        differences = _differences(opened(temporary), expected)
        worst = max(differences, key=lambda name: differences[name])
        if not differences[worst] <= limit:
            raise ConfigError(
                f"the output '{worst}' of {path.name} differs from predict by "
                f"{differences[worst]:.1e}, more than {limit:g}, so no file is written; a larger "
                f"tolerance= would accept it"
            )
        size = temporary.stat().st_size
        sync(temporary)
    return Exported(path, tuple(expected), differences, size, facts)


def _differences(answers: Answers, expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Largest relative difference of each output of a file, over several batch sizes."""
    differences = dict.fromkeys(expected, 0.0)
    for size in SIZES:
        with torch.no_grad():
            outputs = answers(size)
        for name, whole in expected.items():
            wanted = whole[:, :size] if name == "members" else whole[:size]
            output = outputs[name]
            if output.shape != wanted.shape:
                raise ConfigError(
                    f"the output '{name}' has shape {tuple(output.shape)} for {size} inputs, not "
                    f"{tuple(wanted.shape)}; the network does not take every batch size"
                )
            scale = max(1.0, float(whole.abs().max()))
            difference = float((output.double() - wanted.double()).abs().max()) / scale
            larger = max(differences[name], difference)
            differences[name] = larger if difference == difference else torch.inf
    return differences
