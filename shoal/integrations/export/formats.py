"""The formats of exported files: ONNX, a program of `torch.export`, and an AOTInductor package.

Each format writes a traced program to a file and opens the file again, as a server would: with
onnxruntime alone, or with torch alone. Metadata are one JSON text inside the file.
"""

import contextlib
import io
import json
import logging
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.errors import ConfigError, first_line
from shoal.core.optional import require

__all__ = [
    "KEY",
    "Opened",
    "onnx_session",
    "open_file",
    "traced",
    "write_compiled",
    "write_onnx",
    "write_program",
]

KEY = "shoal"
"""Name of the metadata: a key of ONNX and of AOTInductor, `shoal.json` of torch.export."""

_EXTRA = f"{KEY}.json"
Opened = Callable[[Sequence[Tensor]], dict[str, Tensor]]
"""From input tensors to outputs by name."""


def traced(module: nn.Module, inputs: Sequence[Tensor]) -> Any:
    """The program of a module, with any number of rows in every input."""
    batch = torch.export.Dim("batch")
    shapes = {"tensors": tuple({0: batch} if t.ndim else None for t in inputs)}
    try:
        with torch.no_grad(), _quiet():
            program = torch.export.export(module, tuple(inputs), dynamic_shapes=shapes)
    except Exception as error:
        raise ConfigError(
            f"torch.export cannot trace this network for any batch size: {first_line(error)}"
        ) from error
    for node in program.graph.nodes:  # stack traces hold the paths of this machine
        node.meta.pop("stack_trace", None)
    return program


def write_program(program: Any, path: Path, metadata: Mapping[str, Any]) -> None:
    """A file that `torch.export.load` opens."""
    with _quiet():
        torch.export.save(program, path, extra_files={_EXTRA: json.dumps(metadata)})


def write_compiled(program: Any, path: Path, metadata: Mapping[str, Any]) -> None:
    """A package of compiled code for this kind of machine, by AOTInductor."""
    if not (shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")):
        raise ConfigError(
            "AOTInductor needs a C++ compiler, and this machine has none; leave compile out"
        )
    options = {"aot_inductor.metadata": {KEY: json.dumps(metadata)}}
    from torch._inductor import aoti_compile_and_package

    try:
        with torch.no_grad(), _quiet():
            aoti_compile_and_package(program, package_path=str(path), inductor_configs=options)
    except Exception as error:
        raise ConfigError(
            f"AOTInductor cannot compile this network: {first_line(error)}; leave compile out"
        ) from error


def write_onnx(
    program: Any,
    path: Path,
    metadata: Mapping[str, Any],
    precision: str | None = None,
    finish: Callable[[Any], None] | None = None,
) -> None:
    """An ONNX file; weights in "float16" or "int8" by the tools of onnxruntime.

    Args:
        program: the traced program.
        path: the file to write.
        metadata: what the file says about itself.
        precision: "float16" or "int8"; None keeps the weights as they are.
        finish: changes the graph in place, as the last step.
    """
    onnx = require("onnx", extra="export")
    require("onnxscript", extra="export")
    inputs = [each["name"] for each in metadata["inputs"]]
    outputs = [each["name"] for each in metadata["outputs"]]
    try:
        with torch.no_grad(), _quiet():
            program = _without_single_operations(program)
            made: Any = torch.onnx.export(program, dynamo=True, verbose=False, external_data=False)
    except Exception as error:
        raise ConfigError(f"torch.onnx cannot convert this network: {first_line(error)}") from error
    _rename(made.model, inputs, outputs)
    model = _without_traces(made.model_proto)
    if precision is not None:
        model = _converted(model, precision, path)
    if finish is not None:
        finish(model)
    onnx.helper.set_model_props(model, {KEY: json.dumps(metadata)})
    onnx.save_model(model, str(path))


def _without_single_operations(program: Any) -> Any:
    """A program in double precision, without operations that onnxruntime has in single only."""
    aten = torch.ops.aten
    single = [aten.softplus, aten.elu, aten.leaky_relu, aten.mish, aten.softshrink]
    from torch._decomp import get_decompositions

    table = get_decompositions(single)
    used = {node.target for node in program.graph.nodes if _is_double(node.meta.get("val"))}
    return program.run_decompositions(table) if used & table.keys() else program


def _is_double(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.float64


def _rename(model: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Give inputs and outputs their names; an inner value of such a name gets another one."""
    import onnx_ir

    wanted = {*inputs, *outputs}
    ends = {id(value) for value in (*model.graph.inputs, *model.graph.outputs)}
    for node in onnx_ir.traversal.RecursiveGraphIterator(model.graph):
        for value in node.outputs:
            if value.name in wanted and id(value) not in ends:
                value.name = f"inner_{value.name}"
    for name, value in list(model.graph.initializers.items()):
        if name in wanted:
            value.name = f"inner_{name}"
    named = [*zip(model.graph.inputs, inputs, strict=True)]
    named += zip(model.graph.outputs, outputs, strict=True)
    for place, (value, _) in enumerate(named):
        value.name = f"end_{place}"
    for value, name in named:
        value.name = name
    for value, _ in named:
        dims = value.shape.dims if value.shape is not None else ()
        batch = [getattr(dim, "value", dim) for dim in dims]
        if batch and not isinstance(batch[0], int):
            place = 1 if value.name == "members" else 0
            if not isinstance(batch[place], int):
                batch[place] = "batch"
            value.shape = onnx_ir.Shape(batch)


def _without_traces(model: Any) -> Any:
    """The model without the paths and names of the program that made it."""
    for function in (model.graph, *model.functions):
        for node in function.node:
            node.ClearField("doc_string")
            del node.metadata_props[:]
        for name in ("value_info", "input", "output", "initializer"):
            for value in getattr(function, name, ()):
                if hasattr(value, "metadata_props"):
                    del value.metadata_props[:]
        del function.metadata_props[:]
    del model.metadata_props[:]
    return model


def _converted(model: Any, precision: str, path: Path) -> Any:
    """The model with weights in fewer bits."""
    require("onnxruntime", extra="export")
    onnx = require("onnx", extra="export")
    with _quiet():
        if precision == "float16":
            from onnxruntime.transformers import float16

            return float16.convert_float_to_float16(model, keep_io_types=True)
        from onnxruntime.quantization import QuantType, quantize_dynamic

        before, after = path.with_suffix(".whole.onnx"), path.with_suffix(".int8.onnx")
        # the quantiser transposes weights but keeps the shapes that are noted for them
        del model.graph.value_info[:]
        onnx.save_model(model, str(before))
        kinds = ["MatMul", "Gemm", "Gather"]
        quantize_dynamic(before, after, weight_type=QuantType.QInt8, op_types_to_quantize=kinds)
        quantised = onnx.load_model(str(after))
        before.unlink()
        after.unlink()
        return quantised


def open_file(path: Path, compiled: bool = False) -> tuple[Opened, dict[str, Any]]:
    """The function in a file and its metadata, read as anyone else would read them."""
    if path.suffix == ".onnx":
        return _opened_onnx(path)
    if compiled:
        from torch._inductor import aoti_load_package

        package: Any = aoti_load_package(str(path))
        return lambda tensors: dict(package(*tensors)), json.loads(package.get_metadata()[KEY])
    extra = {_EXTRA: ""}
    with _quiet():
        module = torch.export.load(path, extra_files=extra).module()
    return lambda tensors: dict(module(*tensors)), json.loads(extra[_EXTRA])


def onnx_session(path: Path) -> Any:
    """The file in onnxruntime."""
    runtime = require("onnxruntime", extra="export")
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    try:
        return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ConfigError(f"onnxruntime cannot open the file: {first_line(error)}") from error


def _opened_onnx(path: Path) -> tuple[Opened, dict[str, Any]]:
    session = onnx_session(path)
    names = [each.name for each in session.get_inputs()]
    outputs = [each.name for each in session.get_outputs()]

    def run(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        arrays = {name: t.numpy() for name, t in zip(names, tensors, strict=True)}
        values = session.run(outputs, arrays)
        return {n: torch.from_numpy(v) for n, v in zip(outputs, values, strict=True)}

    return run, json.loads(session.get_modelmeta().custom_metadata_map[KEY])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """A block in which exporters print and warn nothing about their internals."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript")]
    loggers += [logging.getLogger(), logging.getLogger("onnx_ir")]
    before = [logger.level for logger in loggers]
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, before, strict=True):
                logger.setLevel(level)
