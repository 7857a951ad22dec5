"""What `txl-export` does: a model as ONNX graphs, and whether onnxruntime finds what torch finds."""

import hashlib
import logging
import warnings
from collections.abc import Iterable
from pathlib import Path

import onnx  # torch's exporter imports it too: what is missing is said before any work.
import onnxruntime
import onnxscript  # noqa: F401 -- so it does this.
import torch
from torch import Tensor, nn

from ..data.loading import find_tokenizer, load_config, load_language_model
from ..files import whole_folder
from ..transfo_xl.modeling_transfo_xl import TransfoXLForCausalLM

__all__ = ["check_graph", "export", "share_weights", "write_graph"]

# Weights of so many bytes and more are in a file that the graphs share, where each begins at a multiple of a page.
LEAST_SHARED, PAGE = 1024, 4096

# How far log-probabilities, and states in proportion to the largest, may be from torch's.
TOLERANCE = 1e-4
# Batch and length that the graph of a segment is compared at, with memories of several lengths.
SIZES = ((1, 1), (3, 7), (2, 20))


WEIGHTS = "weights.data"


class _Graph(nn.Module):
    def __init__(self, model: TransfoXLForCausalLM):
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, mems: list[Tensor]) -> tuple[Tensor, ...]:
        outputs = self.model(input_ids, mems=tuple(mems), use_cache=False)
        return outputs.logits, *outputs.mems


def export(name: str, output: Path) -> dict[str, float]:
    """Write both graphs, the configuration and the tokenizer of a model to a folder that appears when all is right.

    Args:
        name: the model's folder or Hub name. output: the folder, which must not exist.

    Returns:
        for each graph by how much onnxruntime differs from torch at most.

    Raises:
        ValueError: the model is no Transformer-XL or has no memory, or onnxruntime computes something else.
    """
    config = load_config(name)
    if config.mem_len == 0:
        raise ValueError(f"{name} has mem_len=0: the graphs are those of a model with a memory")
    # Who runs the graphs reads no token again: all of them are remembered.
    config.ext_len = 0
    # Every operation of eager attention is one of ONNX.
    model = load_language_model(name, config=config, dtype=torch.float32, attn_implementation="eager")
    model.eval().requires_grad_(False)
    found = {}
    output.parent.mkdir(parents=True, exist_ok=True)
    with whole_folder(output) as aside:
        graphs = {"segment.onnx": SIZES, "step.onnx": tuple((batch, 1) for batch, _ in SIZES)}
        for graph in graphs:
            write_graph(model, aside / graph, one_token=graph == "step.onnx")
        share_weights([aside / graph for graph in graphs], aside / WEIGHTS)
        for graph, sizes in graphs.items():
            found[graph] = check_graph(model, aside / graph, sizes)
        config.save_pretrained(aside)
        if (tokenizer := find_tokenizer(name)) is not None:
            tokenizer.save_pretrained(aside)
    return found


def write_graph(model: TransfoXLForCausalLM, path: Path, one_token: bool) -> None:
    """Write the graph of a segment of any length, or of one token, with a memory of any length before it."""
    config, layers = model.config, model.config.n_layer
    # Sizes that differ from one another and from those of the model, as far as that can be: those that are equal here
    # would be one in the graph, and a segment that is as long as the memory is what is remembered.
    memory, length = max(1, config.mem_len - 1), 4 if config.mem_len == 3 else 3
    batch = 5 if memory == 2 else 2
    segment = torch.zeros((batch, 1 if one_token else length), dtype=torch.int64)
    # A tensor for each layer: one that came twice would be one input.
    mems = [torch.zeros((batch, memory, config.d_model)) for _ in range(layers)]
    sizes: tuple = ({0: "batch"} if one_token else {0: "batch", 1: "length"}, [{0: "batch", 1: "memory"}] * layers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = logging.root.manager.disable
        # Of operators that this model has no use for.
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
    # Its type is that of the older exporter, too, which returns nothing.
    assert program is not None
    for states in program.model.graph.outputs[1:]:
        # A memory of one here is any memory to the graph, but what it says of its output would be of one alone.
        states.shape[1] = "new_memory"
    program.save(path)


def share_weights(graphs: Iterable[Path], weights: Path) -> None:
    """Move what graphs in one folder hold of weights to a file beside them, each weight once.

    Args:
        graphs: ONNX files, which are written anew. weights: the file to write.
    """
    places: dict[bytes, tuple[int, int]] = {}
    with weights.open("wb") as file:
        for path in graphs:
            graph = onnx.load(path)
            # Of a graph that was too large to hold them.
            path.with_name(f"{path.name}.data").unlink(missing_ok=True)
            for tensor in graph.graph.initializer:
                content = onnx.numpy_helper.to_array(tensor).tobytes()
                if len(content) < LEAST_SHARED:
                    continue
                digest = hashlib.blake2b(content).digest()
                if digest not in places:
                    file.write(bytes(-file.tell() % PAGE))
                    places[digest] = file.tell(), len(content)
                    file.write(content)
                offset, length = places[digest]
                tensor.raw_data = b""  # where the next line looks
                onnx.external_data_helper.set_external_data(tensor, weights.name, offset=offset, length=length)
                # The values themselves, in whichever of its fields they were.
                for field in ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data"):
                    tensor.ClearField(field)
            path.write_bytes(graph.SerializeToString())


def check_graph(model: TransfoXLForCausalLM, path: Path, sizes: tuple[tuple[int, int], ...]) -> float:
    """Compare a graph with the model, for each batch and length with a memory that is empty, begun and full.

    Returns:
        the largest difference, of states in proportion to the largest one.

    Raises:
        ValueError: a difference is larger than `TOLERANCE`.
    """
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
