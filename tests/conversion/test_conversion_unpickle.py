"""Pickles only describe values: hostile, damaged and random files run nothing and fail in one line."""

import io
import os
import pickle
import pickletools
import struct
import sys
import time
import zipfile
from collections import Counter, OrderedDict, defaultdict

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peak_memory import bounded_memory
from txl_hf.conversion import command_line, torch_file
from txl_hf.legacy.unpickle import StandIn, UnsafePickleError

FUZZ = settings(deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True)

# Python reports here whatever a program does to the world; a hook cannot be removed, so that it is switched.
WATCHED = ("import", "exec", "compile", "pickle.", "marshal.", "os.", "subprocess.", "socket.", "ctypes.", "shutil.")
_events = None


def _watch(event, arguments):
    if _events is not None and (event.startswith(WATCHED) or event == "open"):
        _events.append((event, str(arguments[:1])))


sys.addaudithook(_watch)


def load_watched(path):
    """Load `path`; return its value or the UnsafePickleError. Anything done but reading that file fails the test."""
    global _events
    with bounded_memory(1 << 28):  # a few bytes can ask for much, which is refused as a MemoryError
        _events = []
        try:
            return torch_file.load(path)
        except UnsafePickleError as error:
            assert "\n" not in str(error)
            return error
        finally:
            events, _events = _events, None
            done = [event for event in events if event[0] != "open" or str(path) not in event[1]]
            assert done == []


@pytest.fixture(autouse=True, scope="module")
def warm(tmp_path_factory):
    """The first use of zipfile and of the text codecs imports them."""
    path = tmp_path_factory.mktemp("warm") / "file"
    torch.save({"text": "é", "tensor": torch.ones(2)}, path)
    torch_file.load(path)["tensor"].read()
    load_lenient(archive(path.parent, {"a/data.pkl": b"\x80\x02N."}))
    for protocol in range(6):
        path.write_bytes(pickle.dumps(["é", b"\xff", 2**80, 1.5, {1}], protocol=protocol))
        torch_file.load(path)
    path.write_bytes(b"\x80\x02I1\nL1L\nF1.0\nS'a'\nVx\\u0041\n.")
    assert load_lenient(path) == "xA"


def load_lenient(path):
    try:
        return torch_file.load(path)
    except UnsafePickleError as error:
        return error


def write(tmp_path, data):
    path = tmp_path / "file.pkl"
    path.write_bytes(data)
    return path


class Run:
    """Pickles as a call of `function`."""

    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


# ---- what is understood ----


@pytest.mark.parametrize("protocol", range(6))
def test_plain_values_come_back(protocol, tmp_path):
    value = {
        "numbers": [0, -1, 255, 2**31, -(2**70), 1.5, True, False, None],
        "text": ["a", "é\n", "x" * 300],
        "bytes": [b"", b"\x00\xff" * 200],
        "containers": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), {1, 2}, frozenset("ab")),
        "ordered": OrderedDict(a=1),
        "counted": Counter("aab"),
        "default": defaultdict(list, x=[1]),
    }
    value["itself"] = value["numbers"]
    loaded = load_watched(write(tmp_path, pickle.dumps(value, protocol=protocol)))
    assert loaded == value
    assert loaded["itself"] is loaded["numbers"]


@pytest.mark.parametrize("new_format", [True, False], ids=["zip", "torch-0.4"])
def test_tensors_come_back(new_format, tmp_path):
    base = torch.arange(24, dtype=torch.float32)
    value = {
        "view": base[4:16].reshape(3, 4).t(),
        "parameter": torch.nn.Parameter(base),
        "half": torch.ones(3, dtype=torch.float16),
        "bfloat": torch.ones(3, dtype=torch.bfloat16),
        "long": torch.tensor(7),
        "empty": torch.empty(0, 5),
    }
    torch.save(value, tmp_path / "file.pt", _use_new_zipfile_serialization=new_format)
    loaded = load_watched(tmp_path / "file.pt")
    for name, tensor in value.items():
        read = loaded[name].read()
        assert read.dtype == tensor.dtype and torch.equal(read, tensor)
    assert loaded["view"].storage.key == loaded["parameter"].storage.key


def test_a_module_becomes_stand_ins(tmp_path):
    torch.save(torch.nn.Linear(3, 2), tmp_path / "file.pt")
    module = load_watched(tmp_path / "file.pt")
    assert str(module.name) == "torch.nn.modules.linear.Linear"
    assert module.attributes["in_features"] == 3
    assert module.attributes["_parameters"]["weight"].read().shape == (2, 3)


# ---- what is refused, or made harmless ----

HOSTILE = {
    "os.system": pickle.dumps(Run(os.system, "echo pwned > pwned")),
    "eval": pickle.dumps(Run(eval, "open('pwned', 'w')")),
    "exec in a list": pickle.dumps([1, Run(exec, "import os; os.mkdir('pwned')")]),
    "getattr chain": pickle.dumps(Run(getattr, Run(__import__, "os"), "system")),
    "call of a call": b"\x80\x02cbuiltins\ngetattr\ncos\n__dict__\nU\x06system\x86RU\x02ls\x85R.",
    "dotted name": b"\x80\x04\x8c\x08builtins\x8c\x15list.__class__.__base__\x93)R.",
    "nested pickle": pickle.dumps(Run(pickle.loads, pickle.dumps(Run(os.system, "touch pwned")))),
    "copyreg extension": b"\x80\x02\x82\x01.",
    "copyreg extensions": b"\x80\x02\x83\x01\x01\x84\x01\x01\x01\x01.",
    "instance": b"(S'touch pwned'\nios\nsystem\n.",
    "object": b"(cos\nsystem\nS'touch pwned'\no.",
    "new object": b"\x80\x02cos\nsystem\nX\x05\x00\x00\x00touch\x85\x81.",
    "new object with keywords": b"\x80\x04cos\nsystem\n)}\x8c\x07commandX\x05\x00\x00\x00touchs\x92.",
    "setstate": b"\x80\x02cos\nsystem\n)\x81}X\x0c\x00\x00\x00__setstate__cos\nsystem\nsbX\x05\x00\x00\x00touchb.",
    "persistent id": b"\x80\x02X\x01\x00\x00\x00xQ.",
    "text as persistent id": b"Pos.system\n.",
    "codec bomb": pickle.dumps(Run(__import__("_codecs").encode, "x" * 99, "zip")),
    "builder with wrong arguments": b"\x80\x02ccollections\nOrderedDict\nK\x05\x85R.",
    "builder of builders": b"\x80\x02ccollections\nOrderedDict\nccollections\nCounter\n\x85R.",
    "append to a name": b"\x80\x02cos\nsystem\nK\x01a.",
    "huge string": b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7fabc.",
    "huge integer": b"L" + b"9" * 100_000 + b"L\n.",
    "deep stand-ins": b"\x80\x02" + b"cos\nsystem\n" * 20_000 + b")R" + b"\x85R" * 19_999 + b".",
    "deep list": b"\x80\x02" + b"]" * 20_000 + b"a" * 19_999 + b".",
    "copied again": b"\x80\x02(" + b"K\x01" * 5_000 + b"lq\x010" + b"c__builtin__\nset\nh\x01\x85R0" * 5_000 + b"N.",
    "no stop": b"\x80\x02K\x01",
    "only a mark": b"\x80\x02(.",
    "empty stack": b"\x80\x02.",
    "text": b"<!doctype html><title>404</title>",
    "pointer of Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
    "empty": b"",
}  # fmt: skip


CHECKPOINTS = [
    ("kimiyoung-pytorch", "file.pkl"),
    ("nvidia", "file.pkl"),
    ("transformers", "model"),
    ("transformers", "tokenizer"),
]


@pytest.mark.parametrize(
    ("name", "checkpoints"),
    [
        *((name, [CHECKPOINTS[number % len(CHECKPOINTS)]]) for number, name in enumerate(HOSTILE)),
        *(pytest.param(name, CHECKPOINTS, marks=pytest.mark.slow) for name in HOSTILE),
    ],
    ids=[*HOSTILE, *(f"{name} as each" for name in HOSTILE)],
)
def test_hostile_pickle_runs_nothing(name, checkpoints, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    value = load_watched(write(tmp_path, HOSTILE[name]))
    assert not (tmp_path / "pwned").exists()
    assert isinstance(value, UnsafePickleError | StandIn | list | dict) or value is None
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "tokenizer").mkdir()
    for copy in ("model/pytorch_model.bin", "tokenizer/vocab.pkl"):
        (tmp_path / copy).write_bytes(HOSTILE[name])
    before = sorted(tmp_path.rglob("*"))
    for family, checkpoint in checkpoints:
        assert command_line.main(["--from", family, "--checkpoint", checkpoint, "--output", "out"]) == 1
        err = capfd.readouterr().err
        assert len(err.splitlines()) == 1 and "Traceback" not in err
    assert sorted(tmp_path.rglob("*")) == before


# Each instruction that calls a class or function, here one of a module whose names the originals' files hold.
CALLS = {
    "REDUCE": b"cnumpy\nload\n(Vfile\ntR.",
    "INST": b"(Vfile\ninumpy\nload\n.",
    "INST without arguments": b"(inumpy\nload\n.",
    "OBJ": b"(cnumpy\nload\nVfile\no.",
    "OBJ without arguments": b"(cnumpy\nload\no.",
    "NEWOBJ": b"\x80\x02cnumpy\nload\nVfile\n\x85\x81.",
    "NEWOBJ_EX": b"\x80\x04cnumpy\nload\n)}\x8c\x04fileK\x01s\x92.",
    "STACK_GLOBAL": b"\x80\x04\x8c\x05numpy\x8c\x04load\x93\x8c\x04file\x85R.",
}


@pytest.mark.parametrize("program", CALLS.values(), ids=CALLS)
def test_a_known_name_leads_to_nothing_real(program, tmp_path):
    value = load_watched(write(tmp_path, program))
    assert isinstance(value, StandIn) and value.name == "numpy.load" and value.attributes == {}


# Whatever a pickle can get hold of, and the instructions that would change it.
OBJECTS = {
    "class": b"ccollections\nCounter\n",
    "function": b"cnumpy\nload\n",
    "stand-in": b"cnumpy\nload\n)R",
    "ordered dictionary": b"ccollections\nOrderedDict\n)R",
    "dictionary": b"}",
    "list": b"]",
    "set": b"\x8f",
    "text": b"Vtext\n",
    "bytes": b"C\x01a",
    "array": b"\x96\x01\x00\x00\x00\x00\x00\x00\x00a",
    "number": b"K\x01",
}
CHANGES = {
    "BUILD": b"}Vname\nVpwned\nsb",
    "BUILD of slots": b"N}(Vname\nVpwned\nV__class__\ncnumpy\nload\nV__dict__\n}u\x86b",
    "APPEND": b"K\x07a",
    "APPENDS": b"(K\x07K\x08e",
    "SETITEM": b"K\x00K\x07s",
    "SETITEMS": b"(K\x00K\x07u",
    "ADDITEMS": b"(K\x07\x90",
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("made", OBJECTS.values(), ids=OBJECTS)
def test_a_change_is_of_the_contents_of_plain_containers_alone(made, change, tmp_path):
    value = load_watched(write(tmp_path, b"\x80\x05" + made + change + b"."))
    if isinstance(value, StandIn):
        assert value.name == "numpy.load" and value.attributes.get("name") in (None, "pwned")
    elif not isinstance(value, type):
        assert isinstance(value, UnsafePickleError | dict | list | set | bytearray)
        assert not hasattr(value, "name") and getattr(value, "__dict__", None) in (None, {})
    else:
        assert issubclass(value, StandIn) and value.name in ("numpy.load", "collections.Counter")
    assert not hasattr(Counter, "name") and Counter("a") == {"a": 1}


STATE = b"}(Vfirst\nK\x63Vkey\nVpwned\nVoffset\nK\x63Vfile\nNVshape\nNVread\nNu"


@pytest.mark.parametrize(
    "describe",
    [lambda data: data.replace(b"Q", b"Q" + STATE + b"b"), lambda data: data[:-1] + STATE + b"b."],
    ids=["storage", "tensor"],
)
def test_a_pickle_sets_nothing_on_a_tensor(describe, tmp_path):
    described = describe(storage_pickle(4, (4,), (1,)))
    assert described.count(STATE) == 1
    tensor = load_watched(archive(tmp_path, {"a/data.pkl": described, "a/data/0": struct.pack("<4f", 1, 2, 3, 4)}))
    assert tensor.read().tolist() == [1, 2, 3, 4]


def archive(tmp_path, records, compression=zipfile.ZIP_STORED):
    path = tmp_path / "file.pt"
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, data in records.items():
            file.writestr(name, data)
    return path


def storage_pickle(numel, shape, stride, offset=0):
    """A pickle of one tensor with these numbers, in a zip archive's form."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=2)
    pickler.persistent_id = lambda value: value.identity if isinstance(value, _Persistent) else None
    storage = _Persistent(("storage", torch.FloatStorage, "0", "cpu", numel))
    pickler.dump(Run(torch._utils._rebuild_tensor_v2, storage, offset, shape, stride, False, OrderedDict()))
    return file.getvalue()


class _Persistent:
    def __init__(self, identity):
        self.identity = identity


@pytest.mark.parametrize(
    ("numel", "shape", "stride", "offset"),
    [
        (4, (10**9,), (0,), 0),  # blown up by a stride of 0
        (4, (5,), (1,), 0),
        (4, (2,), (3,), 1),
        (10**15, (10**15,), (1,), 0),
        (4, (-1,), (1,), 0),
        (4, (2, 2), (1,), 0),
        (4, (1,) * 9, (1,) * 9, 0),
    ],
)
def test_tensor_that_does_not_fit_its_storage(numel, shape, stride, offset, tmp_path):
    records = {"a/data.pkl": storage_pickle(numel, shape, stride, offset), "a/data/0": bytes(16)}
    value = load_watched(archive(tmp_path, records))
    if isinstance(value, torch_file.StoredTensor):
        with pytest.raises(UnsafePickleError):
            value.read()
    else:
        assert isinstance(value, UnsafePickleError)


@pytest.mark.parametrize("new_format", [True, False], ids=["zip", "torch-0.4"])
def test_views_are_read_without_their_storage(new_format, tmp_path):
    """As many views as a model has tensors must not keep the whole of their storage in memory each."""
    flat = torch.arange(10_000.0)
    square = flat.view(100, 100)
    views = [
        flat[5:9],
        flat[::7],
        square[:, 3],
        square.t()[2:4],
        square[4],
        flat[6000:6001],
        square.expand(2, 100, 100)[0],
    ]
    torch.save(views, tmp_path / "file.pt", _use_new_zipfile_serialization=new_format)
    for view, stored in zip(views, torch_file.load(tmp_path / "file.pt"), strict=True):
        read = stored.read()
        assert torch.equal(read, view) and read.is_contiguous()
        assert read.untyped_storage().nbytes() == view.numel() * 4


def test_views_far_apart_cost_neither_time_nor_memory(tmp_path):
    """Two numbers at the ends of 40 MB: only the pages that hold them are read, not what lies between."""
    flat = torch.zeros(10_000_000)
    flat[-1] = 1
    torch.save([flat.as_strided((2,), (9_999_999,))] * 300, tmp_path / "file.pt")
    begin = time.process_time()
    for stored in torch_file.load(tmp_path / "file.pt"):
        assert stored.read().tolist() == [0, 1]
    assert time.process_time() - begin < 2


def test_one_flipped_bit_is_noticed(tmp_path):
    torch.save({"weight": torch.ones(2000)}, tmp_path / "file.pt")
    data = bytearray((tmp_path / "file.pt").read_bytes())
    data[data.index(b"\0\0\x80\x3f" * 9) + 3] ^= 0x40
    (tmp_path / "file.pt").write_bytes(data)
    with pytest.raises(UnsafePickleError, match="file.pt is damaged: the checksum of record .*data/0 does not match"):
        torch_file.load(tmp_path / "file.pt")["weight"].read()


def test_checksums_that_torch_was_told_to_leave_out_are_not_missed(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"weight": torch.ones(5)}, tmp_path / "file.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(torch_file.load(tmp_path / "file.pt")["weight"].read(), torch.ones(5))


def two_disks(data: bytes) -> bytes:
    end = data.rindex(b"PK\x05\x06")
    return data[: end - 20] + struct.pack("<4sLQL", b"PK\x06\x07", 0, 0, 2) + data[end:]


def later_version(data: bytes) -> bytes:
    """That a record says is needed to unpack it."""
    entry = data.index(b"PK\x01\x02")
    return data[: entry + 6] + b"\xa0" + data[entry + 7 :]


@pytest.mark.parametrize("damage", [two_disks, later_version])
def test_an_archive_that_zipfile_refuses_in_its_own_way(tmp_path, damage):
    """An error of another kind than for damage."""
    path = tmp_path / "pytorch_model.bin"
    torch.save({"weight": torch.zeros(3)}, path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UnsafePickleError, match="^pytorch_model.bin"):
        torch_file.load(path)


def test_compression_bomb_is_not_unpacked(tmp_path):
    path = archive(tmp_path, {"a/data.pkl": b"\x80\x02N.", "a/data/0": bytes(10**8)}, zipfile.ZIP_DEFLATED)
    assert "compressed" in str(load_watched(path))


def test_record_that_claims_more_than_the_file(tmp_path):
    path = archive(tmp_path, {"a/data.pkl": storage_pickle(4, (4,), (1,)), "a/data/0": bytes(16)})
    data = path.read_bytes()
    entry = data.rindex(b"PK\x01\x02")  # the central directory's entry of the last record
    path.write_bytes(data[: entry + 20] + struct.pack("<II", 2**30, 2**30) + data[entry + 28 :])
    assert isinstance(load_watched(path), UnsafePickleError)


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("new_format", [True, False], ids=["zip", "torch-0.4"])
def test_truncated_file(kept, new_format, tmp_path):
    torch.save({"weight": torch.ones(2000)}, tmp_path / "file.pt", _use_new_zipfile_serialization=new_format)
    data = (tmp_path / "file.pt").read_bytes()
    (tmp_path / "file.pt").write_bytes(data[: int(len(data) * kept)])
    refusal = load_watched(tmp_path / "file.pt")
    assert isinstance(refusal, UnsafePickleError)
    if new_format:
        assert "file.pt is truncated or damaged" in str(refusal)


# ---- fuzzing ----


def saved(new_format):
    file = io.BytesIO()
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    torch.save({"model": module, "vocab": Counter("hello")}, file, _use_new_zipfile_serialization=new_format)
    return file.getvalue()


SEEDS = [saved(True), saved(False), pickle.dumps(Counter("hello"), protocol=2), *HOSTILE.values()]
SEEDS = [seed[:20_000] for seed in SEEDS]


def read_all(value):
    """Read every tensor that a few steps into the value reach, as a converter would."""
    if isinstance(value, StandIn):
        value = value.attributes
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for child in [value, *list(children)[:20]]:
        if isinstance(child, torch_file.StoredTensor):
            try:
                child.read()
            except UnsafePickleError:
                pass


few_and_many = pytest.mark.parametrize("examples", [200, pytest.param(4000, marks=pytest.mark.slow)])


@pytest.mark.filterwarnings("ignore:invalid escape sequence")
@few_and_many
def test_mutated_files_run_nothing(examples, tmp_path):
    @settings(FUZZ, max_examples=examples)
    @given(data=st.data())
    def check(data):
        content = bytearray(data.draw(st.sampled_from(SEEDS)))
        for _ in range(data.draw(st.integers(1, 6))):
            position = data.draw(st.integers(0, len(content)))
            change = data.draw(st.binary(max_size=4))
            content[position : position + data.draw(st.integers(0, 4))] = change
        (tmp_path / "mutated").write_bytes(content)
        read_all(load_watched(tmp_path / "mutated"))

    check()


OPCODES = [opcode.code.encode("latin-1") for opcode in pickletools.opcodes]
PIECES = [
    *[code for code in OPCODES if code not in b"."],
    *[b"K\x01", b"X\x02\x00\x00\x00os", b"X\x06\x00\x00\x00system", b"h\x00", b"q\x00", b"h\x01", b"q\x01", b"\x94"],
    *[b"cos\nsystem\n", b"cbuiltins\neval\n", b"c__builtin__\ngetattr\n", b"ccollections\nOrderedDict\n", b")R"],
    *[b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch\nFloatStorage\n", b"c_codecs\nencode\n", b"\x85R", b"}b"],
]  # fmt: skip


@few_and_many
def test_generated_programs_run_nothing(examples, tmp_path):
    @settings(FUZZ, max_examples=examples)
    @given(program=st.lists(st.sampled_from(PIECES), max_size=40))
    def check(program):
        (tmp_path / "generated").write_bytes(b"\x80\x02" + b"".join(program) + b".")
        load_watched(tmp_path / "generated")

    check()


@few_and_many
def test_random_files_run_nothing(examples, tmp_path):
    @settings(FUZZ, max_examples=examples)
    @given(content=st.binary(max_size=200), magic=st.sampled_from([b"", b"\x80\x02", b"\x80\x04\x95", b"PK\x03\x04"]))
    def check(content, magic):
        (tmp_path / "random").write_bytes(magic + content)
        load_watched(tmp_path / "random")

    check()
