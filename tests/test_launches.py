"""What a step asks of a GPU is no more than what is committed: counts, which need no GPU."""

import csv
import importlib.util
import sys
from pathlib import Path

import pytest

# Not by its folder's being on the path: other names there are taken.
path = Path(__file__).parents[1] / "benchmarks" / "launches.py"
spec = importlib.util.spec_from_file_location("launches", path)
launches = sys.modules["launches"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(launches)

COUNTS = ("launches", "gigabytes", "teraflops", "waits")


def committed():
    with launches.OUTPUT.open(newline="") as file:
        return {(row["workload"], row["backend"]): row for row in csv.DictReader(file)}


@pytest.mark.parametrize("backend", launches.BACKENDS)
@pytest.mark.parametrize("name", launches.SMALL_WORKLOADS)
def test_no_count_of_a_small_step_grows(name, backend):
    """Where one falls, write the table anew: python benchmarks/launches.py --output benchmarks/results/launches.csv"""
    found = launches.count(launches.SMALL_WORKLOADS[name], backend)
    before = committed()[name, backend]
    for count in COUNTS:
        assert float(f"{found[count]:.6g}") <= float(before[count]), count


@pytest.mark.slow
@pytest.mark.parametrize("backend", launches.BACKENDS)
@pytest.mark.parametrize("name", launches.WORKLOADS)
def test_no_count_of_a_real_step_grows(name, backend):
    found = launches.count(launches.WORKLOADS[name], backend)
    before = committed()[name, backend]
    for count in COUNTS:
        assert float(f"{found[count]:.6g}") <= float(before[count]), count


@pytest.mark.slow
def test_a_decoded_token_is_one_graph_of_few_kernels():
    """At the size of the base model; the bar is 200."""
    two, three = launches.count_in_one_graph(2), launches.count_in_one_graph(3)
    assert 5 < three - two <= 11
    assert two + (launches.BASE["n_layer"] - 2) * (three - two) <= 193


def test_the_bins_of_a_text_add_up():
    config = launches.TransfoXLConfig(**launches.BASE)
    sizes = launches.sizes_of_bins(config, 49152)
    assert sum(sizes) == 49152 and sizes[0] > sum(sizes[1:]) > 0 == min(0, *sizes)


def test_a_launch_more_is_counted():
    workload = launches.SMALL_WORKLOADS["small-decode"]
    deeper = launches.dataclasses.replace(workload, config=workload.config | {"n_layer": 3})
    assert launches.count(deeper, "auto")["launches"] > launches.count(workload, "auto")["launches"]
