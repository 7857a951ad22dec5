"""transformers' Conformers and XLNet with the package's attention: equal to their own, and their own again when copied
or restored. The models are small and their weights random."""

import copy
import importlib
import inspect
import pickle
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers.models.parakeet.modeling_parakeet import ParakeetEncoderAttention

from scripts import run_script
from txl_hf.conformer import SUPPORTED, RelativeMethod, restore_attention, use_relative_attention
from txl_hf.kernels import attention_blocks

NO_DROPOUT = {"dropout": 0.0, "activation_dropout": 0.0, "attention_dropout": 0.0, "layerdrop": 0.0}
PARAKEET = NO_DROPOUT | {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "num_mel_bins": 16,
    "subsampling_conv_channels": 8,
}
WAV2VEC2 = NO_DROPOUT | {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "hidden_dropout": 0.0,
    "conv_depthwise_kernel_size": 5,
    "conformer_conv_dropout": 0.0,
    "position_embeddings_type": "relative",
    "apply_spec_augment": False,
}


class Case(NamedTuple):
    """A model without dropout, the arguments of a call whose second row is padded, the states that it computes, and
    the frames of these that are compared."""

    model: nn.Module
    inputs: dict
    states: Callable
    real: Tensor | None = None


# Before, a padded frame of Parakeet's, which sees none, is NaN or what the kernel of PyTorch makes of it.
MASKS_BY_A_NUMBER = "finfo" in inspect.getsource(ParakeetEncoderAttention.forward)


def features(frames=200, bins=16, padded=70):
    generator = torch.Generator().manual_seed(1)
    mask = torch.ones(2, frames, dtype=torch.long)
    mask[1, frames - padded :] = 0
    return {"input_features": torch.randn(2, frames, bins, generator=generator), "attention_mask": mask}


def parakeet():
    config = transformers.ParakeetEncoderConfig(**PARAKEET)
    inputs = features(padded=70 if MASKS_BY_A_NUMBER else 0)
    return Case(transformers.ParakeetEncoder(config), inputs, lambda out: out.last_hidden_state)


def parakeet_ctc():
    config = transformers.ParakeetCTCConfig(encoder_config=PARAKEET, vocab_size=20, pad_token_id=19)
    inputs = features(padded=70 if MASKS_BY_A_NUMBER else 0) | {"labels": torch.tensor([[1, 2, 3], [4, 5, 6]])}
    return Case(transformers.ParakeetForCTC(config), inputs, lambda out: out.loss)


def nemotron():
    config = transformers.NemotronAsrStreamingEncoderConfig(**PARAKEET, sliding_window=13)
    inputs = features() | {"num_lookahead_tokens": 3}
    # A padded frame that sees none is NaN or what the kernel of PyTorch makes of it.
    real = torch.ones(2, 26, dtype=torch.bool)
    real[1, 17:] = False
    return Case(transformers.NemotronAsrStreamingEncoder(config), inputs, lambda out: out.last_hidden_state, real)


def wav2vec2():
    sizes = {"conv_dim": (16, 16), "conv_stride": (3, 2), "conv_kernel": (5, 3), "num_feat_extract_layers": 2}
    more = {"feat_extract_norm": "layer", "feat_proj_dropout": 0.0, "final_dropout": 0.0}
    config = transformers.Wav2Vec2ConformerConfig(**WAV2VEC2, **sizes, **more)
    waves = features(bins=1)
    inputs = {"input_values": waves["input_features"][..., 0], "attention_mask": waves["attention_mask"]}
    return Case(transformers.Wav2Vec2ConformerModel(config), inputs, lambda out: out.last_hidden_state)


def wav2vec2_bert(kind="relative"):
    sizes = WAV2VEC2 | {"position_embeddings_type": kind}
    config = transformers.Wav2Vec2BertConfig(**sizes, feature_projection_input_dim=16, feat_proj_dropout=0.0)
    return Case(transformers.Wav2Vec2BertModel(config), features(frames=40, padded=11), lambda out: out[0])


def seamless(config=transformers.SeamlessM4TConfig, model=transformers.SeamlessM4TForSpeechToText, **options):
    speech = {"speech_encoder_layers": 2, "speech_encoder_attention_heads": 4, "speech_encoder_intermediate_size": 48}
    text = {f"decoder_{name}": n for name, n in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 32))}
    sizes = {"hidden_size": 32, "vocab_size": 40, "feature_projection_input_dim": 16, "max_source_positions": 64}
    none = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout", "speech_encoder_dropout"), 0.0)
    none |= dict.fromkeys(("adaptor_dropout", "speech_encoder_layerdrop", "decoder_layerdrop"), 0.0)
    config = config(**speech, **text, **sizes, **none, add_adapter=True, **options)
    inputs = features(frames=40, padded=11) | {"decoder_input_ids": torch.tensor([[3, 5, 7], [3, 6, 8]])}
    return Case(model(config), inputs, lambda out: out.logits)


def fastspeech():
    rates = [
        f"{kind}_{name}" for kind in ("encoder", "decoder") for name in ("dropout_rate", "attention_dropout_rate")
    ]
    rates += [f"{kind}_positional_dropout_rate" for kind in ("encoder", "decoder")]
    rates += ["duration_predictor_dropout_rate", "energy_predictor_dropout", "pitch_predictor_dropout"]
    rates += ["energy_embed_dropout", "pitch_embed_dropout", "speech_decoder_postnet_dropout"]
    layers = {
        f"{kind}_{name}": n for kind in ("encoder", "decoder") for name, n in (("layers", 1), ("linear_units", 32))
    }
    sizes = {"hidden_size": 32, "vocab_size": 20, "num_mel_bins": 8, "speech_decoder_postnet_units": 16}
    config = transformers.FastSpeech2ConformerConfig(**layers, **sizes, **dict.fromkeys(rates, 0.0))
    ids = torch.randint(1, 20, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    duration = torch.randint(1, 4, (2, 9), generator=torch.Generator().manual_seed(0)) * mask
    inputs = {"input_ids": ids * mask, "attention_mask": mask, "duration_labels": duration}
    length = int(duration.sum(1).max())
    inputs |= {"pitch_labels": torch.randn(2, 9, 1), "energy_labels": torch.randn(2, 9, 1)}
    inputs |= {"spectrogram_labels": torch.randn(2, length, 8)}
    return Case(transformers.FastSpeech2ConformerModel(config), inputs, lambda out: out.spectrogram)


def xlnet(**options):
    sizes = {"vocab_size": 50, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}
    config = transformers.XLNetConfig(**sizes, dropout=0.0, summary_last_dropout=0.0, mem_len=6, **options)
    ids = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 9)
    mask[1, :3] = 0
    segments = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 2]] * 2)
    inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": segments, "use_mems": True}
    return Case(transformers.XLNetLMHeadModel(config), inputs, lambda out: out.logits)


def xlnet_permuted():
    """Both streams, with a memory; the first token in the permutation sees nothing of the segment."""
    case = xlnet()
    generator = torch.Generator().manual_seed(0)
    order = torch.stack([torch.randperm(9, generator=generator) for _ in range(2)])
    permuted = (order[:, :, None] <= order[:, None]).float()
    targets = torch.zeros(2, 2, 9)
    targets[:, 0, 8] = targets[:, 1, 4] = 1
    mems = [torch.randn(6, 2, 32, generator=generator) for _ in range(2)]
    return case._replace(inputs=case.inputs | {"perm_mask": permuted, "target_mapping": targets, "mems": mems})


def xlnet_causal():
    """Without a mask, which XLNet's causal one cannot be added to."""
    case = xlnet(attn_type="uni")
    return case._replace(inputs=case.inputs | {"attention_mask": None})


CASES = [parakeet, parakeet_ctc, nemotron, wav2vec2, wav2vec2_bert, seamless, fastspeech, xlnet]
CASES += [xlnet_permuted, xlnet_causal]


# Where transformers' own computes nothing to compare with.
INVERTED = "its mask is inverted: 0 of an additive one is taken for False, and the result is NaN"
LOWEST = "the lowest number of fp64 is -inf in the softmax in fp32, and padding NaN"
UPSTREAM = {(nemotron, "eager", dtype): INVERTED for dtype in (torch.float32, torch.float64)}
UPSTREAM |= {(build, "eager", torch.float64): LOWEST for build in (parakeet, parakeet_ctc)}
UPSTREAM |= {(build, "eager", torch.float64): "positions are in fp32" for build in (fastspeech, xlnet_permuted)}


def make(build, dtype=torch.float32) -> Case:
    torch.manual_seed(0)
    case = build()
    with torch.no_grad():
        for parameter in case.model.parameters():
            # u and v begin as zeros.
            parameter.add_(0.1 * torch.randn_like(parameter))
    inputs = {name: in_type(value, dtype) for name, value in case.inputs.items()}
    return case._replace(model=case.model.to(dtype), inputs=inputs)


def in_type(value, dtype):
    if isinstance(value, list):
        return [in_type(each, dtype) for each in value]
    return value.to(dtype) if isinstance(value, Tensor) and value.dtype == torch.float32 else value


def differentiate(case: Case, **options):
    """The states and the gradients of all parameters by name, from the same statistics of norms each time."""
    before = {name: buffer.clone() for name, buffer in case.model.named_buffers()}
    case.model.zero_grad()
    states = case.states(case.model(**case.inputs, **options))
    states = states if case.real is None else states[case.real]
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(2)).to(states)
    (states * weights).sum().backward()
    for name, buffer in case.model.named_buffers():
        if name in before and buffer.shape == before[name].shape:
            buffer.copy_(before[name])
    gradients = {name: p.grad.clone() for name, p in case.model.named_parameters() if p.grad is not None}
    return states.detach(), gradients


def assert_equal(found, expected):
    """To 1e-5 in fp32 and 1e-10 in fp64; gradients relative to the largest of any parameter."""
    tolerance = 1e-5 if found[0].dtype == torch.float32 else 1e-10
    torch.testing.assert_close(found[0], expected[0], atol=tolerance, rtol=tolerance)
    assert found[1].keys() == expected[1].keys()
    largest = max(gradient.abs().max() for gradient in expected[1].values())
    for name, gradient in expected[1].items():
        # A norm over the batch follows that bias: in training its gradient is 0, but for rounding.
        if not name.endswith("depthwise_conv.bias") or found[0].dtype == torch.float64:
            assert (found[1][name] - gradient).abs().max() <= tolerance * largest, name


def replaced(model: nn.Module) -> int:
    """How many modules have the package's attention."""
    return sum(isinstance(value, RelativeMethod) for module in model.modules() for value in vars(module).values())


@pytest.fixture
def several_blocks(monkeypatch):
    monkeypatch.setattr(attention_blocks, "BLOCK_QUERIES", 4)
    monkeypatch.setattr(attention_blocks, "BLOCK_SCORES", 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("own", ["eager", "sdpa"])
@pytest.mark.parametrize("build", CASES, ids=lambda build: build.__name__)
def test_outputs_and_gradients_are_transformers_own(build, own, training, dtype, several_blocks):
    case = make(build, dtype)
    if own == "sdpa" and not getattr(case.model, "_supports_sdpa", False):
        pytest.skip("transformers has eager alone")
    if reason := UPSTREAM.get((build, own, dtype)):
        pytest.skip(reason)
    case.model.set_attn_implementation(own)
    case.model.train(training)
    names = [name for name, _ in case.model.named_parameters()]
    expected = differentiate(case)
    assert use_relative_attention(case.model) is case.model
    assert [name for name, _ in case.model.named_parameters()] == names and replaced(case.model) > 0
    assert_equal(differentiate(case), expected)
    assert restore_attention(case.model) is case.model
    assert replaced(case.model) == 0
    assert_equal(differentiate(case), expected)


def frames_of(encoder, features):
    """The frames of an encoder that streams, (1, n, D), a chunk with its look-ahead at a time."""
    states, cache, padding = [], None, None
    for chunk in features:
        caches = {"past_key_values": cache, "padding_cache": padding, "use_cache": True}
        out = encoder(chunk, **caches, num_lookahead_tokens=3)
        cache, padding = out.past_key_values, out.padding_cache
        states.append(out.last_hidden_state)
    return torch.cat(states, dim=1)


@torch.no_grad()
def test_a_streaming_encoder_is_transformers_own(several_blocks):
    encoder = make(nemotron).model.eval()
    encoder.set_attn_implementation("sdpa")
    features = torch.randn(1, 25 + 6 * 32, 16, generator=torch.Generator().manual_seed(0))
    chunks = [features[:, :25], *features[:, 25:].split(32, dim=1)]
    expected = frames_of(encoder, chunks)
    assert expected.isfinite().all()
    torch.testing.assert_close(frames_of(use_relative_attention(encoder), chunks), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("build", [parakeet, wav2vec2, xlnet], ids=lambda build: build.__name__)
def test_bf16_is_off_by_at_most_twice_what_transformers_own_is(build, several_blocks):
    case, exact = make(build, torch.bfloat16), make(build, torch.float32)
    with torch.no_grad():
        expected = exact.states(exact.model.eval()(**exact.inputs))
        own = case.states(case.model.eval()(**case.inputs))
        found = case.states(use_relative_attention(case.model)(**case.inputs))
    assert found.dtype == torch.bfloat16
    assert (found - expected).norm() <= 2 * (own - expected).norm()


@pytest.mark.parametrize("build", CASES, ids=lambda build: build.__name__)
def test_a_copy_is_transformers_own(build):
    model = use_relative_attention(make(build).model)
    copies = [copy.deepcopy(model)]
    if build is not wav2vec2:  # PyTorch pickles no parametrized modules, as its norm of weights is one.
        copies.append(pickle.loads(pickle.dumps(model)))
    for copied in copies:
        assert replaced(model) > 0 and replaced(copied) == 0
        modules = [module for module in copied.modules() if "forward" in vars(module)]
        assert all(module.forward.__self__ is module for module in modules), "not of the original"
    again = use_relative_attention(use_relative_attention(copied))
    assert replaced(again) == replaced(model) and replaced(restore_attention(again)) == 0


def test_what_is_saved_is_transformers_own(tmp_path):
    case = make(parakeet)
    case.model.eval()
    expected = case.states(case.model(**case.inputs))
    use_relative_attention(case.model).save_pretrained(tmp_path)
    loaded = type(case.model).from_pretrained(tmp_path).eval()
    assert replaced(loaded) == 0
    torch.testing.assert_close(case.states(loaded(**case.inputs)), expected)


def test_attentions_are_transformers_own():
    """A call that asks for them is computed by transformers, whether the call or the configuration does."""
    case = make(parakeet)
    case.model.eval().set_attn_implementation("eager")
    expected = case.model(**case.inputs, output_attentions=True).attentions
    use_relative_attention(case.model)
    torch.testing.assert_close(case.model(**case.inputs, output_attentions=True).attentions, expected)
    case.model.config.output_attentions = True
    torch.testing.assert_close(case.model(**case.inputs).attentions, expected)


@pytest.mark.parametrize("build", [parakeet, wav2vec2, xlnet], ids=lambda build: build.__name__)
def test_dropout_of_probabilities_keeps_their_mean(build):
    case = make(build)
    use_relative_attention(case.model).eval()
    expected = case.states(case.model(**case.inputs))
    for module in case.model.modules():
        if type(module).__name__ in SUPPORTED:
            module.train()
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.3
            else:
                module.dropout.p = 0.3
    with torch.no_grad():
        drawn = torch.stack([case.states(case.model(**case.inputs)) for _ in range(100)])
    assert (drawn[0] - drawn[1]).abs().max() > 1e-3
    spread = drawn.std(0).mean()
    assert (drawn.mean(0) - expected).abs().mean() < 0.5 * spread


def test_rows_of_a_batch_drop_positions_each_for_itself():
    """As transformers drops them, so that under the same seed both compute the same."""
    case = make(parakeet)
    case.model.train().config.dropout_positions = case.model.dropout_positions = 0.5
    torch.manual_seed(3)
    expected = case.states(case.model(**case.inputs))
    use_relative_attention(case.model)
    torch.manual_seed(3)
    torch.testing.assert_close(case.states(case.model(**case.inputs)), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("first", ["adapter", "attention"])
@pytest.mark.parametrize("build", [parakeet, wav2vec2], ids=lambda build: build.__name__)
def test_adapters_train(build, first):
    case = make(build, torch.float64)
    names = ["q_proj", "relative_k_proj"] if build is parakeet else ["linear_q", "linear_pos"]
    torch.manual_seed(0)
    if first == "attention":
        use_relative_attention(case.model)
    model = get_peft_model(case.model, LoraConfig(target_modules=names, init_lora_weights=False)).double()
    if first == "adapter":
        use_relative_attention(model)
    case, before = case._replace(model=model), replaced(model)
    found = differentiate(case)
    assert before == 2 and replaced(restore_attention(model)) == 0
    assert_equal(found, differentiate(case))


def test_a_compiled_model_is_equal():
    case = make(parakeet)
    case.model.train(False)
    expected = differentiate(case)
    use_relative_attention(case.model)
    torch._dynamo.reset()
    case.model.compile(backend="aot_eager")
    assert_equal(differentiate(case), expected)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: wav2vec2_bert("relative_key"), "Wav2Vec2BertModel has no .*'relative_key'.*ParakeetEncoderAttention"),
        (
            lambda: seamless(transformers.SeamlessM4Tv2Config, transformers.SeamlessM4Tv2ForSpeechToText),
            "SeamlessM4Tv2ForSpeechToText has no .*'relative_key'",
        ),
        (lambda: Case(nn.Linear(2, 2), {}, None), "Linear has no attention of Transformer-XL. Supported are"),
        (lambda: xlnet(bi_data=True), "bi_data"),
    ],
    ids=["wav2vec2_bert", "seamless_v2", "linear", "bi_data"],
)
def test_another_model_is_refused_by_name(build, message):
    model = build().model
    with pytest.raises(ValueError, match=message):
        use_relative_attention(model)
    assert replaced(model) == 0


def test_every_class_that_is_supported_exists_here():
    """transformers has them, each where its name says; the module itself imports none."""
    code = (
        "import sys, txl_hf.conformer; print([m for m in sys.modules if m.startswith('transformers.models.parakeet')])"
    )
    assert run_script("-c", code, only_torch=True).stdout.strip() == "[]"
    modules = ("parakeet", "nemotron_asr_streaming", "wav2vec2_conformer", "wav2vec2_bert", "seamless_m4t")
    modules += ("fastspeech2_conformer", "xlnet")
    found = {name for module in modules for name in vars(modeling(module)) if name in SUPPORTED}
    assert found == set(SUPPORTED)


def modeling(name: str):
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")
