"""A model that is spread over two GPUs, as accelerate's device maps do it: which tensor is where.

Tensors are fake ones of GPUs that need not be there: they have a device, a shape and no numbers, and refuse to be
combined with those of another device.
"""

import contextlib

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from txl_hf import RegularizationArguments, TransfoXLForTokenClassification, regularize
from txl_hf.memories import mask_overflow

pytestmark = pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="not even fake tensors are on GPUs to a build of PyTorch without them"
)

FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")


class Recorded:
    """An event that is recorded on no stream, so that nothing waits for it."""

    def record(self, stream=None):
        pass

    def synchronize(self):
        pass


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "Event", Recorded)
    with FakeTensorMode():
        yield


def spread(model: nn.Module, *second: nn.Module) -> nn.Module:
    """The model with some of its modules on the second GPU; what calls it has its tensors on the first."""
    skipped = model._skip_keys_device_placement
    for module, device in [(model, FIRST), *((module, SECOND) for module in second)]:
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    part._parameters[name] = nn.Parameter(torch.empty_like(parameter, device=device))
            for name, buffer in part._buffers.items():
                part._buffers[name] = torch.empty_like(buffer, device=device)
    parts = [*model.transformer.layers, *model.transformer.children(), *model.children()]
    for module in parts:
        if module in (model.transformer, model.transformer.layers):
            continue
        device = SECOND if module in second else FIRST
        add_hook_to_module(module, AlignDevicesHook(device, skip_keys=skipped), append=True)
    add_hook_to_module(model, AlignDevicesHook(FIRST, io_same_device=True, skip_keys=skipped), append=True)
    return model


@pytest.mark.parametrize("label", ["labels", "shift_labels"])
@pytest.mark.parametrize("items", ["counted", "given"])
@pytest.mark.parametrize("output_logits", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_losses(make_model, label, items, output_logits, masked):
    model = make_model(tie_word_embeddings=False, tie_projs=[False] * 3).train()
    spread(model, model.transformer.layers[1], model.transformer.output_dropout, model.lm_head)
    ids, memory = torch.zeros(2, 6, dtype=torch.long, device=FIRST), {}
    options = {"attention_mask": torch.ones_like(ids)} if masked else {}
    options |= {"num_items_in_batch": torch.zeros((), dtype=torch.long, device=FIRST)} if items == "given" else {}
    for _ in range(3):
        outputs = model(ids, output_logits=output_logits, **{label: ids}, **options, **memory)
        assert outputs.loss.device == FIRST
        memory = {"mems": outputs.mems, "mems_mask": outputs.mems_mask}


def test_losses_of_a_label_for_every_token(make_model):
    model = make_model(model_class=TransfoXLForTokenClassification, num_labels=3).train()
    spread(model, model.transformer.layers[1], model.transformer.output_dropout, model.score)
    ids = torch.zeros(2, 6, dtype=torch.long, device=FIRST)
    for options in ({}, {"num_items_in_batch": torch.zeros((), dtype=torch.long, device=FIRST)}):
        assert model(ids, labels=ids, **options).loss.device == FIRST


def test_what_regularises_and_what_overflows(make_model):
    model = make_model().train()
    regularizer = regularize(model, RegularizationArguments(ar=1.0, tar=1.0, output_dropout=0.1))
    spread(model, model.transformer.layers[1], model.transformer.output_dropout)
    ids = torch.zeros(2, 6, dtype=torch.long, device=FIRST)
    outputs = model(ids, shift_labels=ids)
    resets = torch.zeros(2, 6, dtype=torch.bool, device=FIRST)
    assert regularizer.penalty(ids, resets).device == SECOND
    mems = (outputs.mems[0].to(FIRST), outputs.mems[1].to(SECOND))
    with contextlib.suppress(torch._subclasses.fake_tensor.DataDependentOutputException):
        # Whether anything overflowed, a fake tensor cannot say.
        mask_overflow(mems)
    mask = torch.ones(2, mems[0].shape[1], dtype=torch.bool, device=FIRST)
    assert mask_overflow(mems, mask).device == FIRST
