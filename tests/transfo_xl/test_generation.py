"""`generate` in every mode: what it writes equals what the model says when it is asked token by token."""

import string
from pathlib import Path

import pytest
import torch
import transformers
from packaging import version
from transformers import DynamicCache, GenerationConfig, StaticCache
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.generation.streamers import BaseStreamer

from models import COMPILERS
from txl_hf import TransfoXLForCausalLM, TransfoXLForSequenceClassification, TransfoXLTokenizer
from txl_hf.kernels.static_cache import StaticMemoryCache
from txl_hf.memories import memory_of
from txl_hf.transfo_xl.adaptive_transfo_xl import AdaptiveLogSoftmax
from txl_hf.transfo_xl.attention_transfo_xl import OPERATORS
from txl_hf.transfo_xl.cache_transfo_xl import MemoryCache

VARIANTS = {
    "empty": {},
    "zeros": {"initial_memory": "zeros"},
    "zeros-pre_lnorm-same_length": {"initial_memory": "zeros", "pre_lnorm": True, "same_length": True},
    "same_length-besides-self": {"same_length": True, "same_length_counts_self": False},
    "shaw": {"attn_type": 1},
    "no-memory": {"mem_len": 0},
    "absolute": {"attn_type": 2, "mem_len": 0},
    "absolute-learned": {"attn_type": 3, "mem_len": 0, "tgt_len": 40},
}


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS)
def model(request, make_model):
    model = make_model(**request.param)
    # No token ends the text, so that every length is the one asked for.
    model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=60)
    return model


@pytest.fixture
def memory_model(make_model):
    model = make_model()
    model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=60)
    return model


@torch.no_grad()
def by_hand(model, ids, steps, memory=None):
    """Greedy continuation with mems, one token at a time; without a memory by reading the whole text each time."""
    text, memory = ids, memory or {}
    segment = ids
    for _ in range(steps):
        output = model(segment, **memory)
        token = output.logits[:, -1:].argmax(-1)
        text = torch.cat([text, token], 1)
        memory = memory_of(output)
        segment = token if model.config.mem_len else text
    return text


@pytest.mark.parametrize("prompt", [1, 4, 13])
def test_greedy(model, make_ids, prompt):
    ids = make_ids(2, prompt)
    assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), by_hand(model, ids, 12))


def test_prompt_as_embeddings(model, make_ids):
    ids = make_ids(2, 5)
    embeds = model.get_input_embeddings()(ids)
    options = {"max_new_tokens": 9, "do_sample": False}
    if model.config.mem_len == 0:
        with pytest.raises(ValueError, match="mem_len=0.*input_ids"):
            model.generate(inputs_embeds=embeds, **options)
    else:
        assert torch.equal(model.generate(inputs_embeds=embeds, **options), model.generate(ids, **options)[:, 5:])


def test_uncached_equals_cached_while_memory_covers_the_text(make_model, make_ids):
    """Quirk 24: a step feeds the new token alone, not the prompt again beside its memory."""
    model = make_model(mem_len=40)
    ids = make_ids(2, 5)
    options = {"max_new_tokens": 15, "do_sample": False, "eos_token_id": None, "pad_token_id": 60}
    assert torch.equal(model.generate(ids, use_cache=True, **options), model.generate(ids, use_cache=False, **options))


@pytest.mark.parametrize("search", [{}, {"num_beams": 3}, {"cache_implementation": "static"}], ids=str)
def test_gradient_checkpointing_in_training_mode_forgets_nothing(make_model, make_ids, search):
    """It fills no cache, so that each step reads the whole text, after the memory that it starts from."""
    model, ids = make_model(mem_len=40).train(), make_ids(2, 5)
    options = {"max_new_tokens": 15, "do_sample": False, "eos_token_id": None, "pad_token_id": 60, **search}
    starts = [{}]
    if "num_beams" not in search:
        # generate would reorder mems as a cache.
        starts.append({"mems": tuple(states.detach() for states in model(make_ids(2, 5, seed=1)).mems)})
    expected = [model.generate(ids, **start, **options) for start in starts]
    model.gradient_checkpointing_enable()
    for start, text in zip(starts, expected, strict=True):
        assert torch.equal(model.generate(ids, **start, **options), text)
    with pytest.raises(ValueError, match="gradient checkpointing.*inputs_embeds.*give generate input_ids"):
        model.generate(inputs_embeds=model.get_input_embeddings()(ids).detach(), **options)


def test_left_padded_batch_equals_one_by_one(model, make_ids):
    if model.config.initial_memory == "zeros":
        pytest.skip("the zero states stand before the padding, further away")
    pads = (0, 3, 7)
    ids = make_ids(3, 9)
    mask = torch.stack([torch.arange(9) >= pad for pad in pads]).long()
    batch = model.generate(ids, attention_mask=mask, max_new_tokens=14, do_sample=False)
    for row, pad in enumerate(pads):
        alone = model.generate(ids[row : row + 1, pad:], max_new_tokens=14, do_sample=False)
        assert torch.equal(batch[row, pad:], alone[0])


def test_beams(model, make_ids):
    """The best beam's score is what the model gives its text, whatever the beams were reordered to."""
    ids = make_ids(2, 4)
    output = model.generate(
        ids,
        max_new_tokens=2,
        num_beams=4,
        num_return_sequences=4,
        length_penalty=0.0,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    for text, score in zip(output.sequences, output.sequences_scores, strict=True):
        with torch.no_grad():
            prompt = model(text[None, :4])
            second = model(text[None, 4:5], mems=prompt.mems) if model.config.mem_len else model(text[None, :5])
        total = prompt.logits[0, -1, text[4]] + second.logits[0, -1, text[5]]
        torch.testing.assert_close(total, score, atol=1e-4, rtol=1e-4)


def test_sampling_draws_from_the_models_distribution(memory_model, make_ids):
    ids = make_ids(1, 4)
    torch.manual_seed(0)
    texts = memory_model.generate(ids, max_new_tokens=1, do_sample=True, top_k=0, num_return_sequences=4000)
    counts = torch.bincount(texts[:, -1], minlength=61) / 4000
    with torch.no_grad():
        expected = memory_model(ids).logits[0, -1].exp()
    assert (counts - expected).abs().max() < 0.04
    torch.manual_seed(1)
    options = {"max_new_tokens": 9, "do_sample": True, "top_p": 0.9, "temperature": 0.7}
    assert memory_model.generate(ids, **options).shape == (1, 13)


@pytest.mark.parametrize("beams", [1, 3])
def test_mems_as_a_start(make_model, make_ids, beams):
    for changes in ({}, {"initial_memory": "zeros", "same_length": True}, {"attn_type": 1}):
        model = make_model(**changes)
        context, prompt = make_ids(2, 5, seed=1), make_ids(2, 3, seed=2)
        with torch.no_grad():
            mems = model(context).mems
        options = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "pad_token_id": 60}
        text = model.generate(prompt, mems=mems, num_beams=beams, **options)
        if beams == 1:
            assert torch.equal(text, by_hand(model, prompt, 9, {"mems": mems}))
        one = model.generate(prompt[1:], mems=tuple(m[1:] for m in mems), num_beams=beams, **options)
        assert torch.equal(text[1:], one)


def test_generation_continues_a_cache(model, make_ids):
    if model.config.mem_len == 0:
        pytest.skip("nothing is remembered")
    ids = make_ids(2, 4)
    whole = model.generate(ids, max_new_tokens=14, do_sample=False)
    first = model.generate(ids, max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
    text = model.generate(first.sequences, past_key_values=first.past_key_values, max_new_tokens=8, do_sample=False)
    assert torch.equal(text, whole)


def test_streamer(memory_model, make_ids):
    class Collect(BaseStreamer):
        def __init__(self):
            self.tokens, self.ended = [], False

        def put(self, value):
            self.tokens += value.flatten().tolist()

        def end(self):
            self.ended = True

    streamer = Collect()
    text = memory_model.generate(make_ids(1, 4), max_new_tokens=9, do_sample=False, streamer=streamer)
    assert streamer.tokens == text[0].tolist() and streamer.ended


def test_chunked_prefill(memory_model, make_ids):
    """Chunks are segments: while memory covers the prompt they change nothing."""
    memory_model.reset_memory_length(30)
    ids = make_ids(2, 11)
    options = {"max_new_tokens": 9, "do_sample": False}
    chunked = memory_model.generate(ids, prefill_chunk_size=4, **options)
    assert torch.equal(chunked, memory_model.generate(ids, **options))


@pytest.mark.skipif(version.parse(transformers.__version__) < version.parse("5.23"), reason="not offered before")
@pytest.mark.parametrize("start", ["nothing", "zeros", "mems"])
def test_chunked_prefill_continues_a_cache(make_model, make_ids, start):
    """The chunks are those of the new text alone, whatever memory the cache began with."""
    model = make_model(initial_memory="zeros" if start == "zeros" else "empty")
    text, new = make_ids(2, 9), make_ids(2, 5, seed=1)
    mask = torch.ones(2, 14, dtype=torch.long)
    mask[0, :8] = 0
    with torch.no_grad():
        memory = memory_of(model(make_ids(2, 4, seed=2))) if start == "mems" else {}
        cache = model(text, **memory, attention_mask=mask[:, :9], use_cache=True).past_key_values
        memory = memory_of(model(text, **memory, attention_mask=mask[:, :9]))
        for part in new[:, :4].split(2, dim=1):
            memory = memory_of(model(part, **memory))
    written = model.generate(
        torch.cat([text, new], dim=1),
        attention_mask=mask,
        past_key_values=cache,
        prefill_chunk_size=2,
        max_new_tokens=6,
        do_sample=False,
        eos_token_id=None,
    )
    assert torch.equal(written[:, 13:], by_hand(model, new[:, 4:], 6, memory))


@pytest.mark.parametrize("has_package", [True, False], ids=["package", "copy"])
def test_static_cache(model, make_ids, monkeypatch, has_package):
    """Also transformers' own, which the code beside a model's weights uses, like its layers in a `MemoryCache`."""
    if not has_package:
        monkeypatch.setattr(OPERATORS, "static_cache", None)
        monkeypatch.setattr(OPERATORS, "cache_layer", DynamicSlidingWindowLayer)
    if model.config.mem_len == 0:
        pytest.skip("nothing is remembered")
    for prompt in (2, 13):
        ids = make_ids(2, prompt)
        mask = torch.ones_like(ids)
        if model.config.initial_memory == "empty":
            mask[0, :1] = 0
        options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "disable_compile": True}
        static = model.generate(ids, cache_implementation="static", **options)
        assert torch.equal(static, model.generate(ids, **options))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"initial_memory": "zeros"},
        pytest.param({"attn_implementation": "eager"}, marks=pytest.mark.slow),
    ],
    ids=["empty", "zeros", "eager"],
)
def test_static_cache_compiled_once_without_graph_breaks(make_model, make_ids, changes):
    """A number of the host that changes with every token would be an input of the graph, captured anew each time."""
    model = make_model(n_layer=1, **changes)
    model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=60)
    texts = [make_ids(2, 3), make_ids(2, 5)]
    expected = [model.generate(ids, max_new_tokens=12, do_sample=False) for ids in texts]
    torch.compiler.reset()
    compiled = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    steps = []

    def forward(*args, **kwargs):
        tokens = kwargs["input_ids"].shape[1]
        steps.append(tokens)
        return compiled(*args, **kwargs) if tokens == 1 else type(model).forward(model, *args, **kwargs)

    model.forward = forward
    with torch._dynamo.config.patch(error_on_recompile=False, recompile_limit=1, fail_on_recompile_limit_hit=True):
        for ids, text in zip(texts, expected, strict=True):
            cache = StaticMemoryCache(model.config)
            written = model.generate(ids, max_new_tokens=12, do_sample=False, past_key_values=cache)
            assert torch.equal(written, text)
            assert cache.get_seq_length() == written.shape[1] - 1
    assert steps == [3] + [1] * 11 + [5] + [1] * 11


@pytest.mark.parametrize(
    "changes", [{}, pytest.param({"initial_memory": "zeros"}, marks=pytest.mark.slow)], ids=["empty", "zeros"]
)
@pytest.mark.slow
@pytest.mark.parametrize("backend", COMPILERS)
def test_static_cache_with_the_prompt_in_a_graph(make_model, make_ids, changes, backend):
    """As a user compiles, all of the forward, whoever makes the cache: `generate`, the model itself or the caller."""
    model = make_model(n_layer=1, **changes)
    model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=60)
    ids, mask = make_ids(2, 5), torch.ones(2, 5, dtype=torch.long)
    if not changes:
        mask[0, :2] = 0
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    expected = model.generate(ids, **options)
    first = model(ids, attention_mask=mask, use_cache=True)
    torch.compiler.reset()
    model.forward = torch.compile(model.forward, fullgraph=True, backend=backend)
    for _ in range(2):
        assert torch.equal(model.generate(ids, cache_implementation="static", **options), expected)
    static = StaticCache(model.config, max_cache_len=1 + model.config.mem_len)
    assert torch.equal(model.generate(ids, past_key_values=static, **options), expected)
    found = model(ids, attention_mask=mask, use_cache=True)
    assert isinstance(found.past_key_values, MemoryCache)
    torch.testing.assert_close(found.logits, first.logits)


@pytest.mark.parametrize("is_looked_up", [True, False], ids=["prompt-lookup", "assistant"])
def test_tokens_of_a_static_cache_cannot_be_taken_back(make_model, make_ids, is_looked_up):
    model, ids = make_model(), make_ids(1, 7)
    options = {"prompt_lookup_num_tokens": 3} if is_looked_up else {"assistant_model": make_model(n_layer=1)}
    cache = StaticMemoryCache(model.config)
    with pytest.raises(ValueError, match="take tokens back, which a static cache cannot: leave past_key_values out"):
        model.generate(ids, past_key_values=cache, max_new_tokens=4, do_sample=False, **options)
    model(ids, past_key_values=cache, use_cache=True)
    # What stops one token late where it can take it back asks for this.
    assert not any(layer.is_croppable for layer in cache.layers)
    cache.crop(0)
    with pytest.raises(NotImplementedError, match="a static cache takes no tokens back"):
        cache.crop(-1)


@pytest.mark.parametrize("kind", ["assistant", "prompt-lookup"])
@pytest.mark.parametrize(
    "changes", [{}, pytest.param({"initial_memory": "zeros"}, marks=pytest.mark.slow)], ids=["empty", "zeros"]
)
def test_assisted_decoding(make_model, make_ids, changes, kind):
    """Exact while the memory covers the text; beyond it, with one segment for each guess, as any segmentation is."""
    model = make_model(mem_len=40, **changes)
    assistant = make_model(mem_len=40, n_layer=1, seed=3, **changes)
    for each in (model, assistant):
        each.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=60)
    ids = make_ids(1, 6)
    options = {"max_new_tokens": 20, "do_sample": False}
    expected = model.generate(ids, **options)
    how = {
        "assistant": {"assistant_model": assistant},
        "prompt-lookup": {"prompt_lookup_num_tokens": 3},
    }[kind]
    assert torch.equal(model.generate(ids, **how, **options), expected)
    assert model.config.n_layer == 2
    short = make_model(same_length=True, n_layer=1)
    short.generation_config = model.generation_config
    if kind == "assistant":
        how["assistant_model"] = make_model(same_length=True, n_layer=1, seed=3)
        how["assistant_model"].generation_config = model.generation_config
    assert torch.equal(short.generate(ids, **how, **options), short.generate(ids, **options))


def test_logits_to_keep_and_return_dict(memory_model, make_ids):
    ids = make_ids(2, 5)
    with torch.no_grad():
        everything = memory_model(ids)
        torch.testing.assert_close(memory_model(ids, logits_to_keep=2).logits, everything.logits[:, -2:])
        kept = memory_model(ids, logits_to_keep=torch.tensor([0, 3])).logits
        torch.testing.assert_close(kept, everything.logits[:, [0, 3]])
        logits, mems = memory_model(ids, return_dict=False)
        assert torch.equal(logits, everything.logits) and len(mems) == 2
        loss, mems, losses = memory_model(ids, labels=ids, output_logits=False, return_dict=False)
        assert loss.dim() == 0 and len(mems) == 2 and losses.shape == (2, 4)
        loss, logits, mems, losses = memory_model(ids, labels=ids, output_logits=True, return_dict=False)
        assert logits.shape == (2, 5, 61)


def test_outputs_are_tuples_where_the_configuration_says_so(make_model, make_ids):
    model = make_model(return_dict=False)
    loss, logits, mems, losses = model(make_ids(2, 5), labels=make_ids(2, 5))
    assert logits.shape == (2, 5, 61)
    assert loss.dim() == 0 and len(mems) == 2 and losses.shape == (2, 4)
    classifier = make_model(model_class=TransfoXLForSequenceClassification, return_dict=False)
    assert classifier(make_ids(1, 5))[0].shape == (1, 2)


@pytest.mark.parametrize("forget", [False, True])
def test_logits_beside_a_loss_are_not_those_that_generate_hands_out(make_model, make_ids, tmp_path, forget):
    """`output_logits` is a field of the model and an option of generate."""
    model = make_model(output_logits=True)
    ids, options = make_ids(2, 4), {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    text = model.generate(ids, **options)
    assert isinstance(text, torch.Tensor)
    model.save_pretrained(tmp_path)
    if forget:
        (tmp_path / "generation_config.json").unlink()
    loaded = TransfoXLForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.output_logits and torch.equal(loaded.generate(ids, **options), text)
    output = loaded.generate(ids, output_logits=True, return_dict_in_generate=True, **options)
    assert len(output.logits) == 5


@pytest.mark.slow
def test_twenty_thousand_tokens_take_no_more_memory_than_two_thousand(tmp_path):
    """Peak resident memory of fresh processes, once the memory is full."""
    import subprocess
    import sys

    script = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "import torch\n"
        "from peak_memory import peak_memory\n"
        "from txl_hf import TransfoXLConfig, TransfoXLForCausalLM\n"
        "torch.set_num_threads(1)\n"
        "torch.manual_seed(0)\n"
        "model = TransfoXLForCausalLM(TransfoXLConfig(vocab_size=64, cutoffs=[], div_val=1, d_model=64, d_embed=64,"
        " n_head=2, d_head=32, d_inner=64, n_layer=2, mem_len=512, initial_memory='empty')).eval()\n"
        "text = model.generate(torch.zeros(1, 1, dtype=torch.long), max_new_tokens=int(sys.argv[1]), do_sample=True,"
        " eos_token_id=None, pad_token_id=0)\n"
        "assert text.shape[1] == int(sys.argv[1]) + 1\n"
        "print(peak_memory() // 1024)\n"
    )
    peaks = []
    for tokens in (2_000, 20_000):
        run = subprocess.run([sys.executable, "-c", script, str(tokens)], capture_output=True, text=True, check=True)
        peaks.append(int(run.stdout.split()[-1]))
    # The keys of 18,000 more tokens would take 18,000 · 2 layers · 2 · 64 · 4 bytes = 18 MB; the ids take 0.15 MB.
    assert peaks[1] - peaks[0] < 6_000, peaks


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_cache_holds_no_more_than_the_memory(make_model, make_ids, cache):
    model = make_model()
    cache = (
        DynamicCache(config=model.config) if cache == "dynamic" else StaticCache(config=model.config, max_cache_len=99)
    )
    model.generate(make_ids(1, 3), past_key_values=cache, max_new_tokens=40, do_sample=False, eos_token_id=None)
    assert all(layer.keys.untyped_storage().nbytes() <= 4 * 2 * 8 * (6 + 1) for layer in cache.layers)


def test_saved_model_generates_the_same(make_model, make_ids, tmp_path):
    model = make_model(initial_memory="zeros")
    model.save_pretrained(tmp_path)
    loaded = TransfoXLForCausalLM.from_pretrained(tmp_path)
    ids = make_ids(2, 4)
    options = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "pad_token_id": 60}
    assert torch.equal(loaded.generate(ids, **options), model.generate(ids, **options))


# --- clusters that cannot hold the next token are not computed -------------------------------------------------------


@pytest.fixture
def count_bins(monkeypatch):
    """Which tail bins the softmax computed, in order."""
    computed = []
    compute = AdaptiveLogSoftmax.logits

    def spy(self, hidden_states, i):
        computed.extend([i] if i > 0 else [])
        return compute(self, hidden_states, i)

    monkeypatch.setattr(AdaptiveLogSoftmax, "logits", spy)
    return computed


# How many clusters are probable: most of a trained model's tokens are in none, the worst case is a token in the last.
WEIGHTS = {"head": [-6.0, -7.0], "random": [0.0, 0.0], "tail": [0.0, 8.0]}
PRUNED = {
    "greedy": {"do_sample": False},
    "sample": {"do_sample": True, "top_k": 3, "temperature": 0.7},
    "sample-all-warpers": {"do_sample": True, "top_k": 6, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.95},
    "beams": {"do_sample": False, "num_beams": 3},
    "beams-sample": {"do_sample": True, "num_beams": 2, "top_k": 4},
    "min-new-tokens": {"do_sample": False, "min_new_tokens": 9, "eos_token_id": [3, 40]},
    "several-ends-and-beams": {"do_sample": False, "num_beams": 2, "eos_token_id": [3, 40, 50]},
    "no-cache": {"do_sample": False, "use_cache": False},
}
WHOLE = {
    "repetition-penalty": {"do_sample": False, "repetition_penalty": 5.0},
    "no-repeat": {"do_sample": False, "no_repeat_ngram_size": 2},
    "bias": {"do_sample": False, "sequence_bias": [[[60], 9.0]]},
    "sample-without-top-k": {"do_sample": True, "top_k": 0},
    "top-h-before-top-k": {"do_sample": True, "top_h": 0.4},
    "scores": {"do_sample": False, "output_scores": True, "return_dict_in_generate": True},
    "logits": {"do_sample": False, "output_logits": True, "return_dict_in_generate": True},
    "prompt-lookup": {"do_sample": False, "prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("biases", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("div_val", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("options", PRUNED.values(), ids=PRUNED)
def test_pruned_generation_writes_the_same(make_model, make_ids, count_bins, monkeypatch, options, div_val, biases):
    model = make_model(div_val=div_val)
    model.lm_head.clusters.bias.data = torch.tensor(biases)
    ids = make_ids(2, 6)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    options = {"max_new_tokens": 14, "eos_token_id": None, "pad_token_id": 60, "attention_mask": mask} | options

    def generate():
        count_bins.clear()
        torch.manual_seed(0)
        return model.generate(ids, **options), len(count_bins)

    text, computed = generate()
    monkeypatch.setattr(OPERATORS, "loop_options", lambda *arguments: {})
    whole_text, all_bins = generate()
    assert torch.equal(text, whole_text)
    if biases == WEIGHTS["head"] and options.get("top_k", 0) < 6:
        assert computed < all_bins
    if biases == WEIGHTS["tail"]:
        assert (text[:, 6:] >= 30).any()


@pytest.mark.parametrize("options", WHOLE.values(), ids=WHOLE)
def test_everything_is_computed_where_any_token_may_matter(make_model, make_ids, count_bins, options):
    model = make_model()
    model.lm_head.clusters.bias.data = torch.tensor(WEIGHTS["head"])
    tokens = model.generate(make_ids(1, 6), max_new_tokens=5, eos_token_id=None, pad_token_id=60, **options)
    assert len(count_bins) >= 2 and count_bins == [1, 2] * (len(count_bins) // 2)
    for name in ("scores", "logits"):
        for step in getattr(tokens, name, None) or ():
            torch.testing.assert_close(step.exp().sum(-1), torch.ones(1), atol=1e-5, rtol=0)


def test_default_top_k_of_sampling_counts(make_model, make_ids, count_bins):
    """With nothing but do_sample=True generate looks at 50 tokens; here bin 0 alone has more."""
    model = make_model(vocab_size=200, cutoffs=[100, 150])
    model.lm_head.clusters.bias.data = torch.tensor([-20.0, -20.0])
    model.generate(make_ids(1, 6), max_new_tokens=5, do_sample=True, eos_token_id=None, pad_token_id=60)
    assert count_bins == []


def test_a_plain_call_computes_everything(make_model, make_ids, count_bins):
    model = make_model()
    model.lm_head.clusters.bias.data = torch.tensor(WEIGHTS["head"])
    model(make_ids(1, 6))
    assert count_bins == [1, 2]


@pytest.mark.parametrize("kind", ["input_ids", "inputs_embeds"])
@pytest.mark.parametrize("changes", [{}, {"initial_memory": "zeros"}], ids=["empty", "zeros"])
def test_a_text_without_what_its_cache_has_seen_is_refused(make_model, make_ids, changes, kind):
    """generate skips as many tokens as the cache has seen: with the new ones alone it would skip those."""
    model = make_model(**changes)
    text, new = make_ids(2, 8), make_ids(2, 8, seed=1)
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 60}
    for length in (3, 8):
        with torch.no_grad():
            cache = model(text, use_cache=True).past_key_values
        given = {"input_ids": new[:, :length]}
        if kind == "inputs_embeds":
            given = {"inputs_embeds": model.get_input_embeddings()(new[:, :length]).detach()}
        with pytest.raises(ValueError, match=f"{kind} hold {length} tokens.*past_key_values have seen 8"):
            model.generate(**given, past_key_values=cache, **options)


@pytest.mark.parametrize("kind", ["assistant", "prompt-lookup"])
def test_assisted_decoding_refuses_a_cache_that_has_seen_tokens(make_model, make_ids, kind):
    """It would read the whole text behind them once more."""
    model, ids = make_model(eos_token_id=None), make_ids(1, 8)
    how = {"prompt_lookup_num_tokens": 3} if kind == "prompt-lookup" else {"assistant_model": make_model(n_layer=1)}
    with torch.no_grad():
        cache = model(ids[:, :6], use_cache=True).past_key_values
    with pytest.raises(ValueError, match="read the whole text.*: leave past_key_values out"):
        model.generate(ids, past_key_values=cache, max_new_tokens=4, pad_token_id=60, **how)


@pytest.mark.parametrize("changes", [{}, {"initial_memory": "zeros"}], ids=["empty", "zeros"])
def test_new_tokens_alone_continue_a_cache_with_a_mask_of_the_text(make_model, make_ids, changes):
    model = make_model(**changes)
    text, new = make_ids(2, 8), make_ids(2, 3, seed=1)
    whole = torch.cat([text, new], dim=1)
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 60}
    with torch.no_grad():
        first, second = (model(text, use_cache=True).past_key_values for _ in range(2))
    expected = model.generate(whole, past_key_values=first, **options)[:, 11:]
    mask = torch.ones_like(whole)
    continued = model.generate(new, past_key_values=second, attention_mask=mask, **options)[:, 3:]
    assert torch.equal(continued, expected)


def test_stop_strings_end_a_text(make_model):
    """They come with a tokenizer, which `generate` hands on to every call of the model."""
    tokenizer = TransfoXLTokenizer.from_symbols((string.ascii_letters + string.digits)[:61], mode="characters")
    model, ids = make_model(eos_token_id=None), torch.tensor([[3, 4, 5]])
    settings = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    whole = model.generate(ids, **settings)[0].tolist()
    stop = tokenizer.decode(whole[5])
    found = model.generate(ids, **settings, tokenizer=tokenizer, stop_strings=[stop])[0].tolist()
    assert found == whole[: whole.index(whole[5], 3) + 1] and len(found) < len(whole)


STOPS = {
    "moses": ["the", "cat", "sat", "'s"],
    "whitespace": ["the", "cat", "sat"],
    "lm1b": ["<S>", "</S>", "the", "cat", "sat"],
    "characters": [*"12 xy"],
    "bytes": [str(ord(letter)) for letter in "12 xy"],
}
MARKS = {"bytes": [str(ord(mark)) for mark in " ./"]}


@pytest.mark.parametrize(("mode", "symbols"), [*STOPS.items(), *MARKS.items()], ids=[*STOPS, "marks alone"])
def test_stop_strings_of_any_vocabulary(make_model, mode, symbols):
    """transformers looks for what a token adds behind the word "abcdef", which none of these knows."""
    special = [] if mode == "lm1b" else ["<eos>", "<unk>"]
    tokenizer = TransfoXLTokenizer.from_symbols([*special, *symbols], mode=mode)
    text, stop = ("12 xy", "y") if mode in ("characters", "bytes") else ("the cat sat", "sat")
    if symbols is MARKS["bytes"]:
        text, stop = " .. /", "/"
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    model = make_model(vocab_size=len(tokenizer), cutoffs=[], div_val=1, eos_token_id=None)
    # What it writes: the same text, again and again.
    wanted = ids[0].tolist() * 2

    def write(batch, text):
        return [wanted[text.shape[-1] - ids.shape[1]]]

    options = {"max_new_tokens": len(wanted), "do_sample": False, "attention_mask": torch.ones_like(ids)}
    found = model.generate(
        ids, **options, prefix_allowed_tokens_fn=write, tokenizer=tokenizer, stop_strings=[stop], pad_token_id=0
    )
    assert tokenizer.decode(found[0, ids.shape[1] :]).endswith(stop)
    assert found.shape[1] == 2 * ids.shape[1]


def test_an_assistant_with_another_tokenizer_drafts_the_same_text(make_model):
    letters = [*string.ascii_lowercase, " "]
    tokenizer = TransfoXLTokenizer.from_symbols([*letters, "<eos>", "<unk>"], mode="characters")
    other = TransfoXLTokenizer.from_symbols(["#", *letters[::-1], "<eos>", "<unk>"], mode="characters")
    model, assistant = (
        make_model(vocab_size=len(each), cutoffs=[9], eos_token_id=None) for each in (tokenizer, other)
    )
    options = tokenizer("the cat", return_tensors="pt") | {"max_new_tokens": 5, "pad_token_id": 0}
    expected = model.generate(**options, do_sample=False)
    options |= {"tokenizer": tokenizer, "assistant_model": assistant, "assistant_tokenizer": other}
    assert torch.equal(model.generate(**options, do_sample=False), expected)


@pytest.mark.parametrize("padded", [False, True])
def test_a_mask_that_hides_nothing_is_given_to_no_step(make_model, make_ids, monkeypatch, padded):
    """On a GPU every layer would hide by it at every token."""
    model, ids = make_model(), make_ids(2, 5)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0 if padded else 1
    masks, forward = [], model.transformer.forward

    def look(*args, attention_mask=None, **kwargs):
        masks.append(attention_mask)
        return forward(*args, attention_mask=attention_mask, **kwargs)

    monkeypatch.setattr(model.transformer, "forward", look)
    model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=60, eos_token_id=None)
    assert len(masks) == 4 and all((given is not None) == padded for given in masks)


@pytest.mark.parametrize(
    ("told_by", "tokens"), [("resets", "whole text"), ("resets", "new tokens"), ("seq_idx", "whole text")]
)
def test_a_document_may_begin_behind_what_a_cache_has_seen(make_model, make_ids, told_by, tokens):
    model = make_model(mem_len=12)
    text, new = make_ids(1, 5), make_ids(1, 4, seed=1)
    whole = torch.cat([text, new], dim=1)
    begins = torch.zeros(1, 9, dtype=torch.bool)
    begins[:, 5] = True
    given = {told_by: begins if told_by == "resets" else begins.cumsum(1)}
    with torch.no_grad():
        cache = model(text, use_cache=True).past_key_values
    ids = whole
    if tokens == "new tokens":
        ids, given[told_by] = new, given[told_by][:, -4:]
        given["attention_mask"] = torch.ones_like(whole)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 60}
    written = model.generate(ids, past_key_values=cache, **given, **options)[:, -6:]
    alone = by_hand(model, new, 6)[:, -6:]
    assert torch.equal(written, alone)
    assert not torch.equal(alone, by_hand(model, whole, 6)[:, -6:]), "the text before would have been seen"


@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"num_beams": 3}], ids=["cache", "no-cache", "beams"])
@pytest.mark.parametrize("told_by", ["resets", "seq_idx", "cu_seq_lens_q"])
def test_documents_of_a_prompt_are_told_apart_at_every_step(make_model, make_ids, told_by, options):
    model = make_model(mem_len=30)
    rows = 1 if told_by == "cu_seq_lens_q" else 2
    ids, begins = make_ids(rows, 9), torch.zeros(rows, 9, dtype=torch.bool)
    begins[:, 5] = True
    given = {"resets": begins, "seq_idx": begins.cumsum(1), "cu_seq_lens_q": torch.tensor([0, 5, 9])}
    given = {told_by: given[told_by]}
    options = {**options, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 60}
    written = model.generate(ids, **given, **options)[:, -6:]
    assert torch.equal(written, model.generate(ids[:, 5:], **options)[:, -6:])


@pytest.mark.skipif(version.parse(transformers.__version__) < version.parse("5.23"), reason="not offered before")
@pytest.mark.parametrize("start", ["nothing", "zeros", "mems"])
def test_chunked_prefill_skips_no_text_behind_a_cache_of_transformers(make_model, make_ids, start):
    """Its length counts the memory that it began from."""
    model = make_model(initial_memory="zeros" if start == "zeros" else "empty")
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "prefill_chunk_size": 4}
    text, cache = make_ids(1, 14), DynamicCache()
    with torch.no_grad():
        memory = memory_of(model(make_ids(1, 4, seed=2))) if start == "mems" else {}
        model(text[:, :3], **memory, past_key_values=cache, use_cache=True)
    if start != "nothing":
        with pytest.raises(ValueError, match="a DynamicCache, began from a memory, which prefill_chunk_size"):
            model.generate(text, past_key_values=cache, **options)
        return
    own = model(text[:, :3], use_cache=True).past_key_values
    written = model.generate(text, past_key_values=cache, **options)
    assert torch.equal(written, model.generate(text, past_key_values=own, **options))


def test_documents_that_positions_tell_of_are_not_lost_in_parts(make_model, make_ids):
    """A restart at the first token of a part of the prompt is a restart for nobody who sees that part alone."""
    model, ids = make_model(mem_len=30), make_ids(1, 8)
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 60}
    positions = torch.arange(8)[None] % 4
    written = model.generate(ids, position_ids=positions, **options)[:, 8:]
    assert torch.equal(written, model.generate(ids[:, 4:], **options)[:, 4:])
    with pytest.raises(ValueError, match="prefill_chunk_size cuts the text, but not where its documents begin"):
        model.generate(ids, position_ids=positions, prefill_chunk_size=4, **options)
    counted = model.generate(ids, position_ids=torch.arange(8)[None], prefill_chunk_size=4, **options)
    assert torch.equal(counted, model.generate(ids, **options))
    embeds = model.get_input_embeddings()(ids)
    with pytest.raises(ValueError, match="prefill_chunk_size cuts input_ids, but no inputs_embeds"):
        model.generate(inputs_embeds=embeds, prefill_chunk_size=4, **options)
    with pytest.raises(ValueError, match="resets must be a torch.Tensor, not builtins.list"):
        model.generate(ids, resets=[[False] * 8], **options)


def test_what_no_loop_of_generate_reads_is_refused(make_model, make_ids):
    model, ids = make_model(), make_ids(1, 6)
    options = {"max_new_tokens": 2, "pad_token_id": 60}
    with torch.no_grad():
        output, cache = model(ids), model(ids, use_cache=True).past_key_values
    whole, mask = torch.cat([ids, ids], dim=1), torch.ones(1, 6, dtype=torch.bool)
    with pytest.raises(ValueError, match="give mems or past_key_values that hold a memory already, not both"):
        model.generate(whole, mems=output.mems, past_key_values=cache, **options)
    with pytest.raises(ValueError, match="give mems_mask or past_key_values that hold a memory already"):
        model(ids, mems_mask=mask, past_key_values=cache)
    with pytest.raises(ValueError, match="prefill_chunk_size cuts the text, but not where its documents begin"):
        model.generate(ids, resets=~mask, prefill_chunk_size=2, **options)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_beams_without_a_cache_start_from_mems(make_model, make_ids, checkpointing):
    model = make_model(mem_len=30)
    with torch.no_grad():
        mems = model(make_ids(2, 5, seed=1)).mems
    options = {"num_beams": 3, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 60}
    expected = model.generate(make_ids(2, 4), mems=mems, **options)
    if checkpointing:
        model.train()
        model.gradient_checkpointing_enable()
    else:
        options["use_cache"] = False
    assert torch.equal(model.generate(make_ids(2, 4), mems=mems, **options), expected)


@pytest.mark.parametrize("memory", ["empty", "zeros", "full"])
@pytest.mark.parametrize(
    "options",
    [{}, {"prefill_chunk_size": 2}, {"prompt_lookup_num_tokens": 2}, {"cache_implementation": "static"}],
    ids=["plain", "chunks", "lookup", "static"],
)
def test_one_mask_of_memory_and_text_says_what_two_say(make_model, make_ids, memory, options):
    model = make_model(mem_len=4 if memory == "full" else 8, initial_memory="zeros" if memory == "zeros" else "empty")
    ids = make_ids(1, 6)
    with torch.no_grad():
        mems = model(make_ids(1, 4, seed=1)).mems
    hidden = torch.ones(1, mems[0].shape[1], dtype=torch.bool)
    hidden[:, :2] = False
    both = torch.cat([hidden.long(), torch.ones_like(ids)], dim=1)
    options = {**options, "disable_compile": True, "max_new_tokens": 8, "do_sample": False}
    options |= {"eos_token_id": None, "pad_token_id": 60}
    expected = model.generate(ids, mems=mems, mems_mask=hidden, **options)
    assert torch.equal(model.generate(ids, mems=mems, attention_mask=both, **options), expected)
    if memory == "full":
        longer = torch.cat([torch.zeros(1, 3, dtype=torch.long), both], dim=1)
        assert torch.equal(model.generate(ids, mems=mems, attention_mask=longer, **options), expected)
    with torch.no_grad():
        static, dynamic = (
            model(ids, mems=mems, attention_mask=both, past_key_values=cache, use_cache=True).logits
            for cache in (StaticMemoryCache(model.config), None)
        )
    torch.testing.assert_close(static, dynamic, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("trained", ["q_proj", "v_proj"])
def test_a_cache_is_not_written_to_where_a_gradient_needs_it(make_model, make_ids, trained):
    """The keys of the first layer need none where only queries or values are trained, as adapters are."""
    model = make_model(mem_len=16)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    ids, gradients = make_ids(1, 8), []
    for cache in (None, DynamicCache()):
        losses = []
        for t in range(5):
            token = {"shift_labels": ids[:, t + 1 : t + 2], "use_cache": True}
            output = model(ids[:, t : t + 1], past_key_values=cache, **token)
            cache = output.past_key_values
            losses.append(output.loss)
        torch.stack(losses).sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
    assert type(output.past_key_values) is DynamicCache
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_a_cache_goes_on_behind_inference_mode_and_autocast(make_model, make_ids):
    model, ids = make_model(mem_len=16), make_ids(1, 6)
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 60}
    expected = model.generate(ids, **options)
    with torch.inference_mode():
        cache = model(ids[:, :4], use_cache=True).past_key_values
        cache = model(ids[:, 4:5], past_key_values=cache, use_cache=True).past_key_values
    assert torch.equal(model.generate(ids, past_key_values=cache, **options), expected)
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cache = model(ids[:, :5], use_cache=True).past_key_values
        found = model(ids[:, 5:], past_key_values=cache, use_cache=True).logits
        torch.testing.assert_close(found, model(ids).logits[:, 5:], atol=0.1, rtol=0.1)


@pytest.mark.skipif(not hasattr(transformers.generation.utils, "DeferredStopCheck"), reason="not done before")
@pytest.mark.parametrize("use_cache", [True, False])
def test_what_generate_asks_of_a_cache_it_does_not_ask_of_mems(memory_model, make_ids, monkeypatch, use_cache):
    """As on Apple's GPUs, where it looks one token later whether to stop, if the cache can go back."""
    asked = []
    is_supported = transformers.generation.utils.DeferredStopCheck.is_supported

    def ask(device, cache, *args, **kwargs):
        asked.append(is_supported(torch.device("mps"), cache, *args, **kwargs))
        return False

    monkeypatch.setattr(transformers.generation.utils.DeferredStopCheck, "is_supported", staticmethod(ask))
    memory_model.generate(make_ids(1, 4), max_new_tokens=3, do_sample=False, use_cache=use_cache)
    assert len(asked) == 1


@pytest.mark.parametrize("told_by", ["resets", "seq_idx"])
@pytest.mark.parametrize("kind", ["assistant", "prompt-lookup"])
def test_assisted_decoding_tells_documents_apart(make_model, make_ids, kind, told_by):
    model, ids = make_model(mem_len=30, eos_token_id=None), make_ids(1, 9)
    begins = torch.zeros(1, 9, dtype=torch.bool)
    begins[:, 5] = True
    given = {told_by: begins if told_by == "resets" else begins.cumsum(1)}
    how = {"prompt_lookup_num_tokens": 3} if kind == "prompt-lookup" else {"assistant_model": make_model(n_layer=1)}
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 60}
    assert torch.equal(model.generate(ids, **given, **how, **options), model.generate(ids, **given, **options))
    with pytest.raises(ValueError, match=r"resets are \(1, 5\), but input_ids hold \(1, 9\) tokens"):
        model.generate(ids, resets=begins[:, 4:], **options)


def test_an_assistant_of_other_layers_has_no_memory_of_the_model(make_model, make_ids):
    model, ids = make_model(mem_len=30, eos_token_id=None), make_ids(1, 6)
    with torch.no_grad():
        mems = model(make_ids(1, 5, seed=1)).mems
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 60}
    assisted = model.generate(ids, mems=mems, assistant_model=make_model(n_layer=1, eos_token_id=None), **options)
    assert torch.equal(assisted, model.generate(ids, mems=mems, **options))


@torch.no_grad()
@pytest.mark.parametrize("states", [0, 4])
def test_a_mask_may_have_columns_of_all_that_a_static_cache_holds(make_model, make_ids, states):
    model, ids = make_model(mem_len=12), make_ids(2, 5)
    mems = model(make_ids(2, states, seed=1)).mems if states else None
    mask = torch.ones(2, 17, dtype=torch.long)
    mask[0, : 12 - states + 2] = 0
    expected = model(ids, mems=mems, attention_mask=mask[:, 12 - states :]).logits[:, 2:]
    cache = StaticMemoryCache(model.config)
    found = model(ids, mems=mems, attention_mask=mask, past_key_values=cache, use_cache=True).logits[:, 2:]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_static_cache_begins_from_mems_wherever_they_are(make_model, make_ids):
    """The model is where nothing is computed, in place of a GPU."""
    model = make_model(mem_len=12)
    with torch.no_grad():
        output = model(make_ids(2, 4))
    model, ids = model.to("meta"), make_ids(2, 5).to("meta")
    for mask in (None, output.mems_mask, torch.ones(2, 4, dtype=torch.bool)):
        model(ids, mems=output.mems, mems_mask=mask, past_key_values=StaticMemoryCache(model.config), use_cache=True)


def test_a_mask_is_taken_where_the_forward_is_wrapped(make_model, make_ids, monkeypatch):
    """By a function of any arguments, whose signature tells `generate` of none."""
    model, ids = make_model(), make_ids(1, 5)
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 3, "do_sample": False}
    expected, forward = model.generate(ids, **given), model.forward
    monkeypatch.setattr(model, "forward", lambda *args, **kwargs: forward(*args, **kwargs))
    assert torch.equal(model.generate(ids, **given), expected)
