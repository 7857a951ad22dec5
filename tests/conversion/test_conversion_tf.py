"""The reader of TensorFlow's checkpoints, and the shapes of model that no golden has."""

import json
import struct

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from goldens import golden
from txl_hf import TransfoXLConfig
from txl_hf.conversion import command_line, kimiyoung_tf, layout, tf_checkpoint
from txl_hf.conversion.tf_checkpoint import TensorBundle, TensorBundleError, masked_crc32c
from txl_hf.legacy.unpickle import UnsafePickleError

GOLDENS = {path.parent.name: path.parent for path in sorted(golden("kimiyoung_tf").glob("*/golden.json"))}
FUZZ = settings(deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True)


def test_crc32c_of_the_standard():
    assert tf_checkpoint.crc32c(b"123456789") == 0xE3069283
    assert tf_checkpoint.crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4


@pytest.mark.parametrize("size", [2 * tf_checkpoint.LANES - 1, 2 * tf_checkpoint.LANES, 5 * tf_checkpoint.LANES + 3])
def test_crc32c_in_lanes_is_crc32c_byte_by_byte(size):
    data = bytes((7 * i + i // 251) % 256 for i in range(size))
    table, crc = tf_checkpoint._table(8).tolist(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    assert tf_checkpoint.crc32c(data) == crc ^ 0xFFFFFFFF


@pytest.mark.parametrize("name", GOLDENS)
def test_variables_of_the_golden(name):
    folder = GOLDENS[name]
    bundle = TensorBundle(folder / "model.ckpt-0")
    expected = json.loads((folder / "golden.json").read_text())["variables"]
    assert {f"{name}:0": list(entry.shape) for name, entry in bundle.entries.items()} == expected
    for name, entry in bundle.entries.items():
        assert tuple(bundle.read(name).shape) == entry.shape


# ---- a writer, for what no golden has ----


def varint(number):
    out = b""
    while number > 0x7F:
        out, number = out + bytes([number & 0x7F | 0x80]), number >> 7
    return out + bytes([number])


def number_field(field, number):
    return varint(field << 3) + varint(number)


def bytes_field(field, content):
    return varint(field << 3 | 2) + varint(len(content)) + content


def block(entries):
    body = b"".join(varint(0) + varint(len(key)) + varint(len(value)) + key + value for key, value in entries)
    body += struct.pack("<II", 0, 1)
    return body + b"\0" + struct.pack("<I", masked_crc32c(body + b"\0"))


def write_bundle(prefix, variables, shards=1):
    """Write `variables`, {name: tensor}, as TensorFlow would."""
    entries = [(b"", number_field(1, shards) + bytes_field(3, number_field(1, 1)))]
    files = [b""] * shards
    for i, (name, tensor) in enumerate(sorted(variables.items())):
        data = tensor.contiguous().numpy().tobytes()
        shape = b"".join(bytes_field(2, number_field(1, size)) for size in tensor.shape)
        dtype = {torch.float32: 1, torch.int64: 9}[tensor.dtype]
        entry = number_field(1, dtype) + bytes_field(2, shape) + number_field(3, i % shards)
        entry += number_field(4, len(files[i % shards])) + number_field(5, len(data))
        entry += varint(6 << 3 | 5) + struct.pack("<I", masked_crc32c(data))
        files[i % shards] += data
        entries.append((name.encode(), entry))
    half = len(entries) // 2
    data, handles = b"", []
    for part in (entries[:half], entries[half:]):
        written = block(part)
        handles.append((part[-1][0], varint(len(data)) + varint(len(written) - 5)))
        data += written
    meta, index = block([]), block(handles)
    footer = varint(len(data)) + varint(len(meta) - 5) + varint(len(data) + len(meta)) + varint(len(index) - 5)
    footer = footer.ljust(40, b"\0") + struct.pack("<Q", tf_checkpoint.TABLE_MAGIC)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    prefix.with_name(f"{prefix.name}.index").write_bytes(data + meta + index + footer)
    for i, content in enumerate(files):
        prefix.with_name(f"{prefix.name}.data-{i:05d}-of-{shards:05d}").write_bytes(content)


SIZES = {"n_layer": 2, "n_head": 2, "d_head": 3, "d_inner": 5, "mem_len": 4}
MODELS = {
    "one table, cutoffs": {"d_model": 8, "d_embed": 8, "div_val": 1, "cutoffs": [4, 7]},
    "one narrow table, cutoffs, own projections": {
        "d_model": 8,
        "d_embed": 4,
        "div_val": 1,
        "cutoffs": [4, 7],
        "tie_projs": [False, False, False],
    },
    "one narrow table, cutoffs, shared projections": {"d_model": 8, "d_embed": 4, "div_val": 1, "cutoffs": [4, 7]},
    "one narrow table": {"d_model": 8, "d_embed": 4, "div_val": 1, "cutoffs": [], "tie_projs": [True]},
    "lm1b as published: no projection shared": {
        "d_model": 8,
        "d_embed": 8,
        "div_val": 2,
        "cutoffs": [4, 7],
        "proj_same_dim": False,
        "tie_projs": [False, False, False],
    },
    "lm1b's rule where a later bin has the model's width": {
        "d_model": 8,
        "d_embed": 16,
        "div_val": 2,
        "cutoffs": [4, 7],
        "proj_same_dim": False,
        "tie_projs": [False, True, False],
    },
}


def random_state(config):
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in layout.legacy_tensors(config).items()}


def tensorflow_variables(config, state):
    """The variables that tf/model.py makes for a model with this legacy state dict."""
    variables = {"global_step": torch.tensor(7)}
    bins = len(config.cutoffs) + 1
    scopes = [f"cutoff_{i}/" for i in range(bins)] if config.div_val > 1 else [""]
    for i, scope in enumerate(scopes):
        variables[f"adaptive_embed/{scope}lookup_table"] = state[f"transformer.word_emb.emb_layers.{i}.weight"]
        if f"transformer.word_emb.emb_projs.{i}" in state:
            variables[f"adaptive_embed/{scope}proj_W"] = state[f"transformer.word_emb.emb_projs.{i}"].t()
    if config.cutoffs:
        biases = [state[f"crit.out_layers.{i}.bias"] for i in range(len(scopes))]
        biases = biases if config.div_val > 1 else biases[0].split([end - start for start, end, _ in config.bins])
        for i, bias in enumerate(biases):
            variables[f"adaptive_softmax/cutoff_{i}/b"] = bias
            if f"crit.out_projs.{i}" in state:
                variables[f"adaptive_softmax/cutoff_{i}/proj"] = state[f"crit.out_projs.{i}"].t()
        variables["adaptive_softmax/cutoff_0/cluster_W"] = state["crit.cluster_weight"]
        variables["adaptive_softmax/cutoff_0/cluster_b"] = state["crit.cluster_bias"]
    else:
        variables["adaptive_softmax/bias"] = state["crit.out_layers.0.bias"]
    layers = [f"transformer.layers.{number}." for number in range(config.n_layer)]
    for name in ("r_w_bias", "r_r_bias"):
        variables[name] = torch.stack([state[f"{layer}dec_attn.{name}"] for layer in layers])
    for number, layer in enumerate(layers):
        for theirs, ours in {
            "rel_attn/qkv/kernel": "dec_attn.qkv_net.weight",
            "rel_attn/r/kernel": "dec_attn.r_net.weight",
            "rel_attn/o/kernel": "dec_attn.o_net.weight",
            "rel_attn/LayerNorm/gamma": "dec_attn.layer_norm.weight",
            "rel_attn/LayerNorm/beta": "dec_attn.layer_norm.bias",
            "ff/layer_1/kernel": "pos_ff.CoreNet.0.weight",
            "ff/layer_1/bias": "pos_ff.CoreNet.0.bias",
            "ff/layer_2/kernel": "pos_ff.CoreNet.3.weight",
            "ff/layer_2/bias": "pos_ff.CoreNet.3.bias",
            "ff/LayerNorm/gamma": "pos_ff.layer_norm.weight",
            "ff/LayerNorm/beta": "pos_ff.layer_norm.bias",
        }.items():
            value = state[f"{layer}{ours}"]
            variables[f"layer_{number}/{theirs}"] = value.t() if theirs.endswith("kernel") else value
    return {name if name == "global_step" else f"transformer/{name}": value for name, value in variables.items()}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_every_kind(name, tmp_path):
    """Two data files, the optimizer's slots, and cutoffs with both ends as data_utils.py writes them."""
    config = TransfoXLConfig(**SIZES, **MODELS[name], vocab_size=12)
    state = random_state(config)
    variables = tensorflow_variables(config, state)
    slots = {f"{key}/{slot}": value for key, value in variables.items() for slot in ("Adam", "Adam_1")}
    write_bundle(tmp_path / "model" / "model.ckpt-3", variables | slots | {"beta1_power": torch.tensor(0.9)}, shards=2)
    (tmp_path / "data").mkdir()
    cutoffs = [0, *config.cutoffs, 12] if config.cutoffs else []
    info = {"vocab_size": 12, "cutoffs": cutoffs, "dataset": "lm1b"}
    (tmp_path / "data" / "corpus-info.json").write_text(json.dumps(info))
    arguments = ["--from", "kimiyoung-tf", "--checkpoint", str(tmp_path / "model"), "--output", str(tmp_path / "out")]
    assert command_line.main(arguments) == 0
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == state.keys()
    assert all(torch.equal(written[key], state[key]) for key in state)
    made = TransfoXLConfig.from_pretrained(tmp_path / "out")
    assert (made.mem_len, made.clamp_len, made.same_length) == (128, -1, True)
    assert (made.tie_projs, made.cutoffs, made.proj_same_dim) == (
        config.tie_projs,
        config.cutoffs,
        config.proj_same_dim,
    )


def small_checkpoint(tmp_path, **more):
    config = TransfoXLConfig(**SIZES, **MODELS["one table, cutoffs"], vocab_size=12)
    write_bundle(tmp_path / "model.ckpt-0", tensorflow_variables(config, random_state(config)) | more)
    return tmp_path / "model.ckpt-0"


@pytest.mark.parametrize(
    ("info", "origin"), [({"dataset": "my-piano-music"}, "transformer-xl (`my-piano-music`)"), ({}, "transformer-xl")]
)
def test_a_checkpoint_of_another_text_is_not_said_to_be_of_a_published_one(tmp_path, info, origin):
    """Its card had the name of the data set whose lengths it got."""
    prefix = small_checkpoint(tmp_path)
    (tmp_path / "corpus-info.json").write_text(json.dumps(info))
    checkpoint = kimiyoung_tf.read(prefix)
    assert checkpoint.origin.endswith(origin)
    assert checkpoint.explained["mem_len"].endswith(
        "with, which has a softmax of this kind; the checkpoint does not say"
    )
    (tmp_path / "corpus-info.json").write_text(json.dumps({"dataset": "wt103"}))
    checkpoint = kimiyoung_tf.read(prefix)
    assert checkpoint.explained["mem_len"] == "what the original evaluates wt103 with"
    assert checkpoint.origin.endswith("transformer-xl (`wt103`)") and checkpoint.fields["mem_len"] == 1600


def test_variable_the_model_has_not_is_named(tmp_path):
    prefix = small_checkpoint(tmp_path, **{"transformer/layer_0/gate/kernel": torch.ones(1)})
    with pytest.raises(layout.ConversionError, match="transformer/layer_0/gate/kernel, which the model has not"):
        kimiyoung_tf.read(prefix)


def test_corpus_info_of_another_checkpoint(tmp_path):
    prefix = small_checkpoint(tmp_path)
    (tmp_path / "corpus-info.json").write_text('{"vocab_size": 13, "cutoffs": [4, 7]}')
    with pytest.raises(layout.ConversionError, match="vocab_size 13, the checkpoint's shapes say 12"):
        kimiyoung_tf.read(prefix)


def test_a_corpus_that_is_not_there_is_refused(tmp_path):
    """A folder that describes one is not: its symbols are unknown, and its numbers are compared."""
    prefix, folder = small_checkpoint(tmp_path), tmp_path / "data"
    folder.mkdir()
    with pytest.raises(layout.ConversionError, match="nowhere does not exist; expected the pickled corpus"):
        kimiyoung_tf.read(prefix, tmp_path / "nowhere")
    with pytest.raises(layout.ConversionError, match="data is a folder without cache.pt or cache.pkl"):
        kimiyoung_tf.read(prefix, folder)
    (folder / "corpus-info.json").write_text('{"vocab_size": 12}')
    assert kimiyoung_tf.read(prefix, folder).vocabulary is None
    (folder / "cache.pt").write_bytes(b"")
    with pytest.raises(UnsafePickleError, match="cache.pt is empty"):
        kimiyoung_tf.read(prefix, folder)


@pytest.mark.parametrize("suffix", ["", ".index", ".data-00000-of-00001", ".meta"])
def test_every_way_to_name_a_checkpoint(suffix, tmp_path):
    prefix = small_checkpoint(tmp_path)
    assert kimiyoung_tf.find_prefix(prefix.with_name(prefix.name + suffix)) == prefix
    assert kimiyoung_tf.find_prefix(tmp_path) == prefix


def test_folder_with_several_checkpoints_follows_the_pointer(tmp_path):
    prefix = small_checkpoint(tmp_path)
    (tmp_path / "model.ckpt-9.index").write_bytes(b"")
    with pytest.raises(layout.ConversionError, match="2 checkpoints"):
        kimiyoung_tf.find_prefix(tmp_path)
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "/elsewhere/model.ckpt-0"\n')
    assert kimiyoung_tf.find_prefix(tmp_path) == prefix


# ---- damage ----


def test_damaged_data_is_noticed(tmp_path):
    prefix = small_checkpoint(tmp_path)
    path = tmp_path / "model.ckpt-0.data-00000-of-00001"
    content = bytearray(path.read_bytes())
    content[8] ^= 1
    path.write_bytes(content)
    bundle = TensorBundle(prefix)
    with pytest.raises(TensorBundleError, match="checksum"):
        for name in bundle.entries:
            bundle.read(name)


def test_missing_and_cut_off_data_files(tmp_path):
    bundle = TensorBundle(small_checkpoint(tmp_path))
    path = tmp_path / "model.ckpt-0.data-00000-of-00001"
    path.write_bytes(path.read_bytes()[:10])
    with pytest.raises(TensorBundleError, match="ends before variable transformer/r_w_bias"):
        bundle.read("transformer/r_w_bias")
    path.unlink()
    with pytest.raises(TensorBundleError, match="model.ckpt-0.data-00000-of-00001.* is missing"):
        bundle.read("transformer/r_w_bias")


@settings(FUZZ, max_examples=1000)
@given(data=st.data())
def test_1000_damaged_indices_are_refused_or_read(data, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "damaged"
    if not folder.exists():
        small_checkpoint(folder)
    content = bytearray((folder / "model.ckpt-0.index").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(content)))
        content[position : position + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    (folder / "model.ckpt-1.index").write_bytes(content)
    try:
        bundle = TensorBundle(folder / "model.ckpt-1")
    except TensorBundleError as error:
        assert "\n" not in str(error)
        return
    for name in bundle.entries:
        with pytest.raises(TensorBundleError):
            bundle.read(name)
