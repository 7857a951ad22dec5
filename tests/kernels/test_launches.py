"""A step launches no more kernels than the committed table says; the counts need no GPU."""

import csv
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

# Not by its folder's being on the path: other names there are taken.
path = Path(__file__).parents[2] / "benchmarks" / "launches.py"
spec = importlib.util.spec_from_file_location("launches", path)
launches = sys.modules["launches"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(launches)

# What was to be reached, so that a table that is written anew cannot hold more.
BARS = {
    ("base-train", "auto"): {"launches": 900, "gigabytes": 110, "waits": 0},
    ("base-train-autocast-compiled", "txl_triton"): {"launches": 900, "gigabytes": 110, "waits": 0},
    ("base-step-compiled", "txl_triton"): {"waits": 0},
    ("base-softmax", "none"): {"launches": 120, "waits": 0},
    ("large-train", "auto"): {"gigabytes": 200, "waits": 0},
    ("large-train-autocast-compiled", "txl_triton"): {"gigabytes": 200, "waits": 0},
    ("large-softmax", "none"): {"launches": 120, "waits": 0},
    ("base-evaluate", "auto"): {"launches": 310, "gigabytes": 3.2, "waits": 0},
    ("large-evaluate", "auto"): {"launches": 400, "gigabytes": 14, "waits": 0},
    ("ptb-step-compiled", "txl_triton"): {"launches": 620, "waits": 0},
    ("ptb-quarter-step-compiled", "txl_triton"): {"launches": 700, "waits": 0},
    ("wt2-step-compiled", "txl_triton"): {"launches": 740, "waits": 0},
    ("base-write", "auto"): {"launches": 310, "waits": 0},
    ("base-write-32", "auto"): {"launches": 310, "waits": 0},
    ("base-decode-static-graph", "eager"): {"launches": 200},
}
REAL = launches.WORKLOADS
QUICK = launches.SMALL_WORKLOADS | {name: REAL[name] for name in ("base-softmax", "large-softmax")}


def cases(workloads):
    return [(name, backend) for name, workload in workloads.items() for backend in workload.backends]


def committed():
    with launches.OUTPUT.open(newline="") as file:
        return {(row["workload"], row["backend"]): row for row in csv.DictReader(file)}


@pytest.mark.parametrize(("case", "bars"), BARS.items(), ids=str)
def test_the_committed_counts_are_within_what_was_to_be_reached(case, bars):
    row = committed()[case]
    for count, most in bars.items():
        assert float(row[count]) <= most, count


def check(name, backend):
    """Where one falls, write the table anew: python benchmarks/launches.py --output benchmarks/results/launches.csv"""
    found = launches.count((REAL | QUICK)[name], backend)
    before = committed()[name, backend]
    assert {count for count in launches.COUNTS if before[count]} == set(found)
    for count in found:
        assert float(f"{found[count]:.6g}") <= float(before[count]), count


@pytest.mark.parametrize(("name", "backend"), cases(QUICK))
def test_no_count_of_a_small_step_grows(name, backend):
    check(name, backend)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "backend"), cases(REAL))
def test_no_count_of_a_real_step_grows(name, backend):
    check(name, backend)


@pytest.mark.slow
def test_a_graph_of_many_texts_has_more_kernels_than_one_of_one_text():
    """The rows of a workload were left out: it was one text that was counted. Six products a layer stay alone."""
    one = replace(QUICK["small-decode-static"], compiled="graph")
    few, more = (launches.count(replace(one, rows=rows), "eager")["launches"] for rows in (1, 32))
    assert 6 * launches.SMALL["n_layer"] < few < more


def test_every_kind_of_call_in_the_code_of_a_graph_is_counted():
    lines = [
        "cpp_fused_add_0 = async_compile.cpp_pybinding(['const float*'], source)",
        "    buf0 = empty_strided_cpu((1, 64), (64, 1), torch.float32)",
        "    extern_kernels.mm(arg0_1, arg1_1, out=buf0)",
        "    buf1 = torch.ops.txl_hf.relative_attention.default(buf0)",
        "    buf2 = aten.sort.stable(buf1)",
        "    cpp_fused_add_0(buf2)",
    ]
    assert launches.calls("\n".join(lines)) == 4


def test_the_bins_of_a_text_add_up():
    config = launches.TransfoXLConfig(**launches.BASE)
    sizes = launches.sizes_of_bins(config, 49152)
    assert sum(sizes) == 49152 and sizes[0] > sum(sizes[1:]) > 0 == min(0, *sizes)


def test_autocast_is_what_cuda_has():
    """The casts of a weight, once; of what enters a product; of what a norm or a sum is computed of."""
    weight, states = torch.empty(3, 4, device="meta", requires_grad=True), torch.empty(2, 4, device="meta")
    with launches.pretending(counter := launches.Counter()), counter:
        with torch.autocast("meta"):
            products = [torch.nn.functional.linear(states, weight) for _ in range(2)]
            norm, total = torch.nn.functional.layer_norm(products[0], (3,)), products[0].sum()
            with torch.autocast("meta", enabled=False):
                assert (states @ weight.t()).dtype == torch.float32
        assert (states @ weight.t()).dtype == torch.float32
        sum(products).sum().backward()
    assert [product.dtype for product in products] == 2 * [torch.bfloat16]
    assert norm.dtype == total.dtype == weight.grad.dtype == torch.float32
    # The weight, the states twice, and the norm's input; backward the gradient of the weight's cast.
    assert counter.by_operator["aten._to_copy.default"] == 5


def test_a_launch_more_is_counted():
    workload = launches.SMALL_WORKLOADS["small-decode"]
    deeper = launches.dataclasses.replace(workload, config=workload.config | {"n_layer": 3})
    assert launches.count(deeper, "auto")["launches"] > launches.count(workload, "auto")["launches"]
