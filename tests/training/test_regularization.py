"""Regularisers: masks that are what they say, the penalty of the formula, nothing by default, nothing left behind."""

import copy
import io
import math
from dataclasses import asdict
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, HfArgumentParser, set_seed

pytest.importorskip("accelerate")

from trainer_process import make_arguments, make_text, read_losses, run
from trainer_process import make_model as make_small
from txl_hf import TokenStream, TransfoXLModel
from txl_hf.kernels.steps import compile_layers
from txl_hf.memories import memory_of
from txl_hf.training.regularization import LockedDropout, RegularizationArguments, regularize
from txl_hf.training.trainer import TransfoXLTrainer

PTB = RegularizationArguments(
    word_dropout=0.2, input_dropout=0.6, attention_dropout=0.2, mlp_dropout=0.2, output_dropout=0.5, ar=0.2, tar=0.1
)


def outputs_of(model, module, ids, seed=0, **inputs):
    """Input and output of the calls of a part of the model in one forward."""
    calls = []
    hook = module.register_forward_hook(lambda _, args, output: calls.append((args[0], output)))
    torch.manual_seed(seed)
    model(ids, **inputs)
    hook.remove()
    return calls


def gradients(model, ids, regularizer=None, seed=0, mems=None):
    torch.manual_seed(seed)
    loss = model(ids, labels=ids, mems=mems).loss
    if regularizer is not None:
        loss = loss + regularizer.penalty()
    model.zero_grad()
    loss.backward()
    return loss.detach(), [parameter.grad.clone() for parameter in model.parameters()]


# --- masks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "count"),
    [("input_dropout", 1), ("attention_dropout", 1), ("mlp_dropout", 2), ("output_dropout", 1)],
)
def test_one_mask_for_all_positions_of_a_row(make_model, make_ids, place, count):
    model = make_model().train()
    regularize(model, RegularizationArguments(**{place: 0.6}))
    transformer = model.transformer
    module = {
        "attention_dropout": transformer.layers[1].self_attn,
        "mlp_dropout": transformer.layers[1].mlp,
    }.get(place)
    module = module.dropout if module else getattr(transformer, place)
    masks = []
    for seed in range(40):
        calls = outputs_of(model, module, make_ids(3, 5), seed)
        assert len(calls) == count
        for states, dropped in calls:
            mask = (dropped / states).nan_to_num(0).amax(1)  # (B, D); states are 0 behind the ReLU
            torch.testing.assert_close(dropped, states * mask[:, None])
            assert torch.isclose(mask, torch.tensor(2.5)).logical_or(mask == 0).all()
        masks.append(mask)
    kept = (torch.stack(masks) != 0).float()
    assert kept.mean() == pytest.approx(0.4, abs=0.05)
    # Rows, channels and forwards are independent.
    assert not torch.equal(kept[0], kept[1]) and not torch.equal(kept[:, 0], kept[:, 1])
    assert kept.mean((0, 1)).std() < 0.15 and 0.1 < kept.mean((0, 1)).min()


def test_all_masks_of_a_forward_are_one_draw_and_independent(make_model, make_ids):
    """A draw is a launch on a GPU. All masks are as wide here, so that one cannot pass for another's part."""
    model = make_model(d_inner=16, dropout=0.0, dropatt=0.0).train()
    rates = {"input_dropout": 0.6, "attention_dropout": 0.2, "mlp_dropout": 0.3, "output_dropout": 0.5}
    regularizer = regularize(model, RegularizationArguments(**rates))
    locks, masks = [lock for lock, _ in regularizer._locked], []
    for lock in locks:
        lock.register_forward_pre_hook(lambda module, args: masks.append((module.p, module.masks[0])))
    torch.manual_seed(0)
    for rows in (300, 200):
        masks.clear()
        ids = make_ids(rows, 3)
        with Draws() as draws:
            model(ids)
        assert draws.count == 1
        # A call of attention's in a layer, two of the feed-forward's.
        assert [p for p, _ in masks] == [0.6, *[0.2, 0.3, 0.3] * model.config.n_layer, 0.5]
        assert all(mask.shape == (rows, 1, 16) for _, mask in masks)
        for p, mask in masks:
            assert torch.isclose(mask, torch.tensor(1 / (1 - p))).logical_or(mask == 0).all()
            assert (mask == 0).float().mean() == pytest.approx(p, abs=0.03)
        # Of masks, of channels of a mask, and of rows: no pair of them goes together.
        kept = torch.stack([(mask != 0).float().squeeze(1) for _, mask in masks])
        assert torch.corrcoef(kept.flatten(1)).fill_diagonal_(0).abs().max() < 0.1
        assert torch.corrcoef(kept.transpose(0, 1).flatten(1).T).fill_diagonal_(0).abs().max() < 0.4
        assert torch.corrcoef(kept.transpose(0, 1).flatten(1)[:40]).fill_diagonal_(0).abs().max() < 0.6
    # Each mask was used once; a call outside of a forward draws one.
    assert not any(lock.masks for lock in locks)
    states = torch.ones(2, 3, 16)
    with Draws() as draws:
        assert locks[0](states).shape == states.shape
    assert draws.count == 1


class Draws(TorchDispatchMode):
    """The number of operators that draw."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += torch.Tag.nondeterministic_seeded in function.tags
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("changes", [{}, {"div_val": 1}, {"cutoffs": [], "div_val": 1}], ids=["bins", "one", "plain"])
def test_whole_words_are_dropped_from_the_embedding_alone(make_model, make_ids, changes):
    model = make_model(**changes).train()
    ids = torch.arange(60).view(2, 30)
    ids = torch.cat([ids, ids.flip(0)], dim=1)  # every word in both rows
    plain = model.transformer.embed_tokens(ids)
    head = model.lm_head.log_prob(plain)
    regularize(model, RegularizationArguments(word_dropout=0.2))
    dropped_words = []
    for seed in range(50):
        torch.manual_seed(seed)
        embeds = model.transformer.embed_tokens(ids)
        # The first token of a segment stays as it is.
        torch.testing.assert_close(embeds[:, 0], plain[:, 0])
        gone = (embeds == 0).all(-1)
        words = set(ids[gone].tolist())
        assert torch.equal(gone[:, 1:], torch.isin(ids, torch.tensor(sorted(words), dtype=torch.long))[:, 1:])
        embeds, plain_embeds, left = embeds[:, 1:], plain[:, 1:], ~gone[:, 1:]
        torch.testing.assert_close(embeds[left], plain_embeds[left] / 0.8)
        dropped_words.append(words)
    assert np.mean([len(words) for words in dropped_words]) == pytest.approx(12, abs=1.5)
    assert len(set(map(frozenset, dropped_words))) == 50, "a mask for each forward"
    assert torch.equal(model.lm_head.log_prob(plain), head), "the softmax knows all words"


def begins_at_first(model, ids):
    return {}, [0, 0]


def begins_behind_padding(model, ids):
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    return {"attention_mask": mask}, [0, 3]


def begins_at_a_reset(model, ids):
    resets = torch.zeros_like(ids, dtype=torch.bool)
    resets[:, 4] = True
    return {"resets": resets}, [4, 4]


def begins_where_positions_do(model, ids):
    return {"position_ids": torch.tensor([0, 1, 2, 3, 4, 0, 1, 2]).expand_as(ids)}, [5, 5]


def begins_beside_a_memory_that_is_hidden(model, ids):
    mems = model(ids).mems
    return {"mems": mems, "mems_mask": torch.zeros(mems[0].shape[:2], dtype=torch.bool)}, [0, 0]


def begins_with_a_memory_of_zeros(model, ids):
    return {"mems": tuple(torch.zeros(2, 3, model.config.d_model) for _ in range(16))}, [0, 0]


def begins_with_an_empty_cache(model, ids):
    return {"past_key_values": DynamicCache()}, [0, 0]


def begins_as_vectors(model, ids):
    return {"inputs_embeds": model.get_input_embeddings()}, [0, 0]


BEGINNINGS = [
    begins_at_first,
    begins_behind_padding,
    begins_at_a_reset,
    begins_where_positions_do,
    begins_beside_a_memory_that_is_hidden,
    begins_with_a_memory_of_zeros,
    begins_with_an_empty_cache,
    begins_as_vectors,
]


@pytest.mark.parametrize("begin", BEGINNINGS)
def test_the_token_that_begins_a_text_is_not_dropped(make_model, make_ids, begin):
    """It sees nothing else: its state would be zero, of which sixteen layers make a gradient that is not finite."""
    model, ids = make_model(n_layer=16, initial_memory="empty").train(), make_ids(2, 8)
    regularizer, read = regularize(model, RegularizationArguments(word_dropout=0.9, tar=1.0)), []
    model.transformer.input_dropout.register_forward_hook(lambda _, args, output: read.append(args[0]))
    for seed in range(5):
        torch.manual_seed(seed)
        given, places = begin(model, ids)
        embed = given.get("inputs_embeds")
        inputs = {"input_ids": ids} | given if embed is None else {"inputs_embeds": embed(ids)}
        loss = model(**inputs, labels=ids).loss + regularizer.penalty(resets=inputs.get("resets"))
        gone = (read[-1] == 0).all(-1)
        assert gone.any() and not gone[[0, 1], places].any()
        model.zero_grad()
        loss.backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_a_dropped_word_is_still_learnt_by_the_tied_softmax(make_model, make_ids):
    """The gradient of the tied table is that of two tables, of which the input's gets nothing for dropped words."""
    ids, tables = make_ids(2, 20), []
    for tied in (True, False):
        model = make_model(cutoffs=[], div_val=1, tie_word_embeddings=tied).train()
        embedding, softmax = model.transformer.embed_tokens.emb_layers[0], model.lm_head.out_layers[0]
        with torch.no_grad():
            softmax.weight.copy_(embedding.weight)
        regularize(model, RegularizationArguments(word_dropout=0.5))
        gradients(model, ids)
        tables.append((embedding.weight.grad, softmax.weight.grad))
    torch.testing.assert_close(tables[0][0], tables[1][0] + tables[1][1])
    dropped = (tables[1][0] == 0).all(-1)
    assert 0 < dropped[ids].float().mean() < 1 and (tables[1][1] != 0).any(-1).all()


def test_memory_holds_what_was_dropped(make_model, make_ids):
    model = make_model().train()
    regularize(model, PTB)
    [(_, read)] = outputs_of(model, model.transformer.input_dropout, make_ids(2, 5))
    torch.manual_seed(0)
    mems = model(make_ids(2, 5)).mems
    assert (mems[0] == 0).any() and torch.equal(mems[0], read)


def test_positions_and_attention_probabilities_keep_their_dropout(make_model):
    model = make_model(dropout=0.3).train()
    regularize(model, PTB)
    plain = [name for name, module in model.named_modules() if type(module) is torch.nn.Dropout]
    assert plain == [
        "transformer.position_dropout",
        *(f"transformer.layers.{i}.self_attn.dropatt" for i in range(model.config.n_layer)),
    ]


# --- penalty ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("output_dropout", [0.0, 0.5])
def test_the_penalty_is_that_of_the_formula(make_model, make_ids, output_dropout):
    model = make_model().train()
    regularizer = regularize(model, RegularizationArguments(output_dropout=output_dropout, ar=0.2, tar=0.1))
    [(raw, dropped)] = outputs_of(model, model.transformer.output_dropout, make_ids(3, 6))
    assert torch.equal(raw, dropped) == (output_dropout == 0)
    raw, dropped = raw.detach().double().numpy(), dropped.detach().double().numpy()
    ar = tar = 0.0
    for b in range(3):
        for t in range(6):
            ar += sum(value**2 for value in dropped[b, t]) / (3 * 6 * 16)
            if t:
                tar += sum((now - then) ** 2 for now, then in zip(raw[b, t], raw[b, t - 1], strict=True)) / (
                    3 * 5 * 16
                )
    penalty = regularizer.penalty()
    assert penalty.shape == () and penalty.dtype == torch.float32
    assert penalty.item() == pytest.approx(0.2 * ar + 0.1 * tar, rel=1e-5)
    for coefficient, expected in ({"ar": 2.0}, 2 * ar), ({"tar": 3.0}, 3 * tar):
        regularizer.arguments = RegularizationArguments(**coefficient)
        assert regularizer.penalty().item() == pytest.approx(expected, rel=1e-5)


def test_what_is_read_again_is_not_penalised(make_model, make_ids):
    model, ids = make_model().train(), make_ids(2, 6)
    regularizer = regularize(model, RegularizationArguments(ar=0.2, tar=0.1))
    [(raw, dropped)] = outputs_of(model, model.transformer.output_dropout, ids)
    labels = ids.clone()
    labels[:, :2] = -100
    expected = 0.2 * dropped[:, 2:].square().mean() + 0.1 * (raw[:, 3:] - raw[:, 2:-1]).square().mean()
    torch.testing.assert_close(regularizer.penalty(labels), expected)
    assert regularizer.penalty(torch.full_like(labels, -100)) == 0
    with pytest.raises(ValueError, match=r"shift_labels are \(2, 5\), but the forward was \(2, 6\)"):
        regularizer.penalty(labels[:, 1:])


def test_from_one_document_to_the_next_is_no_step_in_time(make_model, make_ids):
    model, ids = make_model(initial_memory="empty").train(), make_ids(2, 6)
    regularizer = regularize(model, RegularizationArguments(tar=0.1))
    resets = torch.zeros(2, 6, dtype=torch.bool)
    resets[0, [0, 4]] = True
    [(raw, _)] = outputs_of(model, model.transformer.output_dropout, ids, resets=resets)
    steps = (raw[:, 1:] - raw[:, :-1]).square().mean(-1)
    expected = 0.1 * torch.cat([steps[0, :3], steps[0, 4:], steps[1]]).mean()
    torch.testing.assert_close(regularizer.penalty(None, resets), expected)
    torch.testing.assert_close(regularizer.penalty(ids, resets), expected)
    with pytest.raises(ValueError, match=r"resets are \(1, 6\), but the forward was \(2, 6\)"):
        regularizer.penalty(ids, resets[:1])


def test_one_token_has_no_step_in_time(make_model, make_ids):
    model = make_model().train()
    regularizer = regularize(model, RegularizationArguments(tar=0.1))
    model(make_ids(2, 1))
    assert regularizer.penalty() == 0


def test_the_penalty_is_of_the_last_forward_in_training_mode(make_model, make_ids):
    model = make_model()
    regularizer = regularize(model, PTB)
    model(make_ids(2, 5))
    with pytest.raises(RuntimeError, match="forward in training mode, but there was none"):
        regularizer.penalty()
    model.train()(make_ids(2, 5))
    penalty = regularizer.penalty()
    model.eval()(make_ids(2, 3))
    assert regularizer.penalty() == penalty > 0


# --- off, on and off again -------------------------------------------------------------------------------------------


def test_nothing_by_default(make_model, make_ids):
    ids = make_ids(2, 6)
    expected, expected_gradients = gradients(make_model(dropout=0.2).train(), ids)
    model = make_model(dropout=0.2).train()
    parts = list(model.modules())
    regularizer = regularize(model, RegularizationArguments())
    assert list(model.modules()) == parts and regularizer.penalty() == 0
    loss, found = gradients(model, ids)
    assert torch.equal(loss, expected) and all(map(torch.equal, found, expected_gradients))


def test_nothing_in_evaluation_mode(make_model, make_ids):
    model, ids = make_model(), make_ids(2, 6)
    expected = model(ids)
    regularize(model, PTB)
    found = model(ids)
    assert torch.equal(found.logits, expected.logits) and torch.equal(found.mems[1], expected.mems[1])
    assert not torch.equal(model.train()(ids).logits, expected.logits)


def test_a_regularised_model_is_saved_like_any_other(make_model, make_ids, tmp_path):
    model, ids = make_model(), make_ids(2, 6)
    names = list(model.state_dict())
    regularize(model, PTB)
    assert list(model.state_dict()) == names
    model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("regularization*"))
    assert torch.equal(type(model).from_pretrained(tmp_path)(ids).logits, model(ids).logits)


# --- under what trains -----------------------------------------------------------------------------------------------


def test_gradient_checkpointing_draws_the_same_masks_again(make_model, make_ids):
    """Also of the first of two forwards, whose layers are computed again after the second."""
    results = []
    for checkpointed in (False, True):
        model = make_model().train()
        regularize(model, PTB)
        # Locked dropouts draw by themselves in both.
        model.transformer.gradient_checkpointing = True
        if checkpointed:
            model.gradient_checkpointing_enable()
        torch.manual_seed(0)
        loss = torch.stack([model(ids, labels=ids).loss for ids in (make_ids(2, 6), make_ids(2, 6, seed=1))]).sum()
        loss.backward()
        results.append((loss, [parameter.grad for parameter in model.parameters()]))
    assert torch.equal(results[0][0], results[1][0])
    assert all(map(torch.equal, results[0][1], results[1][1]))


@pytest.mark.slow
def test_compiled_regularisation_is_the_same(make_model, make_ids):
    """Without randomness the same; the penalty comes out of the graph with its gradient."""
    torch.compiler.reset()
    ids, results = make_ids(2, 6), []
    for compiled in (False, True):
        model = make_model().train()
        regularizer = regularize(model, RegularizationArguments(ar=0.2, tar=0.1))
        run = torch.compile(model, backend="aot_eager") if compiled else model
        loss = run(ids, labels=ids).loss + regularizer.penalty()
        loss.backward()
        results.append((loss.detach(), [parameter.grad for parameter in model.parameters()]))
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.slow
def test_compiled_after_a_model_without(make_model, make_ids):
    """torch would take the other model's code, which has no hooks."""
    torch.compiler.reset()
    ids = make_ids(2, 6)
    torch.compile(make_model(n_layer=1).train(), backend="aot_eager")(ids, labels=ids)
    model = make_model(n_layer=1).train()
    regularizer = regularize(model, RegularizationArguments(ar=0.2))
    torch.compile(model, backend="aot_eager")(ids, labels=ids)
    assert regularizer.penalty() > 0


def test_a_regularised_model_is_copied_between_steps(make_model, make_ids):
    """Averages of the weights begin late, and the best model is kept aside."""
    model, ids = make_model().train(), make_ids(2, 6)
    regularizer = regularize(model, PTB)
    (model(ids, labels=ids).loss + regularizer.penalty()).backward()
    copied = copy.deepcopy(model)
    torch.save(model, io.BytesIO())
    assert regularizer.penalty() > 0, "the model's own is still there"
    for name, parameter in model.named_parameters():
        assert torch.equal(copied.get_parameter(name), parameter)
    assert copied(ids, labels=ids).loss.isfinite()


@pytest.mark.slow
def test_compiled_with_dropout(make_model, make_ids):
    torch.compiler.reset()
    model, ids = make_model().train(), make_ids(2, 6)
    regularizer = regularize(model, PTB)
    loss = torch.compile(model, backend="aot_eager")(ids, labels=ids).loss + regularizer.penalty()
    loss.backward()
    raw, dropped = regularizer._outputs
    mask = dropped[:, :1] / raw[:, :1]
    torch.testing.assert_close(dropped, raw * mask)
    assert 0 < (mask == 0).sum() < mask.numel() and loss.isfinite()


@pytest.mark.slow
def test_compiled_layers_drop_what_others_drop(make_model, make_ids):
    """Masks are drawn outside of them, so that there is a graph for all layers, and one for all further lengths."""
    torch.compiler.reset()
    model, found = make_model(d_inner=16).train(), []
    regularizer = regularize(model, PTB)
    texts = [make_ids(2, length, seed=length) for length in (6, 8, 5)]
    for compiled in (False, True):
        if compiled:
            compile_layers(model, "aot_eager")
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        found.append([gradients(model, ids, regularizer) for ids in texts])
        made = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
        assert made == (2 if compiled else 0)
    torch.testing.assert_close(found[1], found[0])


def test_regularisation_under_autocast_is_that_of_fp32(make_model, make_ids):
    ids, losses = make_ids(2, 6), []
    for enabled in (False, True):
        model = make_model(init_std=0.1, proj_init_std=0.1).train()
        regularizer = regularize(model, RegularizationArguments(ar=0.2, tar=0.1))
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            losses.append(gradients(model, ids, regularizer)[0].item())
        model = make_model(init_std=0.1, proj_init_std=0.1).train()
        regularizer = regularize(model, PTB)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            mems = model(ids).mems
            loss, found = gradients(model, ids, regularizer, mems=mems)
        assert loss.isfinite() and all(gradient.isfinite().all() for gradient in found)
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


@pytest.mark.parametrize("head", [TransfoXLModel, None], ids=["bare", "language-model"])
def test_wrapped_models(make_model, make_ids, head):
    model = (make_model(model_class=head) if head else make_model()).train()
    regularizer = regularize(torch.nn.ModuleDict({"wrapped": model}), PTB)
    model(make_ids(2, 5))
    assert regularizer.penalty() > 0
    with pytest.raises(ValueError, match="no Transformer-XL in the Linear"):
        regularize(torch.nn.Linear(2, 2), PTB)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("built", ["model", "model_init"])
def test_trainer_adds_the_penalty_and_logs_the_loss_without(tmp_path, built, accumulation):
    """Steps are those of a loop that adds the penalty to its loss; the losses that are logged are without it."""
    activations = RegularizationArguments(ar=2.0, tar=1.0)
    # With documents, micro-batches would have means of different numbers of steps in time.
    documents = {"document_end": 0} if accumulation == 1 else {}
    stream, model = TokenStream(make_text(301) % 7, 5, 4, **documents), make_small(initial_memory="empty").train()
    regularizer, expected, memory = regularize(model, activations), [], {}
    for step in range(5):
        items = [stream[step * 4 + row] for row in range(4)]
        batch = {name: torch.stack([item[name] for item in items]) for name in items[0]}
        outputs = model(**batch, **memory)
        memory = memory_of(outputs)
        (outputs.loss + regularizer.penalty(batch["shift_labels"], batch.get("resets"))).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.5 * parameter.grad
                parameter.grad = None
        expected.append(outputs.loss.item())
    arguments = make_arguments(
        tmp_path, max_steps=5, optim="sgd", learning_rate=0.5, lr_scheduler_type="constant", max_grad_norm=0,
        gradient_accumulation_steps=accumulation, per_device_train_batch_size=4 // accumulation,
    )  # fmt: skip
    small = partial(make_small, initial_memory="empty")
    source = {"model": small()} if built == "model" else {"model_init": lambda: small()}
    trainer = TransfoXLTrainer(args=arguments, train_dataset=stream, regularization=activations, **source)
    trainer.train()
    found = [logs["loss"] for logs in trainer.state.log_history if "loss" in logs]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    torch.testing.assert_close(dict(trainer.model.named_parameters()), dict(model.named_parameters()))


def test_two_processes(tmp_path):
    """Without randomness the losses of one, penalty included; with everything on, no parameter is missed by DDP."""
    found = []
    for processes in (1, 2):
        arguments = {
            "processes": processes,
            "per_device_train_batch_size": 4 // processes,
            "per_device_eval_batch_size": 4 // processes,
            "ddp_find_unused_parameters": False,
            "max_steps": 5,
        }
        for name, regularization in {"penalty": {"ar": 0.2, "tar": 0.1}, "all": asdict(PTB)}.items():
            output = tmp_path / f"{name}-{processes}"
            output.mkdir()
            assert set(run(output=output, regularization=regularization, **arguments)) == {0}
            found.append([line[2:] for line in read_losses(output)])
    np.testing.assert_allclose(found[2], found[0], rtol=1e-5)
    assert np.isfinite(found[3]).all() and len(found[3]) == 5 and found[3] != found[1] != found[0]


def test_resumed_bit_for_bit(make_model, tmp_path):
    def trainer():
        set_seed(0)
        model = make_model(ext_len=3)
        stream = TokenStream(make_text(301), 5, 4, ext_len=3, varlen_seed=0)
        arguments = make_arguments(tmp_path, max_steps=8, save_strategy="steps", save_steps=5)
        return TransfoXLTrainer(model, arguments, train_dataset=stream, regularization=PTB)

    whole, resumed = trainer(), trainer()
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    losses = [[log["loss"] for log in t.state.log_history if "loss" in log] for t in (whole, resumed)]
    assert losses[0] == losses[1] and len(losses[0]) == 8


# --- arguments -------------------------------------------------------------------------------------------------------


def test_arguments_of_a_command(capsys):
    parser = HfArgumentParser(RegularizationArguments)
    [found] = parser.parse_args_into_dataclasses(["--word_dropout", "0.2", "--tar", "0.1"])
    assert found == RegularizationArguments(word_dropout=0.2, tar=0.1)
    assert found != RegularizationArguments() == parser.parse_args_into_dataclasses([])[0]
    text = " ".join(parser.format_help().split())
    assert text.count("in place of config.dropout") == 4 and "whole words" in text and "(TAR)" in text


@pytest.mark.parametrize("rate", [-0.1, 1.0, 2, math.nan])
@pytest.mark.parametrize(
    "name", ["word_dropout", "input_dropout", "attention_dropout", "mlp_dropout", "output_dropout"]
)
def test_rates_out_of_range(name, rate):
    with pytest.raises(ValueError, match=f"{name}={rate} must be at least 0 and less than 1"):
        RegularizationArguments(**{name: rate})


@pytest.mark.parametrize("coefficient", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["ar", "tar"])
def test_coefficients_out_of_range(name, coefficient):
    with pytest.raises(ValueError, match=f"{name}={coefficient} must be a number of at least 0"):
        RegularizationArguments(**{name: coefficient})


def test_locked_dropout_in_numbers():
    torch.manual_seed(0)
    states = torch.ones(200, 3, 50)
    dropped = LockedDropout(0.3)(states)
    assert torch.equal(dropped[:, 0], dropped[:, 2])
    assert dropped.mean() == pytest.approx(1, abs=0.03) and (dropped == 0).float().mean() == pytest.approx(
        0.3, abs=0.02
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"resets": torch.zeros(2, 3, dtype=torch.bool)}, "resets"),
        ({"resets": torch.zeros(2, 8, dtype=torch.long)}, "resets"),
        ({"attention_mask": [[1] * 8] * 2}, "attention_mask"),
        ({"position_ids": [list(range(8))] * 2}, "position_ids"),
        ({"input_ids": torch.arange(8)}, "input_ids"),
    ],
    ids=lambda value: str(next(iter(value))) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_is_refused_as_without_dropout(make_model, make_ids, given, message):
    model, inputs = make_model(initial_memory="empty").train(), {"input_ids": make_ids(2, 8)} | given
    with pytest.raises(ValueError, match=message) as plain:
        model(**inputs)
    regularize(model, RegularizationArguments(word_dropout=0.5))
    with pytest.raises(ValueError) as dropped:
        model(**inputs)
    assert str(dropped.value) == str(plain.value)
