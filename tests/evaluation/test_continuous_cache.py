"""The continuous cache against its formula, token by token in fp64, in evaluation and in generate."""

import copy
import itertools
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LogitsProcessorList

import adaptation_process
import launcher
from txl_hf import ContinuousCache, DynamicEvaluation, TransfoXLForCausalLM, evaluate_language_model, token_losses
from txl_hf.evaluation.language_model import evaluate_caches
from txl_hf.evaluation.reading import Reading
from txl_hf.transfo_xl.cache_transfo_xl import MemoryCache


@torch.no_grad()
def states_of(model: TransfoXLForCausalLM, ids: torch.Tensor, mems=None) -> tuple[torch.Tensor, torch.Tensor]:
    """(n, D) states that enter the softmax and (n, V) log-probabilities after each token of one text."""
    entered = []
    hook = model.lm_head.register_forward_pre_hook(lambda _, args: entered.append(args[0]))
    logits = model.eval()(ids[None], mems=mems).logits[0]
    hook.remove()
    return entered[0][0].double(), logits.double()


def by_hand(states: torch.Tensor, log_probs: torch.Tensor, ids: torch.Tensor, cache: ContinuousCache) -> torch.Tensor:
    """(n, V) probabilities of the mixture after each of n tokens, one by one."""
    mixed = []
    for t in range(len(ids)):
        p_cache = torch.zeros(log_probs.shape[1], dtype=torch.float64)
        for i in range(max(0, t - cache.size), t):
            p_cache[ids[i + 1]] += math.exp(cache.temperature * float(states[t] @ states[i]))
        p_model = log_probs[t].exp()
        if t > 0:
            p_model = (1 - cache.weight) * p_model + cache.weight * p_cache / p_cache.sum()
        mixed.append(p_model)
    return torch.stack(mixed)


CACHES = [
    ContinuousCache(size, weight, temperature)
    for size, weight, temperature in itertools.product([1, 7, 500], [0.0, 0.3], [0.0, 0.2])
]


@pytest.mark.parametrize("settings", [{}, {"cutoffs": [], "div_val": 1}], ids=str)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_formula(make_model, make_ids, settings, batch_size):
    """With any segments; the memory is long enough for one forward to give the states."""
    model, ids = make_model(mem_len=100, **settings), make_ids(1, 50, vocab_size=12)[0]
    streams = [states_of(model, stream) + (stream,) for stream in ids.tensor_split(batch_size)]
    for cache in CACHES:
        expected = []
        for states, log_probs, stream in streams:
            mixed = by_hand(states, log_probs, stream, cache)[:-1]
            expected.append(-mixed.gather(1, stream[1:, None])[:, 0].log())
        found = token_losses(model, ids, 6, batch_size=batch_size, cache=cache)
        torch.testing.assert_close(found, torch.cat(expected).float(), rtol=1e-4, atol=1e-4)
    assert torch.equal(found[:5] == token_losses(model, ids, 6, batch_size=batch_size)[:5], torch.arange(5) == 0)


def test_what_is_not_scored_is_looked_at(make_model, make_ids):
    model, ids, cache = make_model(ext_len=3), make_ids(1, 60, vocab_size=12)[0], ContinuousCache(20, 0.4, 0.1)
    whole = token_losses(model, ids, 6, cache=cache)
    torch.testing.assert_close(token_losses(model, ids, 6, warm_up=17, cache=cache), whole[16:])


def test_a_repeated_text_becomes_cheaper_beyond_the_memory(make_model, make_ids):
    model, ids = make_model(mem_len=4), make_ids(1, 40)[0].repeat(3)
    static = evaluate_language_model(model, ids, 4).nll
    assert evaluate_language_model(model, ids, 4, cache=ContinuousCache(60, 0.5, 1.0)).nll < static - 1


def test_several_caches_in_one_reading(make_model, make_ids):
    model, ids = make_model(), make_ids(1, 60, vocab_size=12)[0]
    passes = []
    model.transformer.register_forward_hook(lambda *_: passes.append(None))
    results = evaluate_caches(model, ids, Reading(6), [None, *CACHES])
    assert len(passes) == 10
    for cache, result in zip([None, *CACHES], results, strict=True):
        assert result.nll == pytest.approx(evaluate_language_model(model, ids, 6, cache=cache).nll, rel=1e-6)
        assert result.cache == (None if cache is None else cache.describe())
        assert result.nll == pytest.approx(token_losses(model, ids, 6, cache=cache).mean().item(), rel=1e-6)
    # With weight 0 it is the model alone, and of one position the temperature does not matter.
    assert len({round(result.nll, 5) for result in results}) == 1 + 1 + 4


class Widths(TorchDispatchMode):
    """All sizes of the tensors that are computed."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.found |= {size for tensor in tree_leaves(result) if torch.is_tensor(tensor) for size in tensor.shape}
        return result


def test_within_autocast_states_are_compared_in_fp32(make_model, make_ids):
    """The last states of a model are in fp32 under autocast too."""
    model, ids, cache = make_model(mem_len=100), make_ids(1, 50, vocab_size=12)[0], ContinuousCache(100, 0.9, 1.0)
    with torch.autocast("cpu", torch.bfloat16):
        states, log_probs = states_of(model, ids)
        found = token_losses(model, ids, 50, cache=cache)
        with cache.processor(model) as processor:
            scores = next_scores(model, ids[None], processor)
    expected = by_hand(states, log_probs, ids, cache).log().float()
    torch.testing.assert_close(found, -expected[:-1].gather(1, ids[1:, None])[:, 0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(scores[0], expected[-1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dynamic", [None, DynamicEvaluation(0.01)], ids=["static", "dynamic"])
def test_nothing_is_as_wide_as_the_vocabulary(make_model, make_ids, dynamic):
    model, ids = make_model(), make_ids(1, 50, vocab_size=12)[0]
    for evaluate in (token_losses, evaluate_language_model):
        with Widths() as widths:
            evaluate(model, ids, 6, cache=ContinuousCache(20, 0.3, 0.1), dynamic=dynamic)
        assert 16 in widths.found and 61 not in widths.found
    with Widths() as widths:
        model(ids[None])
    assert 61 in widths.found


def test_with_dynamic_evaluation(make_model, make_ids):
    """The weights follow the model's own loss; the cache looks at the states that they computed."""
    model, ids, cache = make_model(), make_ids(1, 60, vocab_size=12)[0], ContinuousCache(20, 0.3, 0.1)
    standing = DynamicEvaluation(0.0)
    found = token_losses(model, ids, 6, dynamic=standing, cache=cache)
    torch.testing.assert_close(found, token_losses(model, ids, 6, cache=cache), rtol=1e-5, atol=1e-5)
    dynamic = DynamicEvaluation(0.05)
    both = token_losses(model, ids, 6, dynamic=dynamic, cache=cache)
    alone = token_losses(model, ids, 6, dynamic=dynamic)
    # In half of the cases the cache is of no help, which costs the model's share at most.
    assert (both <= alone - math.log(0.7) + 1e-5).all() and (both < alone).any()
    without = token_losses(model, ids, 6, dynamic=dynamic, cache=ContinuousCache(20, 0.0, 0.1))
    torch.testing.assert_close(without, alone)


def test_with_dynamic_evaluation_by_hand(make_model, make_ids):
    """States of the past are those that the weights of their time computed; no step follows the cache's share."""
    model, ids, length = make_model().double(), make_ids(1, 60, vocab_size=12)[0], 6
    dynamic, cache = DynamicEvaluation(0.05), ContinuousCache(20, 0.3, 0.1)
    following, mems, read = copy.deepcopy(model).eval(), None, []
    for start in range(0, 59, length):
        part = ids[None, start : start + length + 1]
        read.append(states_of(following, part[0, :-1], mems))
        outputs = following(part[:, :-1], shift_labels=part[:, 1:], mems=mems)
        outputs.losses.mean().backward()
        with torch.no_grad():
            for parameter in following.parameters():
                parameter -= 0.05 * parameter.grad
        following.zero_grad()
        mems = outputs.mems
    states, log_probs = map(torch.cat, zip(*read, strict=True))
    expected = -by_hand(states, log_probs, ids[:59], cache).gather(1, ids[1:, None])[:, 0].log()
    found = token_losses(model, ids, length, dynamic=dynamic, cache=cache)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dynamic", [None, DynamicEvaluation(0.02)], ids=["static", "dynamic"])
def test_two_processes_agree_with_one(tmp_path, dynamic):
    """Each looks at its own streams alone, whose pasts are those of one process that reads all."""
    settings = {"cache": ContinuousCache(12, 0.4, 0.3), "dynamic": dynamic}
    started = launcher.start(adaptation_process.save_losses, 2, folder=tmp_path, **settings)
    assert launcher.join(started) == [0, 0]
    expected = adaptation_process.losses(**settings)
    for rank in (0, 1):
        torch.testing.assert_close(torch.load(tmp_path / f"{rank}.pt"), expected)
    assert (expected - adaptation_process.losses(cache=None, dynamic=dynamic)).abs().max() > 0.1


# --- generate --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"mem_len": 0}, {"cutoffs": [], "div_val": 1}], ids=str)
@pytest.mark.parametrize("size", [4, 100])
def test_generate_chooses_by_the_mixture(make_model, make_ids, settings, size):
    model, prompt = make_model(**{"mem_len": 100} | settings), make_ids(1, 12, vocab_size=8)
    cache = ContinuousCache(size, 0.6, 0.2)
    with cache.processor(model) as processor:
        outputs = model.generate(
            prompt,
            max_new_tokens=10,
            do_sample=False,
            logits_processor=LogitsProcessorList([processor]),
            output_scores=True,
            return_dict_in_generate=True,
        )
    text = outputs.sequences[0]
    expected = by_hand(*states_of(model, text[:-1]), text[:-1], cache)[11:]
    torch.testing.assert_close(torch.cat(outputs.scores).double().exp(), expected, rtol=1e-4, atol=1e-6)
    assert torch.equal(text[12:], expected.argmax(-1))
    assert not torch.equal(text, model.generate(prompt, max_new_tokens=10, do_sample=False)[0])


def generate(model, prompt, cache, processor=None, **settings):
    if processor is not None:
        return model.generate(prompt, max_new_tokens=8, logits_processor=[processor], **settings)
    with cache.processor(model) as processor:
        return model.generate(prompt, max_new_tokens=8, logits_processor=[processor], **settings)


def next_scores(model, prompt, processor, **settings) -> torch.Tensor:
    """(B, V), of the next token."""
    settings |= {"max_new_tokens": 1, "output_scores": True, "return_dict_in_generate": True}
    return model.generate(prompt, logits_processor=[processor], **settings).scores[0]


def test_padded_prompts_are_as_if_alone(make_model, make_ids):
    model, cache = make_model(mem_len=100), ContinuousCache(100, 0.6, 0.2)
    prompts = [make_ids(1, length, seed=length, vocab_size=8) for length in (5, 12, 1)]
    padded = torch.full((3, 12), 60)
    mask = torch.zeros_like(padded)
    for row, prompt in enumerate(prompts):
        padded[row, 12 - prompt.shape[1] :], mask[row, 12 - prompt.shape[1] :] = prompt[0], 1
    found = generate(model, padded, cache, do_sample=False, attention_mask=mask)
    for row, prompt in enumerate(prompts):
        alone = generate(model, prompt, cache, do_sample=False)
        assert found[row, 12:].tolist() == alone[0, prompt.shape[1] :].tolist()


def test_padding_behind_a_gap_in_the_mask_follows_nothing(make_model, make_ids):
    """As where the turns of a dialogue are padded one by one."""
    model, prompt, cache = make_model(mem_len=100), make_ids(1, 14), ContinuousCache(100, 0.6, 0.0)
    prompt[:, 6:9] = 60
    mask = (prompt != 60).long()
    with cache.processor(model) as processor:
        scores = next_scores(model, prompt, processor, attention_mask=mask)
    with torch.no_grad():
        p_model = model(prompt, attention_mask=mask).logits[0, -1].exp()
    followed = torch.cat([prompt[0, 1:6], prompt[0, 10:]])
    expected = 0.4 * p_model + 0.6 * followed.bincount(minlength=61) / 9
    torch.testing.assert_close(scores[0].exp(), expected)


def test_what_a_later_mask_hides_is_looked_at_no_more(make_model, make_ids):
    """As where the reply of one row ended before that of another, and generate padded it."""
    model, prompt, cache = make_model(mem_len=100), make_ids(2, 9), ContinuousCache(100, 0.6, 0.2)
    prompt[0, 6:] = 60
    text = torch.cat([prompt, make_ids(2, 3, seed=1)], dim=1)
    mask = torch.ones_like(text)
    mask[0, 6:9] = 0
    found = []
    for read_before in (True, False):
        memory = MemoryCache(model.config)
        with cache.processor(model) as processor:
            if read_before:
                next_scores(model, prompt, processor, past_key_values=memory)
            found.append(next_scores(model, text, processor, attention_mask=mask, past_key_values=memory))
    # What the model has read without the mask it remembers; what is looked up does not depend on it.
    before, fresh = (scores[0, 60].exp() for scores in found)
    assert before < 0.1 and fresh < 0.1


def test_a_state_that_is_not_finite_is_looked_at_by_none(make_model, make_ids):
    """As an overflow leaves it, in a document before this one."""
    model, ids = make_model(tie_word_embeddings=False), make_ids(1, 30)[0] % 50
    ids[4], ids[7] = 60, 55
    with torch.no_grad():
        model.transformer.embed_tokens.emb_layers[-1].weight[-1] = torch.nan
    caches = [None, ContinuousCache(30, 0.5, 0.1)]
    static, mixed = (token_losses(model, ids, 5, cache=cache, document_end=55) for cache in caches)
    broken = static.isnan()
    assert broken[:8].any() and not broken[8:].any()
    assert torch.equal(mixed.isnan(), broken) and (static[9:] != mixed[9:]).all()


@pytest.mark.parametrize("past", ["memory", "padding"])
def test_rows_of_the_same_tokens_keep_their_own_past(make_model, make_ids, past):
    """The same prompt after other memories, and a prompt that begins with the token which pads the other."""
    model, cache = make_model(mem_len=100), ContinuousCache(50, 0.6, 0.2)
    prompt = make_ids(1, 8, vocab_size=8).repeat(2, 1)
    prompt[:, :4] = 60
    mask = torch.ones_like(prompt)
    if past == "memory":
        settings = {"mems": model(make_ids(2, 9, seed=1)).mems}
        each = [{"mems": tuple(states[row : row + 1] for states in settings["mems"])} for row in range(2)]
    else:
        mask[0, :4] = 0
        settings, each = {}, [{}, {}]
    search = {"do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    together = generate(model, prompt, cache, attention_mask=mask, **settings, **search)
    for row, own in enumerate(each):
        alone = generate(model, prompt[row : row + 1], cache, attention_mask=mask[row : row + 1], **own, **search)
        assert torch.equal(together.sequences[row], alone.sequences[0])
        for scores, expected in zip(together.scores, alone.scores, strict=True):
            torch.testing.assert_close(scores[row : row + 1], expected, rtol=1e-4, atol=1e-4)


def test_one_processor_for_several_texts(make_model, make_ids):
    """A text that does not continue the one before is a new one."""
    model, cache = make_model(mem_len=100), ContinuousCache(100, 0.6, 0.2)
    with cache.processor(model) as processor:
        for seed, length in enumerate([12, 7, 12, 20]):
            prompt = make_ids(1, length, seed=seed, vocab_size=8)
            found = generate(model, prompt, cache, processor, do_sample=False)
            assert torch.equal(found, generate(make_model(mem_len=100), prompt, cache, do_sample=False))


@pytest.mark.slow
def test_a_compiled_forward_is_heard(make_model, make_ids):
    model, cache, prompt = make_model(mem_len=100), ContinuousCache(30, 0.6, 0.2), make_ids(1, 12, vocab_size=8)
    expected = generate(model, prompt, cache, do_sample=False)
    model.forward = torch.compile(model.forward, backend="eager")
    assert torch.equal(generate(model, prompt, cache, do_sample=False), expected)


def test_a_prompt_read_in_chunks_is_heard_as_a_whole(make_model, make_ids):
    model, cache, prompt = make_model(mem_len=100), ContinuousCache(30, 0.6, 0.2), make_ids(1, 12, vocab_size=8)
    found = generate(model, prompt, cache, do_sample=False, prefill_chunk_size=5)
    assert torch.equal(found, generate(model, prompt, cache, do_sample=False))


def test_a_text_is_continued_from_its_cache(make_model, make_ids):
    """As a server writes each turn of a dialogue."""
    model, cache, text = make_model(mem_len=100), ContinuousCache(100, 0.6, 0.2), make_ids(1, 12, vocab_size=8)
    whole, memory = text, MemoryCache(model.config)
    with cache.processor(model) as processor:
        for _ in range(3):
            text = generate(model, text, cache, processor, do_sample=False, past_key_values=memory)
    for _ in range(3):
        whole = generate(model, whole, cache, do_sample=False)
    assert torch.equal(text, whole)


def test_what_is_ruled_out_stays_ruled_out(make_model, make_ids):
    # Without the token that ends a text, which generate does not let one rule out.
    model, prompt, cache = make_model(), 1 + make_ids(1, 12, vocab_size=8), ContinuousCache(100, 0.9, 0.2)
    banned = prompt.unique().tolist()
    found = generate(model, prompt, cache, do_sample=False, bad_words_ids=[[token] for token in banned])
    assert not set(found[0, 12:].tolist()) & set(banned)


def test_states_that_are_not_those_of_the_text_are_refused(make_model, make_ids):
    model, prompt, cache = make_model(), make_ids(2, 12), ContinuousCache(10, 0.5, 1.0)
    expected = generate(model, prompt, cache, do_sample=False)
    with cache.processor(model) as processor:
        for settings, count in (({"prompt_lookup_num_tokens": 3}, ""), ({"num_beams": 4}, "1 states")):
            rows = prompt[:1] if count == "" else prompt
            with pytest.raises(
                RuntimeError, match=f"{count}.*not with beam search, assisted generation or other calls"
            ):
                generate(model, rows, cache, processor, **settings)
        with pytest.raises(RuntimeError, match="computed 0 states for a text of 12 tokens"):
            generate(make_model(), prompt, cache, processor)
        with pytest.raises(RuntimeError, match="sampling from input_ids"):
            embeds = model.get_input_embeddings()(prompt)
            model.generate(inputs_embeds=embeds, max_new_tokens=2, logits_processor=[processor])
        evaluate_language_model(model, prompt[0], 5)
        model(prompt)
        with pytest.raises(RuntimeError, match="computed .* states for a text of 12 tokens"):
            generate(model, prompt, cache, processor)
        assert torch.equal(generate(model, prompt, cache, processor, do_sample=False), expected), "nothing is left"
    assert not model.transformer._forward_hooks
    with pytest.raises(RuntimeError, match="computed 0 states"):
        generate(model, prompt, cache, processor)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0.1, 1.0), "size=0 must be an integer of at least 1"),
        ((10, 1.0, 1.0), "weight=1.0 must be a number at least 0 and below 1"),
        ((10, -0.1, 1.0), "weight=-0.1"),
        ((10, 0.1, -1.0), "temperature=-1.0 must be a finite number at least 0"),
        ((10, 0.1, math.nan), "temperature=nan"),
        ((10, "0.1", 1.0), "weight='0.1' must be a number"),
    ],
)
def test_bad_settings_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        ContinuousCache(*arguments)
