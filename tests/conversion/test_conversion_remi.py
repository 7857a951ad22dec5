"""Pop Music Transformer's checkpoints: a golden in TensorFlow's format against modules.py's equations in fp64."""

import math
import pickle

import pytest
import torch
from test_conversion_tf import write_bundle

import oracle
from txl_hf import TransfoXLConfig, TransfoXLForCausalLM, TransfoXLTokenizer
from txl_hf.conversion import command_line, layout, pop_music_tf

EVENTS = ["Bar_None", "Position_1/16", "Tempo Class_slow", "Note On_60", "Note Velocity_3", "Note Duration_7"]


def variables_of(n_token=6, d_model=8, n_head=2, d_head=4, d_inner=6, n_layer=2, d_embed=8):
    """The variables that modules.py makes, with Keras's numbers behind the names of its layer normalisations."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator) / 2

    variables = {
        "normal_embed/lookup_table": draw(n_token, d_embed),
        "normal_softmax/bias": draw(n_token),
        "r_w_bias": draw(n_head, d_head),
        "r_r_bias": draw(n_head, d_head),
    }
    if d_embed != d_model:
        variables["normal_embed/proj_W"] = draw(d_embed, d_model)
    for i in range(n_layer):
        scope = f"layer_{i}"
        variables |= {
            f"{scope}/rel_attn/qkv/kernel": draw(d_model, 3 * n_head * d_head),
            f"{scope}/rel_attn/r/kernel": draw(d_model, n_head * d_head),
            f"{scope}/rel_attn/o/kernel": draw(n_head * d_head, d_model),
            f"{scope}/ff/layer_1/kernel": draw(d_model, d_inner),
            f"{scope}/ff/layer_1/bias": draw(d_inner),
            f"{scope}/ff/layer_2/kernel": draw(d_inner, d_model),
            f"{scope}/ff/layer_2/bias": draw(d_model),
        }
        for j, part in enumerate(("rel_attn", "ff")):
            number = f"_{2 * i + j}" if i + j else ""
            variables[f"{scope}/{part}/layer_normalization{number}/gamma"] = 1 + draw(d_model)
            variables[f"{scope}/{part}/layer_normalization{number}/beta"] = draw(d_model)
    return {f"transformer/{name}": value for name, value in variables.items()} | {"global_step": torch.tensor(7)}


def normalised(states, variables, scope):
    (gamma,) = (v for name, v in variables.items() if name.startswith(f"{scope}/layer_norm") and "gamma" in name)
    (beta,) = (v for name, v in variables.items() if name.startswith(f"{scope}/layer_norm") and "beta" in name)
    variance, mean = torch.var_mean(states, -1, keepdim=True, correction=0)
    return (states - mean) / torch.sqrt(variance + 1e-3) * gamma.double() + beta.double()


def reference(variables, ids, mems, n_head=2, d_head=4, same_length=False):
    """modules.py's `transformer` in fp64, in the names of its variables: logits (B, L, V), and the new memory.

    With `same_length` its mask leaves each query as many keys as the memory has states, and its own.
    """
    variables = {name.removeprefix("transformer/"): value.double() for name, value in variables.items()}
    d_model = variables["layer_0/ff/layer_2/bias"].shape[0]
    table = variables["normal_embed/lookup_table"]
    projection = variables.get("normal_embed/proj_W", torch.eye(d_model, dtype=torch.float64))
    hidden = table[ids] @ projection * math.sqrt(d_model)
    kept = []
    for i in range(len(mems)):
        scope = f"layer_{i}"
        context = torch.cat([mems[i], hidden], 1)
        kept.append(context[:, -mems[i].shape[1] :])

        def heads(states):
            return states.unflatten(-1, (n_head, d_head)).transpose(1, 2)

        query, key, value = (context @ variables[f"{scope}/rel_attn/qkv/kernel"]).chunk(3, -1)

        def rel_key(head, distance, kernel=variables[f"{scope}/rel_attn/r/kernel"]):
            return (oracle.sinusoid(distance, d_model) @ kernel).view(n_head, d_head)[head]

        attended, _ = oracle.relative_attention(
            heads(query[:, -hidden.shape[1] :]),
            heads(key),
            heads(value),
            rel_key,
            variables["r_w_bias"],
            variables["r_r_bias"],
            window=mems[i].shape[1] if same_length else None,
        )
        output = attended.transpose(1, 2).flatten(2) @ variables[f"{scope}/rel_attn/o/kernel"]
        hidden = normalised(output + hidden, variables, f"{scope}/rel_attn")
        inner = (hidden @ variables[f"{scope}/ff/layer_1/kernel"] + variables[f"{scope}/ff/layer_1/bias"]).clamp(min=0)
        output = (inner @ variables[f"{scope}/ff/layer_2/kernel"] + variables[f"{scope}/ff/layer_2/bias"]).clamp(min=0)
        hidden = normalised(output + hidden, variables, f"{scope}/ff")
    return hidden @ projection.T @ table.T + variables["normal_softmax/bias"], kept


def convert(tmp_path, variables, *options):
    write_bundle(tmp_path / "REMI-tempo-checkpoint" / "model", variables)
    arguments = ["--from", "remi", "--checkpoint", str(tmp_path / "REMI-tempo-checkpoint")]
    return command_line.main([*arguments, "--output", str(tmp_path / "out"), *options])


@pytest.mark.parametrize("same_length", [False, True])
@pytest.mark.parametrize("d_embed", [8, 4], ids=["as published", "with a projection"])
@torch.no_grad()
def test_equals_the_originals_equations(d_embed, same_length, tmp_path):
    """Two segments: the first sees zero states, as model.py begins, the second what the first left."""
    variables = variables_of(d_embed=d_embed)
    assert convert(tmp_path, variables, "--mem-len", "5", *["--same-length"] * same_length) == 0
    model = TransfoXLForCausalLM.from_pretrained(tmp_path / "out").eval().double()
    config = model.config
    assert (config.layer_norm_epsilon, config.initial_memory, config.mlp_output_relu) == (1e-3, "zeros", True)
    assert (config.same_length, config.clamp_len, config.eos_token_id) == (same_length, -1, None)
    ids = torch.tensor([[0, 1, 2, 5, 3, 4, 0, 1]])
    mems, own = [torch.zeros(1, 5, 8, dtype=torch.float64)] * 2, None
    for segment in ids.split(4, 1):
        logits, mems = reference(variables, segment, mems, same_length=same_length)
        out = model(segment, mems=own, output_logits=True)
        own = out.mems
        torch.testing.assert_close(out.logits, logits.log_softmax(-1), atol=1e-6, rtol=0)
        torch.testing.assert_close(list(own), mems, atol=1e-6, rtol=0)


@torch.no_grad()
def test_the_second_relu_is_the_oracles_too(make_model):
    for relu in (False, True):
        model = make_model(mlp_output_relu=relu).double()
        ids = torch.tensor([[1, 40, 7, 12]])
        expected, _ = oracle.ReferenceModel(model)(ids)
        torch.testing.assert_close(model(ids, output_logits=True).logits, expected, atol=1e-6, rtol=0)


def test_the_dictionary_becomes_a_tokenizer(tmp_path):
    events = {event: i for i, event in enumerate(EVENTS)}
    (tmp_path / "REMI-tempo-checkpoint").mkdir()
    path = tmp_path / "REMI-tempo-checkpoint" / "dictionary.pkl"
    path.write_bytes(pickle.dumps((events, {i: event for event, i in events.items()})))
    assert convert(tmp_path, variables_of()) == 0
    tokenizer = TransfoXLTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("Bar_None Tempo_Class_slow Note_On_60")["input_ids"] == [0, 2, 3]
    assert TransfoXLForCausalLM.from_pretrained(tmp_path / "out").config.vocab_size == 6


@pytest.mark.parametrize(
    ("dictionary", "found"),
    [
        (["Bar_None"], "expected the pair"),
        (({"Bar_None": 1}, {}), "does not number its 1 symbols from 0 on"),
        (({"Note On_1": 0, "Note_On_1": 1}, {}), "differ in their blanks alone"),
    ],
)
def test_a_dictionary_that_is_none_is_refused(dictionary, found, tmp_path):
    (tmp_path / "dictionary.pkl").write_bytes(pickle.dumps(dictionary))
    with pytest.raises(layout.ConversionError, match=found):
        pop_music_tf.read_dictionary(tmp_path)


def test_a_variable_more_is_named(tmp_path, capfd):
    assert convert(tmp_path, variables_of() | {"transformer/layer_0/gate/kernel": torch.ones(1)}) == 1
    assert "transformer/layer_0/gate/kernel, which the model has not" in capfd.readouterr().err


def test_the_quirk_is_saved(tmp_path):
    TransfoXLConfig(mlp_output_relu=True).save_pretrained(tmp_path)
    assert TransfoXLConfig.from_pretrained(tmp_path).mlp_output_relu
