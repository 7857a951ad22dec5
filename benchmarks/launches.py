"""Count, without a GPU, a step's kernel launches, bytes, flops of products and waits of the host.

    python benchmarks/launches.py                 # the table; written to a file with --output results/launches.csv
    python benchmarks/launches.py --note "before heads were padded"     # and kept in results/launches_history.csv
    python benchmarks/launches.py --workloads base-train-autocast-compiled base-decode-static-graph    # only these

The model's own code runs on meta tensors, which have shapes and no numbers and take the paths of a GPU: in bf16
throughout, or, as `autocast` in a name says, in fp32 under autocast to bf16, as with `txl-train`. PyTorch has no
autocast for such tensors, so that `Autocast` stands in for CUDA's. Every operator that PyTorch would launch is seen
(views are not launched); `launches` counts operators, of which PyTorch runs nearly all as one kernel.
`gigabytes` is what the operators other than products read and write if nothing is fused; `teraflops` is what the
products compute.
A kernel of ours counts as one operator, and PyTorch's own attention falls apart into what it is made of. Dropout is
the one kernel that it is on a GPU. How many targets each bin has is a number that the host waits for: it is given, by
Zipf's law, which the words of a text nearly follow, and counted as a wait unless it was asked for before the layers.
Nothing is compiled but where a name says so; the optimiser and the check of ids are left out, and so is what others
put around the model, but in `step`s, as `txl-train` has them on a GPU: under autocast, captured, with the
regularisation, clipping and the optimiser. With cutoffs the host waits once before such a step, for the numbers of
targets, which is not counted. What is done to a list of tensors counts as one launch.

An evaluated segment is read and scored as `evaluate_language_model` does, with the memory as keys and values: the mean
of segments that graphs read, of which some move the memory.

`graph` in a name is a decoded token with a static cache when all of it is one graph: the kernels that Inductor writes
for a CPU, without compiling them, and no other count. For a GPU it may join them otherwise: nobody has seen that yet.

`compiled` in a name is a training step under autocast, layers compiled one by one, as by `txl-train` on a GPU: what is
outside of them as above, and in them the kernels that Inductor writes for a CPU, products and ours, with what these
read and write. The number of rows that is compiled is a prime that no other size has, so that what grows with them is
known.

`tests/kernels/test_launches.py` runs the small sizes and fails where a count grows.
"""

import argparse
import contextlib
import csv
import dataclasses
import functools
import itertools
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._inductor import config as inductor
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import run_and_get_code
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry
from transformers.generation import GenerationConfig, LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

import txl_hf.kernels.attention_triton as kernels
import txl_hf.kernels.operators as linear
import txl_hf.kernels.softmax as adaptive
import txl_hf.transfo_xl.attention_transfo_xl as attention
from txl_hf import TransfoXLConfig, TransfoXLForCausalLM
from txl_hf.evaluation.reading import Reader, Reading, Segment
from txl_hf.kernels import captured
from txl_hf.kernels import steps as captured_steps
from txl_hf.kernels.decoding import Texts
from txl_hf.kernels.static_cache import StaticMemoryCache
from txl_hf.kernels.steps import CapturedSteps, Forward
from txl_hf.kernels.weights import ProductWeights
from txl_hf.memories import memory_of
from txl_hf.training.arguments import TransfoXLTrainingArguments
from txl_hf.training.optimizers import make_optimizer
from txl_hf.training.regularization import LockedDropout, RegularizationArguments, regularize
from txl_hf.transfo_xl.adaptive_transfo_xl import AdaptiveLogSoftmax
from txl_hf.transfo_xl.memory_transfo_xl import Memory, MemoryLengths
from txl_hf.transfo_xl.memory_transfo_xl import Segment as OpenSegment
from txl_hf.transfo_xl.modeling_transfo_xl import TransfoXLLayer
from txl_hf.transfo_xl.positions_transfo_xl import Distances

OUTPUT = Path(__file__).parent / "results" / "launches.csv"
HISTORY = OUTPUT.with_name("launches_history.csv")
BASE = {
    "vocab_size": 267735,
    "cutoffs": [19997, 39997, 199997],
    "div_val": 1,
    "d_model": 512,
    "d_embed": 512,
    "n_head": 8,
    "d_head": 64,
    "d_inner": 2048,
    "n_layer": 16,
    "dropout": 0.1,
    "dropatt": 0.0,
    "clamp_len": -1,
    "same_length": False,
    "initial_memory": "empty",
}
LARGE = BASE | {
    "div_val": 4,
    "d_model": 1024,
    "d_embed": 1024,
    "n_head": 16,
    "d_inner": 4096,
    "n_layer": 18,
    "dropout": 0.2,
    "dropatt": 0.2,
}
PTB = BASE | {
    "vocab_size": 10000,
    "cutoffs": [],
    "d_model": 380,
    "d_embed": 380,
    "n_head": 10,
    "d_head": 38,
    "d_inner": 900,
    "dropout": 0.0,
    "untie_r": False,
    "ext_len": 70,
}
WT2 = PTB | {"vocab_size": 33278, "d_model": 400, "d_embed": 400, "d_head": 40, "ext_len": 0}
WT2 |= {"dropout": 0.2, "dropatt": 0.2}
DROPPED = {"word_dropout": 0.2, "input_dropout": 0.6, "output_dropout": 0.5}
AVERAGED = {"ar": 0.2, "tar": 0.1}
LOCKED = DROPPED | {"attention_dropout": 0.2, "mlp_dropout": 0.2}
SMALL = BASE | {"vocab_size": 5000, "cutoffs": [500, 2000], "d_model": 64, "d_embed": 64, "n_head": 2, "d_head": 32}
SMALL |= {"d_inner": 128, "n_layer": 2, "div_val": 4}


@dataclasses.dataclass
class Workload:
    """A step of `task` on `rows` texts with segments and memories so long.

    The tasks are "train", "evaluate", "decode", "decode_static" with a cache that never moves, "write", which is a
    token of `generate` by a graph of ours, with the draw of the next, and "softmax", the part of a training step that
    the losses and their gradients are, and "step", all that a step of `txl-train` is. The model is in bf16, or in fp32
    with `autocast`.
    `compiled` may be "layers", each by itself, or "graph", all of a decoded token in fp32. `optimizer` is that of a
    "step", by the name that `txl-train` has for it.
    """

    task: str
    config: dict
    rows: int
    segment: int
    memory: int
    autocast: bool = False
    compiled: str = ""
    regularized: dict = dataclasses.field(default_factory=dict)
    optimizer: str = "adam"

    @property
    def backends(self) -> list[str]:
        """Of attention, which the softmax alone has none of; in a graph of fp32 what "auto" is there for one query."""
        if self.task == "softmax":
            return ["none"]
        return {"": BACKENDS, "layers": ["txl_triton"], "graph": ["eager"]}[self.compiled]


WORKLOADS = {
    "base-train": Workload("train", BASE, 256, 192, 192),
    "base-train-autocast": Workload("train", BASE, 256, 192, 192, autocast=True),
    "base-train-autocast-compiled": Workload("train", BASE, 256, 192, 192, autocast=True, compiled="layers"),
    "base-step-compiled": Workload("step", BASE, 256, 192, 192, True, "layers"),
    "base-softmax": Workload("softmax", BASE, 256, 192, 0),
    "large-train": Workload("train", LARGE, 128, 384, 384),
    "large-train-autocast": Workload("train", LARGE, 128, 384, 384, autocast=True),
    "large-train-autocast-compiled": Workload("train", LARGE, 128, 384, 384, autocast=True, compiled="layers"),
    "large-softmax": Workload("softmax", LARGE, 128, 384, 0),
    "ptb-step": Workload("step", PTB, 10, 140, 0, True, "", LOCKED | AVERAGED),
    "ptb-step-compiled": Workload("step", PTB, 10, 140, 0, True, "layers", LOCKED | AVERAGED),
    "ptb-quarter-step-compiled": Workload("step", PTB, 40, 140, 0, True, "layers", LOCKED | AVERAGED, "muon"),
    "wt2-step": Workload("step", WT2, 32, 150, 150, True, "", DROPPED),
    "wt2-step-compiled": Workload("step", WT2, 32, 150, 150, True, "layers", DROPPED),
    "base-evaluate": Workload("evaluate", BASE, 32, 64, 640),
    "base-evaluate-long": Workload("evaluate", BASE, 1, 1024, 640),
    "large-evaluate": Workload("evaluate", LARGE, 32, 128, 1600),
    "base-decode": Workload("decode", BASE, 1, 1, 640),
    "base-decode-32": Workload("decode", BASE, 32, 1, 640),
    "base-decode-static": Workload("decode_static", BASE, 1, 1, 640),
    "base-write": Workload("write", BASE, 1, 1, 640),
    "base-write-32": Workload("write", BASE, 32, 1, 640),
    "base-decode-static-graph": Workload("decode_static", BASE, 1, 1, 640, compiled="graph"),
    "base-decode-static-graph-32": Workload("decode_static", BASE, 32, 1, 640, compiled="graph"),
}
SMALL_WORKLOADS = {
    "small-train": Workload("train", SMALL, 4, 32, 32),
    "small-train-autocast": Workload("train", SMALL, 4, 32, 32, autocast=True),
    "small-step": Workload("step", SMALL | {"cutoffs": [], "d_head": 24}, 4, 32, 32, True, "", LOCKED),
    "small-step-compiled": Workload("step", SMALL | {"cutoffs": [], "d_head": 24}, 4, 32, 32, True, "layers", LOCKED),
    "small-step-bins": Workload("step", SMALL, 4, 32, 32, True, "", LOCKED),
    "small-softmax": Workload("softmax", SMALL, 4, 32, 0),
    "small-evaluate": Workload("evaluate", SMALL, 2, 16, 64),
    "small-decode": Workload("decode", SMALL, 1, 1, 64),
    "small-decode-static": Workload("decode_static", SMALL, 1, 1, 64),
    "small-write": Workload("write", SMALL, 1, 1, 64),
}
# The default, which is "txl_triton" on a GPU that has it, and what others take.
BACKENDS = ["auto", "sdpa"]
COUNTS = ("launches", "gigabytes", "teraflops", "waits")


class Counter(TorchDispatchMode):
    """Counts what is launched while it is on."""

    def __init__(self):
        super().__init__()
        self.launches, self.bytes, self.flops, self.waits = 0, 0, 0, 0
        self.by_operator: dict[str, int] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if self._launches(function):
            self.launches += 1
            name = str(function)
            self.by_operator[name] = self.by_operator.get(name, 0) + 1
            packet = getattr(function, "overloadpacket", None)
            if packet in flop_registry:
                self.flops += flop_registry[packet](*args, **(kwargs or {}), out_val=result)
            else:
                tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
                self.bytes += sum(x.numel() * x.element_size() for x in tensors)
        return result

    @staticmethod
    def _launches(function) -> bool:
        names_only = ("aten.detach", "aten.empty", "aten.new_empty", "aten.lift", "aten.alias", "prim.")
        # Nothing of these reaches the device either; the schema does not say that the one is a view.
        names_only += ("aten._unsafe_view", "aten.promote_types", "profiler.")
        if str(function).startswith(names_only):
            return False
        returns = function._schema.returns
        is_view = returns and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        return not is_view


class Autocast(TorchFunctionMode):
    """CUDA's autocast to bf16, for tensors without numbers: what `torch.autocast` is while this is on.

    The lists are those that PyTorch's own is compiled from, and the cast of a weight is kept as there. It sees what
    Python calls, and not what one operator calls of another.
    """

    def __init__(self):
        super().__init__()
        header = (Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h").read_text()
        self.narrow, self.wide, self.summed, self.promoted = (
            set(re.findall(r"_\((\w+)", re.search(rf"#define {name}\(_\)(.*\\\n)*", header)[0]))
            for name in (
                "AT_FORALL_LOWER_PRECISION_FP",
                "AT_FORALL_FP32",
                "AT_FORALL_FP32_SET_OPT_DTYPE",
                "AT_FORALL_PROMOTE",
            )
        )
        self.enabled, self.casts = False, {}

    @contextlib.contextmanager
    def switched(self, device_type, dtype=torch.bfloat16, enabled=True, cache_enabled=True):
        before, self.enabled = self.enabled, enabled
        try:
            yield
        finally:
            self.enabled = before
            if not before:
                self.casts = {}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "").removeprefix("__r").strip("_")
        if not self.enabled:
            return function(*args, **kwargs)
        floats = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.is_floating_point()]
        if name in self.narrow:
            args, kwargs = tree_map(lambda x: self.cast(x, torch.bfloat16), (args, kwargs))
        elif name in self.wide or name in self.promoted and any(x.dtype == torch.float32 for x in floats):
            args, kwargs = tree_map(lambda x: self.cast(x, torch.float32), (args, kwargs))
        elif name in self.summed and floats and kwargs.get("dtype") is None:
            kwargs = kwargs | {"dtype": torch.float32}
        return function(*args, **kwargs)

    def cast(self, x, dtype: torch.dtype):
        if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.dtype == dtype:
            return x
        if not (x.is_leaf and x.requires_grad and dtype == torch.bfloat16) or x._is_view():
            return x.to(dtype)
        if x not in self.casts:
            self.casts[x] = x.to(dtype)
        return self.casts[x]


def sizes_of_bins(config: TransfoXLConfig, targets: int) -> list[int]:
    """How many of so many targets fall into each bin by Zipf's law, the k-th word having a share of 1/k."""
    ends = [1, *(cutoff + 1 for cutoff in config.cutoffs), config.vocab_size + 1]
    logs = [math.log(end) for end in ends]
    sizes = [int((end - start) / logs[-1] * targets) for start, end in itertools.pairwise(logs)]
    return [targets - sum(sizes[1:]), *sizes[1:]]


class Losses(torch.autograd.Function):
    """The softmax operator's forward and backward, for tensors without data."""

    @staticmethod
    def forward(ctx, *inputs):
        weight, bias, bins, *rest = inputs
        hidden, (targets, head_targets, clusters, order, ends, *constants, vocab_size, _) = rest[:bins], rest[bins:]
        tensors = (weight, bias, list(hidden), targets, head_targets, clusters, order, ends)
        ctx.table = adaptive._Table(*tensors, *constants)
        losses, *ctx.kept = adaptive._compute_losses(ctx.table, vocab_size, True)
        return losses

    @staticmethod
    def backward(ctx, gradient):
        grads = adaptive._compute_gradients(ctx.table, *ctx.kept, gradient, [True, True])
        weight, bias, clusters, hidden = grads
        clusters = None if ctx.table.clusters is None else clusters
        return weight, bias, None, *hidden, None, None, clusters, *(None,) * 8


def losses_of_bins(weight, bias, hidden_states, *rest):
    return (Losses.apply(weight, bias, len(hidden_states), *hidden_states, *rest),)


@contextlib.contextmanager
def pretending(counter: Counter):
    """The paths that a GPU takes, for tensors that have no numbers."""

    blockwise = adaptive.nll

    def nll(softmax, hidden_states, targets, by_bin=None):
        # The first table that asks waits.
        counter.waits += by_bin is None
        sizes = sizes_of_bins(softmax.config, targets.numel())
        ends = torch.tensor([0, 0, *itertools.accumulate(sizes, initial=0)], device="cpu")
        by_bin = by_bin or softmax.sort_targets(targets)
        by_bin = by_bin if by_bin.capacities is not None else by_bin._replace(ends=ends)
        return blockwise(softmax, hidden_states, targets, by_bin)

    def capacities_of_bins(config, targets):
        if not config.cutoffs:
            return None
        return tuple(map(adaptive.capacity_of, sizes_of_bins(config, targets.numel())[1:]))

    autocast = Autocast()

    def dropout(states, p=0.5, training=True, inplace=False):
        return torch.native_dropout(states, p, training)[0] if training and p else states

    with (
        mock.patch.object(AdaptiveLogSoftmax, "nll", nll),
        mock.patch.object(AdaptiveLogSoftmax, "sort_targets", adaptive.sort_targets),
        mock.patch.object(adaptive, "losses_of_bins", losses_of_bins),
        mock.patch.object(captured_steps, "capacities_of_bins", capacities_of_bins),
        mock.patch.object(adaptive, "fuses", lambda states: True),
        mock.patch.object(torch.nn.functional, "dropout", dropout),
        mock.patch.object(kernels, "why_not_triton", lambda query: None),
        mock.patch.object(kernels, "is_default", lambda query: attention.working_dtype(query) == torch.bfloat16),
        mock.patch.object(torch, "autocast", autocast.switched),
        mock.patch.object(torch, "is_autocast_enabled", lambda *args: autocast.enabled),
        mock.patch.object(torch, "get_autocast_dtype", lambda *args: torch.bfloat16),
        mock.patch.object(attention, "WITHOUT_AUTOCAST", ()),
        mock.patch("torch.nn.utils.clip_grad._device_has_foreach_support", lambda device: True),
        mock.patch("torch.optim.optimizer._get_fused_kernels_supported_devices", lambda: ["cuda", "meta"]),
        mock.patch.dict(captured.RECORDERS, {"meta": lambda step, *args, **given: step}),
        autocast,
    ):
        yield


def count(workload: Workload, backend: str) -> dict[str, float]:
    """The counts of one step, after one that made the memory; of one graph its launches alone."""
    if workload.compiled == "graph":
        return {"launches": count_in_one_graph(workload, backend)}
    if workload.compiled == "layers":
        return count_with_compiled_layers(workload, backend)
    counter = Counter()
    config = TransfoXLConfig(**workload.config, mem_len=workload.memory, tgt_len=workload.segment)
    with torch.device("meta"), pretending(counter):
        if workload.task == "softmax":
            step = prepare_softmax(config, workload)
        else:
            config._attn_implementation = backend
            step = prepare(config, workload)
        counter.waits, steps = 0, captured.MOST_GRAPHS if workload.task == "evaluate" else 1
        with counter:
            for _ in range(steps):
                step()
    return {
        "launches": counter.launches / steps,
        "gigabytes": counter.bytes / 1e9 / steps,
        "teraflops": counter.flops / 1e12 / steps,
        "waits": counter.waits / steps,
    }


def prepare(config: TransfoXLConfig, workload: Workload) -> Callable[[], None]:
    """The step of a model that has its memory."""
    model = TransfoXLForCausalLM(config).to(torch.float32 if workload.autocast else torch.bfloat16)
    is_trained = workload.task in ("train", "step")
    model.train(is_trained)
    ids = torch.zeros(workload.rows, workload.segment, dtype=torch.long)
    before = torch.zeros(workload.rows, workload.memory, dtype=torch.long)
    if workload.task == "evaluate":
        reader = Reader(model, Reading(workload.segment))
        with torch.no_grad():
            reader.read(segment_of(before))
            for _ in range(captured.SEGMENTS_BEFORE + captured.MOST_GRAPHS + 1):
                reader.read(segment_of(ids))
        assert reader.alike.is_captured, "no graph was captured"
        # So that the mean of as many segments counts each graph equally often.
        assert captured.MOST_GRAPHS % min(captured.MOST_GRAPHS, -(-workload.memory // workload.segment)) == 0
        return functools.partial(evaluate, reader, segment_of(ids))
    with torch.no_grad(), torch.autocast("meta", enabled=workload.autocast):
        cache = StaticMemoryCache(config) if workload.task in ("decode_static", "write") else None
        past = model(before, past_key_values=cache, use_cache=not is_trained) if workload.memory else None
    if workload.task == "write":
        return functools.partial(write, texts_of(model, cache, before))
    if workload.task == "step":
        return prepare_step(model, ids, past, workload)
    if workload.task == "train":
        return functools.partial(train, model, ids, past, workload.autocast)
    return functools.partial(decode, model, ids, past)


def prepare_step(model: TransfoXLForCausalLM, ids: torch.Tensor, past: Any, workload: Workload) -> Callable[[], None]:
    """A step behind those that were captured."""
    regularizer = regularize(model, RegularizationArguments(**workload.regularized))
    forward = Forward(model, functools.partial(torch.autocast, "meta", torch.bfloat16), regularizer)
    steps = CapturedSteps(forward, 0, torch.bfloat16)
    optimizer = make_optimizer(model, TransfoXLTrainingArguments(optimizer=workload.optimizer, use_cpu=True))
    inputs, memory = {"input_ids": ids, "shift_labels": ids}, memory_of(past) if past else {}

    def step():
        nll, penalty, _ = steps(inputs, memory)
        (nll / ids.numel() + penalty).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25, foreach=True)
        optimizer.step()
        optimizer.zero_grad()

    step()
    assert steps.graphs, "the step was not captured"
    return step


def texts_of(model: TransfoXLForCausalLM, cache: StaticMemoryCache, before: torch.Tensor) -> Texts:
    """Texts that go on from `before`, drawn from the best tokens until one that ends them."""
    settings = GenerationConfig(do_sample=True)
    settings._eos_token_tensor, settings._pad_token_tensor = torch.zeros(1, dtype=torch.long), torch.tensor(0)
    processors = LogitsProcessorList([TemperatureLogitsWarper(0.9), TopKLogitsWarper(50)])
    return Texts(model.eval(), cache, before, processors, settings, before.shape[1] + 100)


def segment_of(ids: torch.Tensor) -> Segment:
    """All of whose targets are scored."""
    return Segment(0, ids, ids, ids, None, ids.numel(), ids.numel())


def prepare_softmax(config: TransfoXLConfig, workload: Workload) -> Callable[[], None]:
    """Targets sorted as before the layers, their mean loss and the gradients of all that it comes from."""
    softmax, tokens = AdaptiveLogSoftmax(config).bfloat16(), workload.rows * workload.segment
    states = torch.empty(tokens, config.d_model, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(tokens, dtype=torch.long)

    def step():
        by_bin = softmax.sort_targets(targets)
        softmax(states, targets, by_bin=by_bin).mean().backward()

    return step


def train(model, ids, past, autocast):
    with torch.autocast("meta", enabled=autocast):
        loss = model(ids, mems=past.mems, shift_labels=ids).loss
    loss.backward()


@torch.no_grad()
def evaluate(reader, segment):
    reader.read_and_score([segment], segment.targets)


@torch.no_grad()
def decode(model, ids, past):
    model(ids, past_key_values=past.past_key_values, use_cache=True, logits_to_keep=1)


@torch.no_grad()
def write(texts):
    texts.draw()
    texts.step()


def calls(code: str) -> int:
    """The kernels and operators that code of Inductor's calls."""
    return len(re.findall(r"^ +(?:\w+ = )?(?:extern_kernels|cpp_fused|torch\.ops|aten)[\w.]*\(", code, re.MULTILINE))


def count_in_one_graph(workload: Workload, backend: str) -> int:
    """The kernels and products that Inductor calls for a decoded token, in fp32."""
    config = TransfoXLConfig(**workload.config, mem_len=workload.memory, tgt_len=1)
    config._attn_implementation = backend
    model, cache = TransfoXLForCausalLM(config).eval(), StaticMemoryCache(config)
    options = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
    rows = workload.rows
    torch._dynamo.reset()
    nothing = mock.patch.object(AsyncCompile, "cpp_pybinding", lambda *args, **kwargs: lambda *arguments: None)
    with torch.no_grad(), nothing, inductor.patch(fx_graph_cache=False, cpp_wrapper=False):
        model(torch.zeros(rows, workload.memory, dtype=torch.long), **options)
        mask = torch.ones(rows, workload.memory + 1, dtype=torch.bool)
        token = torch.zeros(rows, 1, dtype=torch.long)
        _, [code] = run_and_get_code(
            torch.compile(model.forward, fullgraph=True), token, attention_mask=mask, **options
        )
    return calls(code)


# Rows of a layer that is compiled: the first that its lengths are no multiples of.
PRIMES = (7, 11)


def layer_of(workload: Workload, backend: str, rows: int, **options) -> Callable[[], None]:
    """One layer of the model in training, forward and backward: what is compiled by itself."""
    config = TransfoXLConfig(**workload.config, mem_len=workload.memory, tgt_len=workload.segment)
    config._attn_implementation = backend
    layer = TransfoXLLayer(config, 0)
    locked = {}
    for part, name in ((layer.self_attn, "attention_dropout"), (layer.mlp, "mlp_dropout")):
        if rate := workload.regularized.get(name):
            part.dropout = LockedDropout(rate)
            widths = [config.d_model] if part is layer.self_attn else [config.d_inner, config.d_model]
            # As `Regularizer` draws those of all layers.
            locked[part.dropout] = torch.empty(rows, 1, sum(widths)).split(widths, dim=-1)
    if workload.task == "step":
        leaves = ProductWeights(dict(layer.named_parameters()), config, torch.bfloat16).leaves()
        for name, leaf in leaves.items():
            owner, _, last = name.rpartition(".")
            layer.get_submodule(owner).register_parameter(last, leaf)
    layer.train()
    if options:
        layer.compile(**options)
    shape, keys = (rows, workload.segment, config.d_model), workload.memory + workload.segment
    hidden = torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)
    memory = None
    if workload.memory:
        memory = torch.empty(rows, workload.memory, config.d_model, dtype=torch.bfloat16)
    distances, gradient = Distances(torch.empty(keys, config.d_model, dtype=torch.bfloat16)), torch.empty_like(hidden)
    segment = OpenSegment(
        *(MemoryLengths(), workload.segment, keys, Memory((), workload.memory, None, False, None, False)),
        *(None, None, None, None, None, None),
        implementation=backend,
        attention={},
    )

    def step():
        for dropout, masks in locked.items():
            dropout.masks = masks
        with torch.autocast(hidden.device.type, torch.bfloat16):
            outputs = layer(hidden, memory, distances=distances, segment=segment, state=None)
        torch.autograd.grad(outputs, [hidden, *layer.parameters()], gradient)

    return step


def count_compiled_layer(workload: Workload, backend: str) -> dict[str, float]:
    """The launches and gigabytes of a layer as Inductor compiles it."""
    read_and_written, lengths = 0, (workload.segment, workload.memory + workload.segment)
    prime = next(prime for prime in PRIMES if all(length % prime for length in lengths))

    def add(*tensors):
        nonlocal read_and_written
        for tensor in tensors:
            size = tensor.numel() * tensor.element_size()
            read_and_written += size * workload.rows // prime if tensor.numel() % prime == 0 else size

    def fused(compiler, types, source, *args):
        """In the place of a kernel: what it is called with, and twice what it changes."""
        names = re.findall(r"\w+_ptr\d+(?=[,)])", re.search(r"void\s+\w+\([^)]*\)", source)[0])
        return lambda *given: add(
            *(tensor for name, tensor in zip(names, given, strict=False) for _ in range(1 + name.startswith("in_out")))
        )

    def ours(operator):
        """In the place of an operator of ours: as it is traced."""

        def kernel(*inputs):
            results = operator._abstract_fn(*inputs)
            add(*(x for x in tree_leaves((inputs, results)) if isinstance(x, torch.Tensor)))
            return results

        return kernel

    operators = (kernels.relative_attention_op, kernels.relative_attention_backward_op, kernels.dropout_bits_op)
    patches = (
        *(mock.patch.dict(operator._backend_fns, {None: ours(operator)}) for operator in operators),
        mock.patch.object(AsyncCompile, "cpp_pybinding", fused),
        mock.patch.object(linear, "_multiplies_batches", lambda rows: True),
        mock.patch.object(kernels, "why_not_triton", lambda query: None),
        inductor.patch(fx_graph_cache=False, cpp_wrapper=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    )
    step = layer_of(workload, backend, prime, fullgraph=True)
    torch._dynamo.reset()
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        _, codes = run_and_get_code(step)
    return {"launches": sum(map(calls, codes)), "gigabytes": read_and_written / 1e9}


def count_with_compiled_layers(workload: Workload, backend: str) -> dict[str, float]:
    """`count` of the step, with the layers' launches and gigabytes replaced by those of compiled ones."""
    whole, counter = count(dataclasses.replace(workload, compiled=""), backend), Counter()
    with torch.device("meta"), pretending(counter):
        step = layer_of(workload, backend, workload.rows)
        with counter:
            step()
    eager = {"launches": counter.launches, "gigabytes": counter.bytes / 1e9}
    compiled, layers = count_compiled_layer(workload, backend), workload.config["n_layer"]
    return whole | {name: whole[name] + layers * (compiled[name] - eager[name]) for name in eager}


def rows(workloads: dict[str, Workload]) -> list[dict[str, str]]:
    found = []
    for name, workload in workloads.items():
        for backend in workload.backends:
            counts = count(workload, backend)
            shown = {key: f"{counts[key]:.6g}" if key in counts else "" for key in COUNTS}
            found.append({"workload": name, "backend": backend, **shown})
            print(*found[-1].values(), flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="a csv file to write instead of printing alone")
    parser.add_argument("--note", help="what the sources are, for the rows of large workloads in the history")
    known = WORKLOADS | SMALL_WORKLOADS
    parser.add_argument(
        "--workloads", nargs="+", choices=known, default=list(known), metavar="NAME", help="only these"
    )
    arguments = parser.parse_args()
    if arguments.output and {*arguments.workloads} != known.keys():
        parser.error("--output is the table of all workloads: leave out --workloads")
    found = rows({name: known[name] for name in arguments.workloads})
    if arguments.output:
        with arguments.output.open("w", newline="") as file:
            writer = csv.DictWriter(file, found[0])
            writer.writeheader()
            writer.writerows(found)
    if arguments.note:
        with HISTORY.open("a", newline="") as file:
            writer = csv.DictWriter(file, ["note", *found[0]])
            writer.writerows({"note": arguments.note, **row} for row in found if row["workload"] in WORKLOADS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
