"""Fields that follow others, and names that are no fields."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from txl_hf import TransfoXLConfig, TransfoXLForCausalLM

PUBLISHED = {"cutoffs": [20, 40, 50], "vocab_size": 60, "tie_projs": [False, True, True, True], "div_val": 2}


@pytest.fixture
def published(make_config, tmp_path):
    make_config(**PUBLISHED).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "tie_projs"),
    [
        ({"vocab_size": 50, "cutoffs": []}, [False]),
        ({"cutoffs": [], "vocab_size": 50}, [False]),
        ({"cutoffs": [10], "tie_projs": None}, [False, True]),
        ({"tie_projs": None}, [False, True, True, True]),
        ({"proj_share_all_but_first": False}, [False] * 4),
        ({"vocab_size": 0}, []),
        ({"cutoffs": [5], "tie_projs": [True, True]}, [True, True]),
    ],
)
def test_tie_projs_follows_the_fields_that_it_was_made_from(published, changes, tie_projs):
    """At load, by assignment, and by an update as run_clm makes it."""
    config = AutoConfig.from_pretrained(published, **changes)
    assert config.tie_projs == tie_projs
    assigned, updated = AutoConfig.from_pretrained(published), AutoConfig.from_pretrained(published)
    for name, value in changes.items():
        setattr(assigned, name, value)
    updated.update(changes)
    for changed in (assigned, updated):
        assert changed.tie_projs == tie_projs
        if changed.vocab_size:
            assert len(AutoModelForCausalLM.from_config(changed).lm_head.out_projs) == len(tie_projs)


def test_the_published_configuration_with_a_vocabulary_of_ones_own(published):
    config = AutoConfig.from_pretrained(published, vocab_size=50, cutoffs=[])
    model = TransfoXLForCausalLM(config)
    model.save_pretrained(published / "again")
    again = TransfoXLForCausalLM.from_pretrained(published / "again").eval()
    ids = torch.arange(8)[None]
    torch.testing.assert_close(again(ids).logits, model.eval()(ids).logits)


def test_tie_projs_of_ones_own_stays(make_config):
    config = make_config(**PUBLISHED | {"tie_projs": [True, False, True, True]})
    config.cutoffs = [9]
    assert config.tie_projs == [True, False, True, True]
    with pytest.raises(ValueError, match="tie_projs=.*must have one entry for each of the 2 bins"):
        TransfoXLForCausalLM(config)
    assert make_config(**PUBLISHED | {"tie_projs": [True]}).tie_projs == [True, False, False, False]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("n_layers", "n_layer"),
        ("mem_length", "mem_len"),
        ("n_heads", "n_head"),
        ("vocab_size_or_config_json_file", "vocab_size"),
    ],
)
def test_a_misspelt_field_is_warned_of(make_config, monkeypatch, name, meant):
    warnings = []
    logger = logging.get_logger("txl_hf.transfo_xl.configuration_transfo_xl")
    monkeypatch.setattr(logger, "warning", warnings.append)
    assert getattr(make_config(**{name: 3}), name) == 3
    assert warnings == [f"TransfoXLConfig has no field {name}, which changes nothing: did you mean {meant}?"]


def test_what_transformers_reads_is_not_warned_of(make_config, monkeypatch):
    logger = logging.get_logger("txl_hf.transfo_xl.configuration_transfo_xl")
    monkeypatch.setattr(logger, "warning", pytest.fail)
    make_config(
        max_length=20, min_length=2, forced_eos_token_id=1, task_specific_params={}, n_token=60, tie_weight=True
    )
    TransfoXLConfig.from_dict(make_config(num_labels=3, architectures=["TransfoXLLMHeadModel"]).to_dict())
