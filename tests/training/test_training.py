"""Losses and labels; plain Trainer; checkpointing, compilation and export."""

import copy
import functools
import itertools

import pytest
import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
from safetensors.torch import load_file, load_model, save_model
from torch.autograd import forward_ad
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments

import launcher
from txl_hf import (
    TransfoXLForCausalLM,
    TransfoXLForSequenceClassification,
    TransfoXLModel,
    TransfoXLPreTrainedModel,
)
from txl_hf.transfo_xl.positions_transfo_xl import is_exporting

# --- losses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"cutoffs": [], "div_val": 1}], ids=["cutoffs", "no-cutoffs"])
def test_labels_shift_inside_and_shift_labels_do_not(make_model, make_ids, changes):
    """Quirks 13 and 14: in target order, and no boundary token is lost between segments."""
    model = make_model(**changes)
    stream = make_ids(2, 9)
    ids, targets = stream[:, :-1], stream[:, 1:]
    log_probs = model(ids).logits
    expected = -log_probs.gather(-1, targets[..., None])[..., 0]
    aligned = model(ids, shift_labels=targets)
    torch.testing.assert_close(aligned.losses, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(aligned.loss, expected.mean(), atol=1e-5, rtol=1e-5)
    shifted = model(ids, labels=ids)
    torch.testing.assert_close(shifted.losses, expected[:, :-1], atol=1e-5, rtol=1e-5)
    halves = [model(ids[:, :4], shift_labels=targets[:, :4])]
    halves.append(model(ids[:, 4:], mems=halves[0].mems, shift_labels=targets[:, 4:]))
    torch.testing.assert_close(torch.cat([half.losses for half in halves], 1), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("changes", [{}, {"cutoffs": [], "div_val": 1}], ids=["cutoffs", "no-cutoffs"])
def test_gradients_of_each_row_by_vmap(make_model, make_ids, changes):
    model = make_model(**changes)
    ids = make_ids(3, 6)
    parameters = dict(model.named_parameters())

    def loss_of_row(parameters, row):
        inputs = {"labels": row[None], "output_logits": True}
        return torch.func.functional_call(model, parameters, row[None], inputs).loss

    found = torch.func.vmap(torch.func.grad(loss_of_row), in_dims=(None, 0))(parameters, ids)
    for i in range(3):
        expected = torch.autograd.grad(loss_of_row(parameters, ids[i]), parameters.values())
        for gradient, right in zip(found.values(), expected, strict=True):
            torch.testing.assert_close(gradient[i], right, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("changes", [{}, {"attn_type": 2, "mem_len": 0}], ids=["relative", "absolute"])
def test_derivatives_forward(make_model, make_ids, changes):
    """Of the eager attention: PyTorch's fused one has none."""
    model, ids = make_model("eager", **changes).double(), make_ids(2, 6)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    torch.manual_seed(0)
    direction = {name: torch.randn_like(parameter) for name, parameter in parameters.items()}

    def loss_of(parameters):
        return torch.func.functional_call(model, parameters, (ids,), {"labels": ids, "output_logits": True}).loss

    _, found = torch.func.jvp(loss_of, (parameters,), (direction,))
    gradients = torch.func.grad(loss_of)(parameters)
    torch.testing.assert_close(found, sum((gradients[name] * direction[name]).sum() for name in parameters))


def test_the_loss_of_a_model_with_cutoffs_has_tangents(make_model, make_ids):
    """They were 0: an operator without them loses them in silence."""
    model, ids = make_model("eager").double(), make_ids(2, 6)
    assert model.config.cutoffs and not model.config.output_logits
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    torch.manual_seed(0)
    direction = {name: torch.randn_like(parameter) for name, parameter in parameters.items()}
    mems = model(ids).mems

    def loss_of(parameters, mems=mems, **more):
        return torch.func.functional_call(model, parameters, (ids,), {"labels": ids, "mems": mems, **more}).loss

    _, found = torch.func.jvp(loss_of, (parameters,), (direction,))
    _, expected = torch.func.jvp(functools.partial(loss_of, output_logits=True), (parameters,), (direction,))
    torch.testing.assert_close(found, expected)
    assert found.abs() > 1e-3
    gradients = torch.func.grad(loss_of)(parameters)
    torch.testing.assert_close(found, sum((gradients[name] * direction[name]).sum() for name in parameters))
    # Of the memory alone, beside weights that are trained and have no tangent.
    towards = tuple(map(torch.randn_like, mems))
    _, found = torch.func.jvp(lambda *mems: model(ids, labels=ids, mems=mems).loss, mems, towards)
    step = 1e-6
    ahead, behind = (
        loss_of(parameters, tuple(m + sign * step * t for m, t in zip(mems, towards, strict=True))) for sign in (1, -1)
    )
    torch.testing.assert_close(found.detach(), (ahead - behind) / (2 * step), atol=1e-6, rtol=1e-5)


def test_memories_are_mapped_and_have_tangents_beside_weights_that_are_trained(make_model, make_ids):
    model, ids = make_model("eager").double(), make_ids(2, 6)
    mems = tuple(states.detach() for states in model(ids).mems)
    several = tuple(torch.stack([states, 2 * states]) for states in mems)
    found = torch.func.vmap(lambda *mems: model(ids, mems=mems, labels=ids).loss)(*several)
    for i in range(2):
        expected = model(ids, mems=tuple(states[i] for states in several), labels=ids).loss
        torch.testing.assert_close(found[i], expected)
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("name", ["k_proj.weight", "v_proj.weight", "r_proj.weight", "content_bias"])
def test_derivatives_forward_of_one_matrix(make_model, make_ids, name):
    """Keys, values, distances or biases have a tangent where the queries have none."""
    model, ids = make_model("eager", n_layer=1, untie_r=True).double(), make_ids(2, 6)
    full = f"transformer.layers.0.self_attn.{name}"
    parameters = {full: model.get_parameter(full)}

    def loss_of(parameters):
        return torch.func.functional_call(model, parameters, (ids,), {"labels": ids, "output_logits": True}).loss

    expected = torch.autograd.grad(loss_of(parameters), parameters[full])[0].sum()
    with torch.no_grad(), forward_ad.dual_level():
        dual = forward_ad.make_dual(parameters[full].detach(), torch.ones_like(parameters[full]))
        torch.testing.assert_close(forward_ad.unpack_dual(loss_of({full: dual})).tangent, expected)


@pytest.mark.parametrize("given", [(), ("mems",), ("mems", "mems_mask"), ("mems", "mems_mask", "resets")])
def test_models_side_by_side_by_vmap(make_model, given):
    """Each with a memory of its own, as of agents that are trained together."""
    changes = {"model_class": TransfoXLModel, "vocab_size": 0, "input_size": 3, "cutoffs": [], "div_val": 1}
    models = [make_model("eager", seed=seed, **changes) for seed in range(3)]
    parameters, buffers = torch.func.stack_module_state(models)
    torch.manual_seed(0)
    everything = {
        "mems": tuple(torch.randn(3, 2, 6, 16) for _ in range(2)),
        "mems_mask": torch.rand(3, 2, 6) < 0.6,
        "resets": torch.rand(3, 2, 5) < 0.3,
    }
    inputs = {"inputs_embeds": torch.randn(3, 2, 5, 3)} | {name: everything[name] for name in given}

    def call(parameters, buffers, inputs):
        outputs = torch.func.functional_call(models[0], (parameters, buffers), (), inputs)
        return outputs.last_hidden_state, *outputs.mems

    found = torch.func.vmap(call)(parameters, buffers, inputs)
    gradients = torch.autograd.grad(found[0].sum(), parameters.values(), materialize_grads=True)
    for i, model in enumerate(models):
        own = {name: tuple(x[i] for x in given) if name == "mems" else given[i] for name, given in inputs.items()}
        expected = call(dict(model.named_parameters()), dict(model.named_buffers()), own)
        torch.testing.assert_close(tuple(x[i] for x in found), expected, atol=1e-5, rtol=1e-5, equal_nan=True)
        right = torch.autograd.grad(expected[0].sum(), model.parameters(), materialize_grads=True)
        torch.testing.assert_close(tuple(x[i] for x in gradients), right, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("changes", [{}, {"cutoffs": [], "div_val": 1}], ids=["cutoffs", "no-cutoffs"])
def test_ignored_labels(make_model, make_ids, changes):
    """Quirk 15: the sum over the count; all ignored is 0 with a gradient path."""
    model = make_model(**changes).train()
    ids = make_ids(2, 6)
    labels = ids.clone()
    labels[0] = -100
    output = model(ids, labels=labels)
    alone = model(ids[1:], labels=ids[1:])
    torch.testing.assert_close(output.loss, alone.loss)
    assert (output.losses[0] == 0).all()
    nothing = model(ids, labels=torch.full_like(ids, -100))
    assert nothing.loss == 0
    nothing.loss.backward()
    assert all((p.grad == 0).all() for p in model.parameters())


@pytest.mark.parametrize("cutoffs", [[], [20, 40]], ids=["softmax", "bins"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_no_target(make_model, make_ids, side, cutoffs):
    """Labels that are the padded input_ids: the losses are those of the rows alone."""
    model = make_model(cutoffs=cutoffs, div_val=1, initial_memory="empty")
    ids, pads = make_ids(2, 6), torch.full((1, 2), 60)
    row = torch.cat([pads, ids[:1, :4]] if side == "left" else [ids[:1, :4], pads], 1)
    batch, mask = torch.cat([row, ids[1:]]), torch.ones(2, 6, dtype=torch.long)
    mask[0] = (torch.arange(6) >= 2) if side == "left" else (torch.arange(6) < 4)
    alone = [model(each, labels=each).losses for each in (ids[:1, :4], ids[1:])]
    output = model(batch, attention_mask=mask, labels=batch)
    expected = F.pad(alone[0], (2, 0) if side == "left" else (0, 2))
    torch.testing.assert_close(output.losses, torch.cat([expected, alone[1]]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(output.loss, output.losses.sum() / 8)


@pytest.mark.parametrize(
    ("label", "filled_with", "side"),
    [
        *itertools.product(["labels"], [-100, 60], ["left", "right"]),
        # Of targets that are aligned nothing says that the one after the last real token is padding.
        *itertools.product(["shift_labels"], [-100], ["left", "right"]),
    ],
)
def test_trainer_has_the_loss_of_padded_batches(make_model, make_ids, tmp_path, side, label, filled_with):
    """`Trainer` counts labels without a look at the mask: what padding predicts is no reason for a smaller loss."""
    model = make_model(initial_memory="empty", dropout=0.0)
    ids, pads, ignored = make_ids(2, 6), torch.full((2,), 60), torch.full((2,), filled_with)

    def padded(row, filling):
        return torch.cat([filling, row] if side == "left" else [row, filling])

    mask = padded(torch.ones(4), torch.zeros(2)).long()
    labels = [padded(ids[0, :4], ignored), ids[1]]
    if label == "shift_labels":
        labels = [F.pad(row[1:], (0, 1), value=-100) for row in labels]
    rows = [padded(ids[0, :4], pads), ids[1]]
    masks = [mask, torch.ones_like(mask)]
    data = [
        {"input_ids": row, "attention_mask": each, label: target}
        for row, each, target in zip(rows, masks, labels, strict=True)
    ]
    losses = [model(row[None], labels=row[None]).losses for row in (ids[0, :4], ids[1])]
    expected = torch.cat(losses, 1).mean().item()
    options = arguments(
        tmp_path, label_names=[label], per_device_train_batch_size=2, per_device_eval_batch_size=2, max_steps=1
    )
    trainer = Trainer(model, options, train_dataset=data, eval_dataset=data)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, abs=1e-5)
    trainer.train()
    [logged] = [entry["train_loss"] for entry in trainer.state.log_history if "train_loss" in entry]
    assert logged == pytest.approx(expected, abs=1e-5)


def test_num_items_in_batch(make_model, make_ids):
    model = make_model()
    ids = make_ids(2, 6)
    output = model(ids, labels=ids, num_items_in_batch=torch.tensor(40))
    torch.testing.assert_close(output.loss, output.losses.sum() / 40)


def test_logits_beside_a_loss(make_model, make_ids):
    """Quirk 16: logits and a loss in one output, without an empty tuple where logits were not asked for. A model with
    cutoffs in training computes them where they are asked for alone."""
    ids = make_ids(2, 6)
    assert make_model().train()(ids, labels=ids).logits is None
    assert make_model()(ids, labels=ids, output_logits=False).logits is None
    assert make_model().train()(ids, labels=ids, output_logits=True).logits.shape == (2, 6, 61)
    assert make_model(output_logits=True).train()(ids, labels=ids).logits.shape == (2, 6, 61)
    assert make_model(cutoffs=[], div_val=1)(ids, labels=ids, logits_to_keep=2).logits.shape == (2, 2, 61)


# --- classification --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"attn_type": 2, "mem_len": 0}], ids=["relative", "absolute"])
@pytest.mark.parametrize("by", ["mask", "pad_token_id"])
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_classification_reads_the_last_real_token(make_model, make_ids, side, by, changes):
    """Quirk 22: the head is d_model wide, and padding may stand on either side."""
    changes = {"d_embed": 8, "num_labels": 3, "pad_token_id": 60, "same_length": False, **changes}
    model = make_model(model_class=TransfoXLForSequenceClassification, **changes)
    assert model.score.weight.shape == (3, 16)
    ids = make_ids(2, 6)
    alone = model(ids[:1, :4]).logits
    pads = torch.full((1, 2), 60)
    row = torch.cat([pads, ids[:1, :4]] if side == "left" else [ids[:1, :4], pads], 1)
    batch = torch.cat([row, ids[1:]])
    mask = (batch != 60).long()
    if by == "mask":
        model.config.pad_token_id = None
    # Without a mask, padding on the left is text like any other.
    given = {"attention_mask": mask} if by == "mask" or side == "left" else {}
    logits = model(batch, **given).logits
    torch.testing.assert_close(logits[:1], alone, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits[1:], model(ids[1:]).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("by", ["attention_mask", "pad_token_id"])
def test_a_text_that_ended_in_an_earlier_segment_has_no_scores(make_model, make_ids, by):
    """Not those of padding; with its label ignored, the other rows learn as they do alone."""
    model = make_model(
        model_class=TransfoXLForSequenceClassification, pad_token_id=60 if by == "pad_token_id" else None
    )
    ids = make_ids(2, 8)
    ids[0, 3:] = 60
    mask = (ids != 60).long()
    masks = mask.split(4, dim=1) if by == "attention_mask" else (None, None)
    first, second = ids.split(4, dim=1)
    before = model(first, attention_mask=masks[0])
    memory = {"mems": before.mems, "mems_mask": before.mems_mask}
    after = model(second, attention_mask=masks[1], **memory)
    assert before.logits.isfinite().all() and after.logits[0].isnan().all()
    whole = model(ids, attention_mask=mask if by == "attention_mask" else None).logits
    torch.testing.assert_close(after.logits[1], whole[1], atol=1e-5, rtol=1e-5)
    assert model(second, attention_mask=masks[1], labels=torch.tensor([0, 1]), **memory).loss.isnan()
    loss = model(second, attention_mask=masks[1], labels=torch.tensor([-100, 1]), **memory).loss
    loss.backward()
    torch.testing.assert_close(loss, F.cross_entropy(whole[1:], torch.tensor([1])), atol=1e-5, rtol=1e-5)
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize(
    "labels, num_labels",
    [
        (torch.tensor([0, 2]), 3),
        (torch.tensor([0.5, -1.0]), 1),
        (torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]]), 3),
        (torch.tensor([0, 2], dtype=torch.int32), 3),
        (torch.tensor([[0], [2]], dtype=torch.uint8), 3),
        (torch.tensor([1, 0]), 1),
        (torch.tensor([[0, 1, 1], [1, 0, 0]]), 3),
        (torch.tensor([[False, True, True], [True, False, False]]), 3),
    ],
    ids=["single", "regression", "multi", "int32", "uint8", "whole numbers", "multi as integers", "multi as bool"],
)
def test_classification_losses(make_model, make_ids, labels, num_labels):
    model = make_model(model_class=TransfoXLForSequenceClassification, num_labels=num_labels, pad_token_id=60)
    output = model(make_ids(2, 5), labels=labels)
    if num_labels == 1:
        expected = F.mse_loss(output.logits[:, 0], labels.float())
    elif labels.shape != output.logits.shape:
        expected = F.cross_entropy(output.logits, labels.long().flatten())
    else:
        expected = F.binary_cross_entropy_with_logits(output.logits, labels.float())
    torch.testing.assert_close(output.loss, expected)
    output.loss.backward()


# --- Trainer ---------------------------------------------------------------------------------------------------------


def arguments(path, **changes):
    defaults = {
        "output_dir": str(path),
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "max_steps": 12,
        "learning_rate": 1e-2,
        "logging_steps": 4,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 0,
    }
    return TrainingArguments(**(defaults | changes))


@pytest.mark.parametrize("label", ["labels", "shift_labels"])
def test_trainer_trains_and_evaluates(make_model, make_ids, tmp_path, label):
    model = make_model(init_std=0.1, proj_init_std=0.1)
    stream = make_ids(8, 9, vocab_size=12)
    targets = stream[:, :-1] if label == "labels" else stream[:, 1:]
    data = [{"input_ids": ids, label: target} for ids, target in zip(stream[:, :-1], targets, strict=True)]
    trainer = Trainer(model, arguments(tmp_path, label_names=[label]), train_dataset=data, eval_dataset=data)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    assert after < before - 0.3
    with torch.no_grad():
        expected = sum(model(row["input_ids"][None], **{label: row[label][None]}).loss for row in data) / len(data)
    assert abs(after - expected) < 1e-4


def test_trainer_counts_targets_over_accumulated_batches(make_model, make_ids, tmp_path):
    """Uneven padding: one step over two accumulated batches is the step over both at once."""
    ids = make_ids(4, 8)
    labels = ids.clone()
    labels[0, 3:] = -100
    labels[3, 5:] = -100
    data = [{"input_ids": i, "labels": t} for i, t in zip(ids, labels, strict=True)]
    results = []
    for changes in ({"per_device_train_batch_size": 4}, {"gradient_accumulation_steps": 2}):
        model = make_model()
        options = arguments(
            tmp_path, max_steps=1, optim="sgd", max_grad_norm=0.0, lr_scheduler_type="constant", **changes
        )
        Trainer(model, options, train_dataset=data).train()
        results.append(model.state_dict())
    for name, tensor in results[0].items():
        torch.testing.assert_close(tensor, results[1][name], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("changes", [{}, {"untie_r": False}, {"attn_type": 1}], ids=["plain", "tied", "shaw"])
def test_trainer_resumes_with_the_weights_it_saved(make_model, make_ids, tmp_path, changes):
    """Trainer loads what `save_pretrained` wrote, names on disk and all, with `load_state_dict(strict=False)`."""
    data = [{"input_ids": ids, "labels": ids} for ids in make_ids(8, 8)]

    def losses(steps, **resume):
        options = arguments(tmp_path / "run", max_steps=steps, logging_steps=1, save_strategy="steps", save_steps=3)
        trainer = Trainer(make_model(init_std=0.1, **changes), options, train_dataset=data)
        trainer.train(**resume)
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer.model.state_dict()

    whole, weights = losses(6)
    resumed, resumed_weights = losses(6, resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert resumed == pytest.approx(whole, rel=1e-5)
    for name, tensor in weights.items():
        torch.testing.assert_close(resumed_weights[name], tensor, atol=1e-5, rtol=1e-5)


def test_state_dicts_of_both_layouts_load(make_model, make_ids, tmp_path):
    model, other = make_model(seed=1), make_model(seed=2)
    model.save_pretrained(tmp_path)
    missing = other.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False).missing_keys
    assert set(missing) == set(other.all_tied_weights_keys)
    third, fourth = make_model(seed=3), make_model(seed=4)
    third.load_state_dict(model.state_dict())
    # As accelerate saves and loads a state: tied tensors are written once, and must be missing when they are read.
    save_model(model, tmp_path / "state.safetensors")
    load_model(fourth, tmp_path / "state.safetensors")
    for name, tensor in model.state_dict().items():
        assert all(torch.equal(loaded.state_dict()[name], tensor) for loaded in (other, third, fourth))


def test_a_subclass_may_have_names_that_look_like_those_on_disk(make_config, tmp_path):
    """`critic` begins like `crit`, the softmax on disk, with any letter in place of the dot."""

    class ActorCritic(TransfoXLPreTrainedModel):
        def __init__(self, config):
            super().__init__(config)
            self.transformer = TransfoXLModel(config)
            self.critic, self.word_embeds = torch.nn.Linear(8, 1), torch.nn.Linear(8, 2)
            self.post_init()

    model, other = ActorCritic(make_config()), ActorCritic(make_config())
    other.load_state_dict(model.state_dict())
    model.save_pretrained(tmp_path)
    for loaded in (other, ActorCritic.from_pretrained(tmp_path)):
        for name, tensor in model.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], tensor), name


def test_trainer_fine_tunes_a_classifier(make_model, make_ids, tmp_path):
    model = make_model(model_class=TransfoXLForSequenceClassification, num_labels=2, pad_token_id=60, init_std=0.1)
    ids = make_ids(16, 6)
    data = [{"input_ids": row, "labels": int(row[-1] > 30)} for row in ids]
    trainer = Trainer(model, arguments(tmp_path, max_steps=40), train_dataset=data, eval_dataset=data)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before
    assert trainer.predict(data).predictions.shape == (16, 2)


# --- checkpointing, compilation, export ------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True], ids=["not-reentrant", "reentrant"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"untie_r": False}, {"attn_type": 1}, {"dropout": 0.3, "dropatt": 0.3}],
    ids=["plain", "tied", "shaw", "dropout"],
)
def test_gradient_checkpointing_changes_no_gradient(make_model, make_ids, changes, reentrant):
    """With dropout too: a reentrant checkpoint draws first without a gradient, and then again with one."""
    gradients = []
    for checkpointing in (False, True):
        model = make_model(**changes).train()
        torch.manual_seed(1)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        first = model(make_ids(2, 5), labels=make_ids(2, 5))
        second = model(make_ids(2, 5, 1), mems=first.mems, labels=make_ids(2, 5, 1), use_cache=checkpointing)
        (first.loss + second.loss).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], atol=1e-6, rtol=1e-5)


def test_gradient_checkpointing_refuses_the_memory_of_a_cache(make_model, make_ids):
    """Which it would not read."""
    model, ids = make_model().train(), make_ids(2, 5)
    cache = model(ids, use_cache=True).past_key_values
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="past_key_values hold a memory, but gradient checkpointing.*give it as mems"):
        model(ids, past_key_values=cache)
    model.eval()(ids, past_key_values=cache)


@pytest.mark.parametrize(
    ("backend", "n_layer"),
    [("eager", 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("eager", 2), ("sdpa", 1)))],
)
def test_compiled_training_step_has_no_graph_break(make_model, make_ids, backend, n_layer):
    check_compiled_training(make_model(backend, n_layer=n_layer).train(), make_ids, fullgraph=True)


def test_a_training_step_of_any_shape_is_one_graph(make_model, make_ids):
    """A rate of dropout is a symbol there, and so was whether there is any."""
    model, ids = make_model(n_layer=1, dropatt=0.1, cutoffs=[], div_val=1).train(), make_ids(2, 5)
    torch.compile(model, dynamic=True, fullgraph=True, backend="eager")(ids, labels=ids).loss.backward()


@pytest.mark.skipif(not hasattr(torch.compiler, "is_exporting"), reason="this torch cannot tell an export")
def test_what_exports_is_told_from_what_compiles():
    """PyTorch 2.11 answers its own question with True for both."""

    class Told(torch.nn.Module):
        def forward(self, numbers):
            return numbers + int(is_exporting())

    numbers = torch.zeros(2)
    assert torch.equal(torch.compile(Told(), backend="eager", fullgraph=True)(numbers), numbers)
    for strict in (False, True):
        exported = torch.export.export(Told(), (numbers,), strict=strict).module()
        assert torch.equal(exported(numbers), numbers + 1)


@pytest.mark.skipif(not hasattr(torch.compiler, "is_exporting"), reason="this torch cannot tell an export")
@pytest.mark.slow
def test_an_export_has_no_look_at_ids(make_model, make_ids):
    graph = torch.export.export(make_model("eager"), (make_ids(2, 5),), {"use_cache": False}, strict=True).graph
    assert not [node for node in graph.nodes if "assert_async" in str(node.target)]


@pytest.mark.slow
def test_a_training_step_over_the_words_of_wikitext_103_is_one_graph(make_model, make_ids, monkeypatch):
    """How many tokens a bin has is known to an operator alone, which holds no more logits than without a graph."""
    bins = {"vocab_size": 267735, "cutoffs": [19997, 39997, 199997], "div_val": 4, "d_embed": 64}
    model = make_model(**bins, n_layer=1).train()
    monkeypatch.setattr(model.lm_head, "plain_nll", None)
    check_compiled_training(model, lambda *shape: make_ids(*shape, vocab_size=267735), fullgraph=True, tokens=70)


def check_compiled_training(model, make_ids, fullgraph, tokens=7):
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=fullgraph, backend="aot_eager")
    stream = make_ids(2, 2 * tokens + 1)
    mems = compiled_mems = None
    for start in (0, tokens):
        ids, targets = stream[:, start : start + tokens], stream[:, start + 1 : start + tokens + 1]
        expected = model(ids, mems=mems, shift_labels=targets)
        actual = compiled(ids, mems=compiled_mems, shift_labels=targets)
        model.zero_grad()
        expected.loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        actual.loss.backward()
        torch.testing.assert_close(actual.losses, expected.losses, atol=1e-5, rtol=1e-5)
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, gradients[name], atol=1e-5, rtol=1e-4)
        mems, compiled_mems = expected.mems, actual.mems


def test_export_of_one_decoding_step(make_model, make_ids):
    model = make_model(initial_memory="zeros")

    class Step(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, token, mems):
            output = self.model(token, mems=mems)
            return output.logits, output.mems

    with torch.no_grad():
        mems = model(make_ids(1, 3)).mems
        exported = torch.export.export(Step(), (make_ids(1, 1), mems)).module()
        for token in make_ids(1, 4, seed=3).T[..., None]:
            expected = model(token, mems=mems)
            logits, mems = exported(token, mems)
            torch.testing.assert_close(logits, expected.logits)


@pytest.mark.skipif(not hasattr(torch.compiler, "is_exporting"), reason="this torch cannot tell an export")
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
@torch.no_grad()
def test_an_export_serves_memories_on_both_sides_of_the_clamp(make_model, make_ids, strict):
    """A graph of as many distances as differ would serve but one of them."""
    model = make_model("eager", mem_len=20, clamp_len=4)

    class Step(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, token, mems):
            return self.model(token, mems=tuple(mems), use_cache=False).logits

    def past(length):
        return list(model(make_ids(3, length)).mems)

    auto = torch.export.Dim.AUTO
    sizes = ({0: auto}, [{0: auto, 1: auto}] * model.config.n_layer)
    exported = torch.export.export(Step(), (make_ids(3, 1), past(3)), dynamic_shapes=sizes, strict=strict).module()
    for length in (2, 3, 5, 9, 15):
        token, mems = make_ids(3, 1, seed=length), past(length)
        torch.testing.assert_close(exported(token, mems), Step()(token, mems))


@pytest.mark.parametrize(
    "changes", [{}, {"attn_type": 2, "mem_len": 0}, {"attn_type": 3, "mem_len": 0, "tgt_len": 400}]
)
def test_what_is_traced_serves_other_batches_and_masks(make_model, make_ids, changes):
    """Nothing of the example is built into the trace: not its rows, nor that its mask hid nothing, nor its bins; and
    without a memory not its length."""

    class Forward(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, ids, mask, targets):
            logits = self.model(ids, attention_mask=mask, return_dict=False)[0]
            losses = self.model(ids, attention_mask=mask, shift_labels=targets, return_dict=False)[-1]
            return logits, losses

    forward = Forward(make_model(**changes))
    length = 400  # so long that, outside a trace, tiles would be computed one by one
    few, many = make_ids(1, length), make_ids(3, length - 30 if changes else length, seed=1)
    with torch.no_grad():
        traced = torch.jit.trace(forward, (few, torch.ones_like(few), few), check_trace=False)
        mask = torch.ones_like(many)
        mask[0, :3] = mask[2, :9] = mask[1, -4:] = 0
        for actual, expected in zip(traced(many, mask, many), forward(many, mask, many), strict=True):
            torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_saved_and_reloaded_model_has_the_same_losses(make_model, make_ids, tmp_path):
    model = make_model()
    model.save_pretrained(tmp_path)
    loaded = TransfoXLForCausalLM.from_pretrained(tmp_path).eval()
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    # Loaded tensors lie in the file, at other alignments, so that vectorised sums may differ in the last bit.
    ids = make_ids(2, 7)
    torch.testing.assert_close(loaded(ids, labels=ids).losses, model(ids, labels=ids).losses, rtol=1e-6, atol=1e-6)


# --- sharding without a Trainer --------------------------------------------------------------------------------------

SHARDED = {
    "tied": {},
    "projections-tied-alone": {"tie_word_embeddings": False, "tie_projs": [False, True, True]},
    "untied": {"tie_word_embeddings": False, "tie_projs": [False] * 3},
}


def train_sharded(config, folder: str):
    """Three steps under accelerate with FSDP2, beside the same steps in one process; rank 0 saves both models."""
    PartialState(cpu=True)
    # accelerate shards on every device but the CPU, though torch can.
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["TransfoXLLayer"]
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    torch.manual_seed(0)
    alone = TransfoXLForCausalLM(config)
    ids = torch.randint(60, (4, 12))
    sharded = copy.deepcopy(alone)
    model, optimizer = accelerator.prepare(sharded, torch.optim.SGD(sharded.parameters(), 0.1))
    alone_optimizer = torch.optim.SGD(alone.parameters(), 0.1)
    rows = ids[2 * accelerator.process_index :][:2]
    for _ in range(3):
        accelerator.backward(model(rows, labels=rows).loss)
        alone(ids, labels=ids).loss.backward()
        for each in (optimizer, alone_optimizer):
            each.step()
            each.zero_grad()
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(rows).logits, alone.eval()(rows).logits, atol=1e-4, rtol=1e-4)
    state_dict = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(f"{folder}/sharded", state_dict=state_dict)
        alone.save_pretrained(f"{folder}/alone")
    accelerator.wait_for_everyone()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "changes",
    [pytest.param(changes, marks=pytest.mark.slow if name != "tied" else ()) for name, changes in SHARDED.items()],
    ids=SHARDED,
)
def test_plain_accelerate_shards_and_saves(make_config, tmp_path, changes):
    started = launcher.start(train_sharded, 2, config=make_config(**changes), folder=str(tmp_path))
    assert launcher.join(started) == [0, 0]
    names = [sorted(path.name for path in (tmp_path / which).iterdir()) for which in ("sharded", "alone")]
    assert names[0] == names[1] and "modeling_transfo_xl.py" in names[0]
    tensors = [load_file(tmp_path / which / "model.safetensors") for which in ("sharded", "alone")]
    assert tensors[0].keys() == tensors[1].keys()
    for name, tensor in tensors[1].items():
        torch.testing.assert_close(tensors[0][name], tensor, atol=1e-4, rtol=1e-4)
    assert TransfoXLForCausalLM.from_pretrained(tmp_path / "sharded").config.architectures == ["TransfoXLForCausalLM"]


@pytest.mark.parametrize(
    ("changes", "deviation", "furthest"),
    [({"init": "uniform", "init_range": 0.05}, 0.05 / 3**0.5, 0.05), ({"init_std": 0.05}, 0.05, 0.3)],
    ids=["uniform", "normal"],
)
def test_initial_weights(make_model, changes, deviation, furthest):
    model = make_model(**changes)
    weights = [layer.mlp.up_proj.weight for layer in model.transformer.layers] + [
        table.weight for table in model.get_input_embeddings().emb_layers
    ]
    for weight in weights:
        assert weight.std().item() == pytest.approx(deviation, rel=0.3)
        assert 0.8 * deviation < weight.abs().max() <= furthest
