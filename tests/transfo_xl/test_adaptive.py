"""Adaptive input and softmax: probabilities, losses and embeddings for any bins."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from transformers import Trainer, TrainingArguments

from host_reads import HostReads
from models import random_softmax
from txl_hf import TransfoXLConfig, TransfoXLForCausalLM
from txl_hf.kernels import softmax as blocks
from txl_hf.transfo_xl import adaptive_transfo_xl
from txl_hf.transfo_xl.adaptive_transfo_xl import AdaptiveEmbedding, AdaptiveLogSoftmax, check_labels

BINS = {
    "no-cutoffs": {"cutoffs": [], "div_val": 1},
    "no-cutoffs-projected": {"cutoffs": [], "div_val": 1, "d_embed": 8},
    "div1": {"cutoffs": [9, 30], "div_val": 1},
    "div1-projected": {"cutoffs": [9, 30], "div_val": 1, "d_embed": 8},
    "div1-untied-projections": {"cutoffs": [9, 30], "div_val": 1, "d_embed": 8, "proj_share_all_but_first": False},
    "div2": {"cutoffs": [9, 30], "div_val": 2},
    "div4-one-wide": {"cutoffs": [9, 30], "div_val": 4},
    "div2-untied": {"cutoffs": [9, 30], "div_val": 2, "tie_word_embeddings": False},
    "div2-projections-tied-alone": {
        "cutoffs": [9, 30],
        "div_val": 2,
        "tie_word_embeddings": False,
        "tie_projs": [False, True, True],
    },
    "div1-projections-tied-alone": {"cutoffs": [9, 30], "div_val": 1, "d_embed": 8, "tie_word_embeddings": False},
    "div2-all-projections-tied": {"cutoffs": [9, 30], "div_val": 2, "tie_projs": [True, True, True]},
    "div2-proj-same-dim": {"cutoffs": [9, 30], "div_val": 2, "proj_same_dim": False},
}


@pytest.fixture(autouse=True)
def blocks_of_few_logits(monkeypatch):
    """The losses of the small models here are computed block by block, as those of large ones are."""
    monkeypatch.setattr(adaptive_transfo_xl, "FEW_LOGITS", -1)


@pytest.mark.parametrize(
    "changes", [{}, {"div_val": 1}, {"cutoffs": []}, {"tie_projs": [False, True, False]}], ids=str
)
def test_losses_block_by_block_are_those_of_plain_operations(make_config, changes):
    """With every gradient: they take turns by how many logits there are."""
    softmax, results = random_softmax(make_config(**changes)), []
    targets = torch.tensor([3, 44, 9, -100, 8, 30, 60, 60])
    for compute in (softmax.nll, softmax.plain_nll):
        hidden = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
        losses = compute(hidden, targets)
        weights = torch.arange(1.0, 9)
        results.append([losses, *torch.autograd.grad(losses @ weights, [hidden, *softmax.parameters()])])
    for blockwise, plain in zip(*results, strict=True):
        torch.testing.assert_close(blockwise, plain, atol=1e-5, rtol=1e-5)


@st.composite
def any_bins(draw):
    vocab_size = draw(st.integers(2, 40))
    cutoffs = sorted(draw(st.sets(st.integers(1, vocab_size - 1), max_size=4)))
    div_val = draw(st.integers(1, 3))
    d_embed = draw(st.sampled_from([81, 16, 100])) if div_val > 1 else draw(st.integers(1, 20))
    return {
        "vocab_size": vocab_size,
        "cutoffs": cutoffs,
        "div_val": div_val if d_embed // div_val ** len(cutoffs) else 1,
        "d_embed": d_embed,
        "proj_same_dim": draw(st.booleans()),
    }


@given(bins=any_bins(), seed=st.integers(0, 100))
@settings(max_examples=100, deadline=None)
def test_probabilities_sum_to_one_and_losses_are_theirs(bins, seed):
    config = TransfoXLConfig(d_model=16, n_layer=1, **bins)
    softmax = random_softmax(config, seed, std=1).double()
    embedding = AdaptiveEmbedding(config)
    for parameter in embedding.parameters():
        torch.nn.init.normal_(parameter)
    hidden = torch.randn(12, 16, dtype=torch.float64) * 3
    log_probs = softmax.log_prob(hidden)
    assert log_probs.shape == (12, config.vocab_size)
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones_like(hidden[:, 0]), atol=1e-12, rtol=0)
    targets = torch.randint(config.vocab_size, (12,))
    targets[::5] = -100
    losses = softmax(hidden, targets)
    expected = -log_probs.gather(1, targets.clamp(min=0)[:, None])[:, 0].masked_fill(targets == -100, 0)
    torch.testing.assert_close(losses, expected, atol=1e-12, rtol=1e-12)
    assert embedding(targets.clamp(min=0)[None]).shape == (1, 12, 16)


@given(bins=any_bins(), seed=st.integers(0, 100), top_k=st.integers(1, 30), tail=st.sampled_from([-6, 0, 6]))
@settings(max_examples=100, deadline=None)
def test_the_k_best_are_right_when_asked_for_alone(bins, seed, top_k, tail):
    softmax = random_softmax(TransfoXLConfig(d_model=16, n_layer=1, **bins), seed, std=1)
    if bins["cutoffs"]:
        softmax.clusters.bias.data += tail
    hidden = torch.randn(3, 2, 16)
    everything, best = softmax.log_prob(hidden), softmax.log_prob(hidden, top_k)
    k = min(top_k, bins["vocab_size"])
    assert torch.equal(best.topk(k).values, everything.topk(k).values)
    last = everything.topk(k).values[..., -1:]
    assert torch.equal(best.where(best >= last, -torch.inf), everything.where(everything >= last, -torch.inf))
    torch.testing.assert_close(best.exp().sum(-1), torch.ones(3, 2), atol=1e-5, rtol=0)


@pytest.mark.parametrize("changes", BINS.values(), ids=BINS)
def test_tied_parameters_are_one(make_model, changes):
    model = make_model(**changes)
    config = model.config
    embeddings, head = model.get_input_embeddings(), model.lm_head
    for table, layer in zip(embeddings.emb_layers, head.out_layers, strict=True):
        assert (table.weight is layer.weight) == config.tie_word_embeddings
    for i, tied in enumerate(config.tie_projs):
        projection = head.out_projs[i]
        if isinstance(projection, torch.nn.Identity):
            continue
        source = embeddings.emb_projs[0 if config.div_val == 1 else i]
        assert (projection.weight is source.weight) == tied
    # What accelerate looks at before it shards the two.
    together = bool({*embeddings.parameters()} & {*head.parameters()})
    assert (embeddings.weight is head.weight) == together


def test_identity_projection_has_no_parameter(make_model):
    """Quirk 6: bin 0 is projected even at equal width when div_val > 1, unless proj_same_dim=False."""
    for proj_same_dim, expected in ((True, 3), (False, 2)):
        model = make_model(proj_same_dim=proj_same_dim)
        names = [name for name, _ in model.named_parameters() if "emb_projs" in name]
        assert len(names) == expected, names


@pytest.mark.parametrize("changes", BINS.values(), ids=BINS)
def test_every_parameter_gets_a_gradient_without_targets_in_the_tail(make_model, make_ids, changes):
    """Quirk 20: otherwise DistributedDataParallel stops."""
    model = make_model(**changes).train()
    ids = make_ids(2, 6, vocab_size=9)
    model(ids, labels=ids).loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_resizing_changes_the_last_bin_and_keeps_the_others(make_model, make_ids):
    """Quirk 18: the cutoffs stay, so that the probabilities still sum to one."""
    for changes in BINS.values():
        model = make_model(**changes)
        ids = make_ids(2, 5)
        with torch.no_grad():
            before = model(ids).logits
        assert model.resize_token_embeddings(70, mean_resizing=False) is model.get_input_embeddings()
        with torch.no_grad():
            after = model(ids).logits
        assert after.shape[-1] == model.config.vocab_size == 70
        torch.testing.assert_close(after.exp().sum(-1), torch.ones(2, 5), atol=1e-5, rtol=0)
        shortlist = model.config.cutoffs[0] if model.config.cutoffs else 0
        torch.testing.assert_close(after[..., :shortlist], before[..., :shortlist])
        model.resize_token_embeddings(61)
        with torch.no_grad():
            torch.testing.assert_close(model(ids).logits, before, atol=1e-5, rtol=1e-5)
        model.resize_token_embeddings(pad_to_multiple_of=8)
        assert model.config.vocab_size == 64
        assert model.resize_token_embeddings() is model.get_input_embeddings() and model.config.vocab_size == 64
    with pytest.raises(ValueError, match="new_num_tokens=30.*30"):
        make_model().resize_token_embeddings(30)
    with pytest.raises(ValueError, match="pad_to_multiple_of=0 must be at least 1"):
        make_model().resize_token_embeddings(pad_to_multiple_of=0)


def test_a_last_bin_of_one_token_grows(make_model, make_ids):
    """New tokens are drawn around the mean of the old ones, and one has no deviation."""
    model = make_model(cutoffs=[9, 60], tie_word_embeddings=False)
    model.resize_token_embeddings(64)
    logits = model(make_ids(2, 5)).logits
    torch.testing.assert_close(logits.exp().sum(-1), torch.ones(2, 5), atol=1e-5, rtol=0)


def test_a_resizing_that_fails_leaves_the_model_as_it_was(make_model, monkeypatch):
    def fail(*args, **kwargs):
        raise MemoryError

    model = make_model(tie_word_embeddings=False)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    monkeypatch.setattr(model, "_get_resized_lm_head", fail)
    with pytest.raises(MemoryError):
        model.resize_token_embeddings(70)
    assert {name: parameter.shape for name, parameter in model.named_parameters()} == shapes


@pytest.mark.parametrize("name", ["bos_token_id", "eos_token_id", "pad_token_id"])
def test_resizing_keeps_the_special_tokens(make_model, name):
    """Without one of them the configuration cannot be saved, which would be noticed after the training."""
    model = make_model(**{name: 60})
    shapes = {key: parameter.shape for key, parameter in model.named_parameters()}
    with pytest.raises(ValueError, match=rf"{name}=60 must lie in the vocabulary, \[0, 60\)"):
        model.resize_token_embeddings(60)
    assert model.config.vocab_size == 61
    assert {key: parameter.shape for key, parameter in model.named_parameters()} == shapes
    setattr(model.config, name, 59)
    model.resize_token_embeddings(60)
    assert model.config.vocab_size == 60


@pytest.mark.parametrize("changes", BINS.values(), ids=BINS)
def test_resized_model_trains_saves_and_loads(make_model, make_ids, tmp_path, changes):
    model = make_model(**changes)
    model.resize_token_embeddings(77)
    new = torch.full((1, 5), 76)
    model(new, labels=new).loss.backward()
    model.save_pretrained(tmp_path)
    loaded = TransfoXLForCausalLM.from_pretrained(tmp_path).eval()
    ids = make_ids(1, 5, vocab_size=77)
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("changes", BINS.values(), ids=BINS)
def test_autocast_trains_and_evaluates(make_model, make_ids, changes, dtype):
    """Quirk 19: adaptive input and softmax take 16-bit activations, and sum in fp32."""
    model = make_model(**changes, init_std=0.1, proj_init_std=0.1).train()
    ids = make_ids(2, 6)
    with torch.autocast("cpu", dtype=dtype):
        first = model(ids, shift_labels=ids)
        second = model(ids, mems=first.mems, shift_labels=ids)
    (first.loss + second.loss).backward()
    assert first.losses.dtype == torch.float32
    assert all(states.dtype == dtype for states in first.mems)
    exact = model(ids, shift_labels=ids)
    torch.testing.assert_close(first.losses, exact.losses, atol=0.1, rtol=0.05)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_log_probabilities_are_fp32_whatever_the_dtype(make_model, make_ids, dtype):
    model = make_model(init_std=0.1, proj_init_std=0.1).to(dtype)
    logits = model(make_ids(2, 6)).logits
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.exp().sum(-1), torch.ones(2, 6), atol=1e-5, rtol=0)


# --- losses without the log-probabilities ----------------------------------------------------------------------------


def reference_losses(softmax, hidden, targets):
    """Through all log-probabilities."""
    log_probs = softmax.log_prob(hidden)
    picked = log_probs.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    return -picked.masked_fill(targets == -100, 0)


def losses_and_gradients(softmax, hidden, targets, function):
    hidden = hidden.clone().requires_grad_()
    softmax.zero_grad()
    losses = function(softmax, hidden, targets)
    weights = torch.linspace(0.5, 2, len(targets))
    (losses * weights).sum().backward()
    return losses, {"hidden": hidden.grad, **{name: p.grad.clone() for name, p in softmax.named_parameters()}}


TOKENS = {
    "of-all-bins": [3, 44, 9, 60, 8, 29, 30, 0, 31, 12, 3, 3, 59],
    "some-ignored": [-100, 44, 9, -100, 8, -100, 30],
    "of-the-head": [1, 2, 3, 4, 8],
    "of-the-last-bin": [30, 60, 45],
    "one": [17],
    "none": [-100, -100],
    "empty": [],
}


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "computed-again"])
@pytest.mark.parametrize("tokens", TOKENS.values(), ids=TOKENS)
@pytest.mark.parametrize("changes", BINS.values(), ids=BINS)
def test_losses_and_every_gradient_are_those_of_the_log_probabilities(make_config, monkeypatch, changes, tokens, kept):
    if not kept:
        for name, value in (("MAX_KEPT_LOGITS", -1), ("BLOCK_LOGITS", 21), ("MIN_BLOCK_WIDTH", 7)):
            monkeypatch.setattr(blocks, name, value)
    softmax = random_softmax(make_config(**changes))
    hidden, targets = torch.randn(len(tokens), 16), torch.tensor(tokens, dtype=torch.long)
    expected, expected_gradients = losses_and_gradients(softmax, hidden, targets, reference_losses)
    losses, gradients = losses_and_gradients(softmax, hidden, targets, AdaptiveLogSoftmax.nll)
    torch.testing.assert_close(losses, expected, atol=1e-5, rtol=1e-5)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-5, rtol=1e-4, msg=name)
    with torch.no_grad():
        torch.testing.assert_close(softmax(hidden, targets), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("whole", [False, True], ids=["rounded", "whole"])
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "computed-again"])
@pytest.mark.parametrize("tokens", TOKENS.values(), ids=TOKENS)
@pytest.mark.parametrize("bins", ["div1", "div2"])
def test_capacities_for_more_tokens_change_no_loss_and_no_gradient(
    make_config, monkeypatch, bins, tokens, kept, whole
):
    """In a graph each bin computes as many tokens as its capacity, and the host reads no number."""
    if not kept:
        for name, value in (("MAX_KEPT_LOGITS", -1), ("BLOCK_LOGITS", 21), ("MIN_BLOCK_WIDTH", 7)):
            monkeypatch.setattr(blocks, name, value)
    softmax = random_softmax(make_config(**BINS[bins]))
    hidden, targets = torch.randn(len(tokens), 16), torch.tensor(tokens, dtype=torch.long)
    expected, expected_gradients = losses_and_gradients(softmax, hidden, targets, AdaptiveLogSoftmax.nll)
    capacities = (len(tokens),) * 2 if whole else blocks.capacities_of_bins(softmax.config, targets)
    with blocks.fixed_capacities(capacities):
        by_bin = softmax.sort_targets(targets)

    def nll(softmax, hidden, targets):
        return softmax.nll(hidden, targets, by_bin)

    with HostReads(everything=True) as reads:
        losses, gradients = losses_and_gradients(softmax, hidden, targets, nll)
    assert reads.count == 0
    with HostReads(everything=True) as reads:
        losses_and_gradients(softmax, hidden, targets, AdaptiveLogSoftmax.nll)
    assert reads.count > 0
    torch.testing.assert_close(losses, expected, atol=1e-6, rtol=1e-5)
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "computed-again"])
def test_in_a_graph_a_bin_whose_words_are_all_forbidden_changes_no_gradient(make_config, monkeypatch, kept):
    """Its softmax has no finite logit, and tokens of other bins fill its capacity."""
    if not kept:
        monkeypatch.setattr(blocks, "MAX_KEPT_LOGITS", -1)
    softmax = random_softmax(make_config(**BINS["div1"]))
    with torch.no_grad():
        softmax.out_layers[0].bias[9:30] = -torch.inf
    hidden, targets = torch.randn(5, 16), torch.tensor([3, 44, -100, 60, 8])
    expected, expected_gradients = losses_and_gradients(softmax, hidden, targets, AdaptiveLogSoftmax.nll)
    with blocks.fixed_capacities((4, 4)):
        by_bin = softmax.sort_targets(targets)

    def nll(softmax, hidden, targets):
        return softmax.nll(hidden, targets, by_bin)

    losses, gradients = losses_and_gradients(softmax, hidden, targets, nll)
    torch.testing.assert_close(losses, expected)
    assert all(gradient.isfinite().all() for gradient in expected_gradients.values())
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("count", "capacity"), [(0, 16), (1, 16), (16, 16), (17, 32), (100, 128), (129, 192), (4900, 5120)]
)
def test_a_capacity_is_a_multiple_of_about_four_times_the_root_of_its_tokens(make_config, count, capacity):
    """At most as many as all targets, so that none is computed twice."""
    config, targets = make_config(cutoffs=[9, 30]), torch.tensor([3] * 6000 + [9] * count + [30])
    assert blocks.capacities_of_bins(config, targets) == (capacity, 16)
    assert blocks.capacities_of_bins(config, torch.tensor([9, 9, 9])) == (3, 3)
    assert blocks.capacities_of_bins(make_config(cutoffs=[]), targets) is None


@pytest.mark.parametrize(
    ("tokens", "widths"), [(2048, [2048, 52]), (4096, [1024, 1024, 52]), (6000, [1024, 1024, 52])]
)
@torch.no_grad()
def test_a_block_of_logits_is_16_mb_or_1024_words(make_config, monkeypatch, tokens, widths):
    """A block fits into a CPU's cache; narrower ones would make the product slow."""
    product, found = blocks.product, []

    def look(hidden, table, bias):
        found.append(product(hidden, table, bias))
        return found[-1]

    monkeypatch.setattr(blocks, "product", look)
    softmax = random_softmax(make_config(vocab_size=2100, cutoffs=[], div_val=1))
    softmax(torch.randn(tokens, 16), torch.randint(2100, (tokens,)))
    assert [block.shape for block in found] == [(tokens, width) for width in widths]


@pytest.mark.parametrize(("most", "times"), [(blocks.MAX_KEPT_LOGITS, 1), (5 * 61 - 1, 2)])
def test_few_logits_are_computed_once(make_config, monkeypatch, most, times):
    """Logits that the forward keeps are not computed again for the backward."""
    product, found = blocks.product, []

    def look(hidden, table, bias=None):
        found.append(bias is not None)
        return product(hidden, table, bias)

    monkeypatch.setattr(blocks, "product", look)
    monkeypatch.setattr(blocks, "MAX_KEPT_LOGITS", most)
    softmax = random_softmax(make_config(vocab_size=61, cutoffs=[], div_val=1))
    softmax.nll(torch.randn(5, 16), torch.arange(5)).sum().backward()
    assert sum(found) == times


@pytest.mark.parametrize(
    ("tokens", "clusters", "kept"), [(10_000, 2, True), (60_000, 2, False), (10_000, None, False)]
)
def test_on_a_gpu_what_fits_of_the_head_is_kept(monkeypatch, tokens, clusters, kept):
    """At 20,000 words; not of the tail, whose logits are as many and a smaller product away."""
    monkeypatch.setattr(blocks, "fuses", lambda hidden: False)
    with FakeTensorMode():
        hidden = torch.empty(tokens, 8, device="cuda")
        extra = None if clusters is None else torch.empty(tokens, clusters, device="cuda")
        targets = torch.empty(tokens, dtype=torch.long, device="cuda")
        task = blocks._Task(None, slice(0, 20_000), hidden, targets, 0, extra)
        assert blocks._may_be_kept(task) == kept


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "computed-again"])
@pytest.mark.parametrize("autocast", [False, True], ids=["parameters", "autocast"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_types_are_as_exact_as_through_log_probabilities(make_config, monkeypatch, dtype, autocast, kept):
    """Losses and gradients, against fp32, may be off by twice what the plain way in the same type is off."""
    if not kept:
        for name, value in (("MAX_KEPT_LOGITS", -1), ("BLOCK_LOGITS", 600), ("MIN_BLOCK_WIDTH", 16)):
            monkeypatch.setattr(blocks, name, value)
    config = make_config(d_model=64, d_embed=64, vocab_size=301, cutoffs=[50, 120])
    exact = random_softmax(config, std=0.2)
    hidden, targets = torch.randn(97, 64), torch.randint(301, (97,))
    reference = losses_and_gradients(exact, hidden, targets, reference_losses)
    narrow = exact if autocast else exact.to(dtype)
    hidden = hidden if autocast else hidden.to(dtype)

    def errors(function):
        with torch.autocast("cpu", dtype=dtype, enabled=autocast):
            losses, gradients = losses_and_gradients(narrow, hidden, targets, function)
        assert losses.dtype == torch.float32
        for name, parameter in narrow.named_parameters():
            assert gradients[name].dtype == parameter.dtype
        pairs = [(losses, reference[0])] + [(gradients[name], reference[1][name]) for name in gradients]
        return [((a.float() - b).square().mean() / b.square().mean()).sqrt().item() for a, b in pairs]

    for error, plain in zip(errors(AdaptiveLogSoftmax.nll), errors(reference_losses), strict=True):
        assert error <= 2 * plain + 1e-6


def test_the_operator_of_the_losses_keeps_its_promises_to_pytorch(make_config, monkeypatch):
    """Schema, shapes and gradients under tracing, as PyTorch's own checks see them."""
    softmax = random_softmax(make_config(div_val=1))
    calls = []
    operator = blocks.losses_of_bins
    monkeypatch.setattr(blocks, "losses_of_bins", lambda *inputs: calls.append(inputs) or operator(*inputs))
    softmax(torch.randn(7, 16), torch.tensor([3, 44, 9, -100, 8, 30, 60]))
    ((weight, bias, hidden, targets, head_targets, clusters, *others, _),) = calls
    leaves = [tensor.detach().requires_grad_() for tensor in (weight, bias, clusters)]
    hidden = [hidden[0].detach().clone().requires_grad_() for _ in hidden]
    # No logits are kept, as in a graph.
    torch.library.opcheck(operator, (*leaves[:2], hidden, targets, head_targets, leaves[2], *others, False))


class OnGpu(torch.Tensor):
    """Numbers of which the host is told that they are on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("bad", [-1, 61])
def test_a_gpu_compares_labels_by_itself(bad):
    """The device stops, as for any embedding, and the host has not had to wait."""
    check_labels(torch.tensor([0, 60, -100]).as_subclass(OnGpu), 61)
    with pytest.raises(RuntimeError, match=r"labels outside the vocabulary \[0, 61\)"):
        check_labels(torch.tensor([0, 60, bad]).as_subclass(OnGpu), 61)


@pytest.mark.parametrize("changes", [{}, {"div_val": 1}, {"cutoffs": []}], ids=str)
def test_compiled_losses_without_all_logits_are_the_same_and_name_a_bad_target(make_config, monkeypatch, changes):
    monkeypatch.setattr(blocks, "MAX_KEPT_LOGITS", -1)
    torch.compiler.reset()
    softmax = random_softmax(make_config(**changes))
    compiled = torch.compile(softmax, fullgraph=True, backend="aot_eager")
    hidden, targets = torch.randn(7, 16), torch.tensor([3, 44, 9, -100, 8, 30, 60])
    expected, expected_gradients = losses_and_gradients(softmax, hidden, targets, AdaptiveLogSoftmax.nll)
    losses, gradients = losses_and_gradients(softmax, hidden, targets, lambda _, *inputs: compiled(*inputs))
    torch.testing.assert_close(losses, expected)
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, msg=name)
    with pytest.raises(ValueError, match="labels holds 61, outside the vocabulary"):
        compiled(hidden, targets.masked_fill(targets == 60, 61))


def test_sorted_targets_that_are_there_before_give_the_same_losses(make_config):
    softmax = random_softmax(make_config())
    hidden, targets = torch.randn(7, 16), torch.tensor([3, 44, 9, -100, 8, 30, 60])
    sorted_before = softmax.sort_targets(targets)
    assert sorted_before.ends.tolist() == [0, 1, 1, 3, 4, 7]
    assert torch.equal(softmax(hidden, targets, by_bin=sorted_before), softmax(hidden, targets))


def test_counts_are_waited_for_on_the_gpu_that_has_the_targets(make_config, monkeypatch):
    """Else the host reads what was there before: the current GPU may be another one."""
    recorded = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: ("stream of", device))
    monkeypatch.setattr(
        torch.cuda, "Event", lambda: SimpleNamespace(record=lambda stream=None: recorded.append(stream))
    )
    softmax = random_softmax(make_config())
    with FakeTensorMode():
        softmax.sort_targets(torch.empty(7, dtype=torch.int64, device="cuda:1"))
    assert recorded == [("stream of", torch.device("cuda:1"))]


def test_a_loss_alone_holds_no_log_probabilities(make_model, make_ids):
    """The largest tensor that training keeps for the backward pass is no larger than a block."""
    sizes = []

    def pack(tensor):
        sizes.append(tensor.numel())
        return tensor

    for changes in ({"cutoffs": [100, 1000]}, {"cutoffs": []}):
        model = make_model(vocab_size=20_000, div_val=1, **changes).train()
        ids = make_ids(4, 100, vocab_size=20_000)
        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setattr(blocks, "MAX_KEPT_LOGITS", 2**18)
            loss = model(ids, shift_labels=ids, output_logits=False).loss
        loss.backward()
        assert max(sizes) <= 20_000 * 16, "the table itself"
        assert torch.isfinite(model.lm_head.out_layers[0].weight.grad).all()


def test_frozen_tables_and_repeated_backward(make_model, make_ids):
    model = make_model().train()
    model.lm_head.requires_grad_(False)
    ids = make_ids(2, 6)
    loss = model(ids, shift_labels=ids).loss
    loss.backward(retain_graph=True)
    once = model.transformer.layers[0].mlp.up_proj.weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(model.transformer.layers[0].mlp.up_proj.weight.grad, 2 * once)


@pytest.mark.parametrize("label", [-1, 61, -101])
def test_labels_outside_the_vocabulary(make_model, make_ids, label):
    ids = make_ids(2, 6)
    labels = ids.clone()
    labels[1, 2] = label
    for changes in ({}, {"cutoffs": [], "div_val": 1}):
        for output_logits in (True, False):
            with pytest.raises(ValueError, match=f"labels.*{label}.*61"):
                make_model(**changes)(ids, shift_labels=labels, output_logits=output_logits)


@pytest.mark.parametrize("changes", BINS.values(), ids=BINS.keys())
def test_a_second_derivative_needs_logits(make_model, make_ids, changes):
    """A gradient that is no function of the inputs any more would pass for a constant one."""
    model, ids = make_model("eager", **changes), make_ids(2, 5)
    parameters = list(model.parameters())
    with pytest.raises(RuntimeError, match="output_logits=True"):
        loss = model(ids, shift_labels=ids, output_logits=False).loss
        torch.autograd.grad(loss, parameters, create_graph=True)
    loss = model(ids, shift_labels=ids, output_logits=True).loss
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    assert all(gradient.requires_grad for gradient in gradients)


def test_shapes_of_losses_without_data(make_model, make_ids):
    model, ids = make_model().to("meta"), make_ids(2, 5).to("meta")
    outputs = model(ids, shift_labels=ids)
    assert outputs.losses.shape == (2, 5) and outputs.loss.shape == ()


def test_a_fused_head_of_others_computes_our_loss(make_model, make_ids):
    """TRL multiplies hidden states by the head's weight and adds its bias: the whole softmax, where there is one."""
    model, ids = make_model(cutoffs=[], div_val=1), make_ids(2, 6)
    torch.nn.init.normal_(model.lm_head.bias)
    results = []
    for fused in (False, True):
        if fused:
            hidden = model.base_model(ids).last_hidden_state[:, :-1]
            logits = hidden @ model.get_output_embeddings().weight.T + model.get_output_embeddings().bias
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        else:
            loss = model(ids, labels=ids).loss
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("changes", [{}, {"div_val": 1}, {"cutoffs": [], "d_embed": 8}], ids=str)
def test_a_softmax_that_is_no_single_table_has_no_bias(make_model, changes):
    assert not hasattr(make_model(**changes).lm_head, "bias")


@pytest.mark.parametrize("changes", [{}, {"div_val": 1}, {"cutoffs": []}, {"cutoffs": [], "d_embed": 8}], ids=str)
@pytest.mark.parametrize("kind", ["PROMPT_TUNING", "P_TUNING"])
def test_prompts_are_tuned_by_peft(make_model, make_ids, changes, kind):
    """PEFT embeds the tokens itself and puts its prompt before them."""
    peft = pytest.importorskip("peft")
    model, ids = make_model(**changes), make_ids(2, 5)
    config = {"PROMPT_TUNING": peft.PromptTuningConfig, "P_TUNING": peft.PromptEncoderConfig}[kind]
    tuned = peft.get_peft_model(model, config(task_type="CAUSAL_LM", num_virtual_tokens=3))
    outputs = tuned(input_ids=ids, labels=ids)
    prompt = tuned.get_prompt(batch_size=2)
    embeds = torch.cat([prompt, model.get_input_embeddings()(ids)], dim=1)
    expected = model(inputs_embeds=embeds, output_logits=True, labels=torch.cat([torch.full((2, 3), -100), ids], 1))
    torch.testing.assert_close(outputs.loss, expected.loss)
    outputs.loss.backward()
    gradients = [p.grad for p in tuned.prompt_encoder.parameters() if p.grad is not None]
    assert any(gradient.norm() > 0 for gradient in gradients)
    generated = tuned.generate(input_ids=ids, max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=60)
    assert generated.shape == (2, 8)


def test_an_adapter_of_each_row_is_refused_where_distances_go(make_model, make_ids):
    """PEFT would take as many distances as rows for these rows; elsewhere each row has its adapter."""
    peft = pytest.importorskip("peft")
    ids, names = make_ids(4, 4), ["a", "a", "b", "b"]

    def adapted(**changes):
        config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, **changes)
        model = peft.get_peft_model(make_model(cutoffs=[], div_val=1, mem_len=0), config, adapter_name="a")
        model.add_adapter("b", config)
        return model.eval()

    with pytest.raises(ValueError, match="an adapter on r_proj, into which distances go, is the same for all rows"):
        adapted()(input_ids=ids, adapter_names=names)
    model = adapted(exclude_modules=["r_proj"])
    together = model(input_ids=ids, adapter_names=names).logits
    for name, rows in (("a", slice(0, 2)), ("b", slice(2, 4))):
        model.set_adapter(name)
        torch.testing.assert_close(model(input_ids=ids[rows]).logits, together[rows], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["PROMPT_TUNING", "P_TUNING"])
def test_prompts_train_with_trainer(make_model, make_ids, tmp_path, kind):
    """And nothing else does."""
    peft = pytest.importorskip("peft")
    config = {"PROMPT_TUNING": peft.PromptTuningConfig, "P_TUNING": peft.PromptEncoderConfig}[kind]
    tuned = peft.get_peft_model(make_model(), config(task_type="CAUSAL_LM", num_virtual_tokens=3))
    before = {name: parameter.clone() for name, parameter in tuned.named_parameters()}
    texts = [{"input_ids": row, "labels": row} for row in make_ids(4, 5)]
    options = TrainingArguments(str(tmp_path), max_steps=2, learning_rate=0.1, report_to=[], use_cpu=True)
    assert Trainer(tuned, options, train_dataset=texts).train().global_step == 2
    changed = {name for name, parameter in tuned.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == {name for name, parameter in tuned.named_parameters() if parameter.requires_grad} != set()
