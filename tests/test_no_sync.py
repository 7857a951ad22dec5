"""On a GPU the host runs ahead: nothing waits for a number but the sizes of the bins, once for all of them."""

import warnings

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture
def count_waits():
    """A function that runs another one and says how often the host waited for the GPU."""

    def count(function) -> int:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                function()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return sum("synchronizing" in str(warning.message) for warning in caught)

    return count


@pytest.mark.parametrize("changes", [{}, {"div_val": 1}, {"cutoffs": [], "div_val": 1}], ids=str)
def test_a_training_step_waits_for_the_sizes_of_the_bins_only(make_model, make_ids, count_waits, changes):
    model = make_model(**changes).cuda().train()
    ids = make_ids(2, 8).cuda()
    mems = model(ids).mems

    def step():
        model(ids, mems=mems, labels=ids).loss.backward()

    step()
    assert count_waits(step) == (1 if model.config.cutoffs else 0)


@torch.no_grad()
def test_a_decoding_step_waits_for_nothing(make_model, make_ids, count_waits):
    model = make_model().cuda()
    ids = make_ids(2, 8).cuda()
    cache = model(ids, use_cache=True).past_key_values

    def step():
        model(ids[:, :1], past_key_values=cache, use_cache=True, logits_top_k=1)

    step()
    assert count_waits(step) == 0
