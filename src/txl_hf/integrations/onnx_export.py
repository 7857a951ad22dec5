"""Write a Transformer-XL as ONNX graphs with its memory in and out, and check them against torch.

    txl-export --model runs/wikitext-2 --output wikitext-2-onnx

The folder holds, beside config.json and the tokenizer, two graphs and `weights.data`, the weights of both, which stays
beside them:

* `segment.onnx`: `input_ids` (batch, length) and `mems.0` … (batch, memory, d_model), one for each layer, give
  `logits` (batch, length, vocabulary), which are log-probabilities, and `new_mems.0` …, which the next call takes as
  `mems.0` ….
* `step.onnx`: the same for one token a row, `input_ids` (batch, 1), with `logits` (batch, 1, vocabulary).

Batch, length and memory have any size, a memory none to mem_len states. A text begins with an empty memory, or, where
config.json says `"initial_memory": "zeros"`, with mem_len states of zeros. Every token is remembered, so ext_len is 0
in config.json. onnxruntime's results are compared with torch's at several sizes before the folder appears.
"""

import argparse
import hashlib
import logging
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..command_line import CommandParser, hub_or_folder, one_line_errors
from ..data.loading import find_tokenizer, has_tokenizer, load_config, load_language_model
from ..files import whole_folder
from ..transfo_xl.modeling_transfo_xl import TransfoXLForCausalLM

if TYPE_CHECKING:
    from torch.onnx import ONNXProgram

# The file that the graphs share, and the least bytes of a weight in it.
WEIGHTS, LEAST_SHARED = "weights.data", 1024

# Largest difference from torch of log-probabilities, and of states in proportion to the largest.
TOLERANCE = 1e-4
# Batch and length that the graph of a segment is compared at, with memories of several lengths.
SIZES = ((1, 1), (3, 7), (2, 20))


@one_line_errors()
def main(argv: list[str] | None = None):
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=hub_or_folder, required=True, help="folder or Hub name")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    options = parser.parse_args(argv)
    if options.output.exists():
        raise FileExistsError(f"{options.output} exists: choose another folder, or remove it")
    for name, difference in export(options.model, options.output).items():
        print(f"{options.output / name}: at most {difference:.1e} from torch")
    if not has_tokenizer(options.output):
        print(f"no tokenizer was found with {options.model}: put its files into {options.output}", file=sys.stderr)


class _Graph(nn.Module):
    def __init__(self, model: TransfoXLForCausalLM):
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, mems: list[Tensor]) -> tuple[Tensor, ...]:
        outputs = self.model(input_ids, mems=tuple(mems), use_cache=False)
        return outputs.logits, *outputs.mems


def export(name: str, output: Path) -> dict[str, float]:
    """Write both graphs, the configuration and the tokenizer of a model, by its name, to a new folder.

    Returns:
        for each graph by how much onnxruntime differs from torch at most.

    Raises:
        ValueError: the model is no Transformer-XL or has no memory, or onnxruntime computes something else.
    """
    # A package that torch's exporter needs and lacks is an error before any work.
    import onnx  # noqa: F401
    import onnxruntime  # noqa: F401
    import onnxscript  # noqa: F401

    config = load_config(name)
    if config.mem_len == 0:
        raise ValueError(f"{name} has mem_len=0: the graphs are those of a model with a memory")
    # Programs that run the graphs read no token again, so all tokens are remembered.
    config.ext_len = 0
    # Every operation of eager attention is one of ONNX.
    model = load_language_model(name, config=config, dtype=torch.float32, attn_implementation="eager")
    model.eval().requires_grad_(False)
    found = {}
    output.parent.mkdir(parents=True, exist_ok=True)
    with whole_folder(output) as aside:
        graphs = {"segment.onnx": SIZES, "step.onnx": tuple((batch, 1) for batch, _ in SIZES)}
        programs = {aside / graph: make_graph(model, one_token=graph == "step.onnx") for graph in graphs}
        write_graphs(programs, aside / WEIGHTS)
        for graph, sizes in graphs.items():
            found[graph] = check_graph(model, aside / graph, sizes)
        config.save_pretrained(aside)
        if (tokenizer := find_tokenizer(name)) is not None:
            tokenizer.save_pretrained(aside)
    return found


def make_graph(model: TransfoXLForCausalLM, one_token: bool) -> "ONNXProgram":
    """The graph of a segment of any length, or of one token, with a memory of any length before it."""
    config, layers = model.config, model.config.n_layer
    # The exporter takes equal sizes for one dimension, and a memory of mem_len for one that is never cut, so the sizes
    # differ from one another and from mem_len as far as possible.
    memory, length = max(1, config.mem_len - 1), 4 if config.mem_len == 3 else 3
    batch = 5 if memory == 2 else 2
    segment = torch.zeros((batch, 1 if one_token else length), dtype=torch.int64)
    # A tensor for each layer: the same tensor twice would be one input.
    mems = [torch.zeros((batch, memory, config.d_model)) for _ in range(layers)]
    sizes: tuple = ({0: "batch"} if one_token else {0: "batch", 1: "length"}, [{0: "batch", 1: "memory"}] * layers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = logging.root.manager.disable
        # The exporter warns of operators that this model does not have.
        logging.disable(logging.WARNING)
        try:
            program = torch.onnx.export(
                _Graph(model).eval(),
                (segment, mems),
                dynamo=True,
                dynamic_shapes=sizes,
                input_names=["input_ids", *(f"mems.{i}" for i in range(layers))],
                output_names=["logits", *(f"new_mems.{i}" for i in range(layers))],
                verbose=False,
            )
        finally:
            logging.disable(before)
    # For mypy: the older exporter returns None.
    assert program is not None
    for states in program.model.graph.outputs[1:]:
        # The length of the memory is dynamic, but the exporter gives the output the example's.
        states.shape[1] = "new_memory"
    return program


def write_graphs(programs: dict[Path, "ONNXProgram"], weights: Path) -> None:
    """Write graphs, by their paths, and the weights of all in one file beside them, each weight once."""
    import onnx_ir

    values = [value for program in programs.values() for value in program.model.graph.initializers.values()]
    tensors = {value: value.const_value for value in values if value.const_value.nbytes >= LEAST_SHARED}
    keys = {
        value: (tensor.dtype, tuple(tensor.shape), hashlib.blake2b(tensor.tobytes()).digest())
        for value, tensor in tensors.items()
    }
    different = {keys[value]: tensor for value, tensor in tensors.items()}
    written = onnx_ir.external_data.convert_tensors_to_external([*different.values()], weights.parent, weights.name)
    external = dict(zip(different, written, strict=True))
    for value, key in keys.items():
        value.const_value = external[key]
    for path, program in programs.items():
        onnx_ir.save(program.model, path)


def check_graph(model: TransfoXLForCausalLM, path: Path, sizes: tuple[tuple[int, int], ...]) -> float:
    """The largest difference of a graph from the model, of states in proportion to the largest one, for each batch and
    length with a memory that is empty, begun and full. Raises a ValueError for one above `TOLERANCE`."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    generator, config = torch.Generator().manual_seed(0), model.config
    largest = 0.0
    for batch_size, length in sizes:
        tokens = torch.randint(config.vocab_size, (batch_size, config.mem_len + length), generator=generator)
        past, segment = tokens.split([config.mem_len, length], dim=1)
        full = model(past, use_cache=False).mems
        for memory in sorted({0, 1, config.mem_len}):
            mems = [states[:, config.mem_len - memory :] for states in full]
            expected = _Graph(model)(segment, mems)
            given = {"input_ids": segment.numpy(), **{f"mems.{i}": states.numpy() for i, states in enumerate(mems)}}
            for name, want, got in zip(session.get_outputs(), expected, session.run(None, given), strict=True):
                scale = 1.0 if name.name == "logits" else max(1.0, float(want.abs().max()))
                same = got.shape == tuple(want.shape)
                difference = float((torch.from_numpy(got) - want).abs().max()) / scale if same else float("inf")
                if not difference <= TOLERANCE:
                    raise ValueError(
                        f"{path.name}: {name.name} differs by {difference:.1e} from torch's for batch {batch_size}, "
                        f"length {length} and a memory of {memory}, but {TOLERANCE:.0e} is allowed"
                    )
                largest = max(largest, difference)
    return largest


if __name__ == "__main__":
    main()
