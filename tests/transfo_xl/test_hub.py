"""Pushing to a Hub (a server on loopback, `hub_server.py`) and loading what it received, with and without the package.

What speaks to the Hub is in `hub_client.py` and runs in processes of its own: `huggingface_hub` reads its environment
once, when it is imported.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard

import txl_hf
from hub_client import TEXT
from hub_server import HubServer
from scripts import run_script

HEADS = ["AutoModel", "AutoModelForCausalLM", "AutoModelForSequenceClassification"]
SOURCES = Path(txl_hf.__file__).parent / "transfo_xl"
# Flat siblings are what remote code can import.
FLAT = {path.name for path in SOURCES.glob("*_transfo_xl*.py")}


def with_imports(name):
    """The names of a file and of all those that it imports, which are copied beside the weights with it."""
    found, pending = set(), [name]
    while pending:
        found.add(name := pending.pop())
        siblings = re.findall(r"^\s*from \.(\w+) import", (SOURCES / name).read_text(), re.M)
        pending += {f"{sibling}.py" for sibling in siblings} - found
    return found


HUB_SET, TOKENIZER = with_imports("modeling_transfo_xl.py"), with_imports("tokenization_transfo_xl.py")
CODE = HUB_SET - {"attention_transfo_xl_triton.py"}
MODEL = CODE | {"README.md", "config.json", "generation_config.json", "model.safetensors"}

# Loaded tensors lie in the file, at other alignments, so that vectorised sums may differ in the last bit.
LAST_BIT = {"rtol": 1e-6, "atol": 1e-6}


@pytest.fixture(scope="module")
def hub():
    with HubServer({"hf_token_of_user": "user", "hf_token_of_guest": "guest"}) as server:
        yield server


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hub")


@pytest.fixture(scope="module")
def play(hub, folder, tmp_path_factory):
    """Run a role of `hub_client.py` with an empty cache of its own; return a function from a step to its result."""

    def play_role(role):
        environment = hub.environment("hf_token_of_user") | {"HF_HOME": str(tmp_path_factory.mktemp("hf_home"))}
        client = Path(__file__).parents[1] / "hub_client.py"
        process = run_script(client, role, folder, timeout=300, only_torch=True, **environment)
        assert process.returncode == 0, process.stderr
        results = torch.load(folder / f"{role}.pt", weights_only=False)

        def result(step):
            if isinstance(results[step], Exception):
                pytest.fail(f"{role}, {step}:\n{results[step]}", pytrace=False)
            return results[step]

        return result

    return play_role


@pytest.fixture(scope="module")
def author(play):
    return play("author")


@pytest.fixture(
    scope="module",
    params=[pytest.param("reader", marks=pytest.mark.slow), "stranger"],
    ids=["with-package", "without-package"],
)
def reader(request, author, play):
    return play(request.param) if request.param == "reader" else request.getfixturevalue("stranger")


@pytest.fixture(scope="module")
def stranger(author, play):
    return play("stranger")


@pytest.fixture(scope="module")
def next_stranger(stranger, play):
    return play("next_stranger")


def test_every_flat_file_is_the_models_or_the_tokenizers():
    assert HUB_SET | TOKENIZER == FLAT


def test_repository_holds_all_that_loads_it(author, hub):
    author("push")
    repo = hub.repos["user/name"]
    files = repo.files()
    assert set(files) >= MODEL | HUB_SET
    assert repo.commits[repo.branches["main"]]["model.safetensors"].lfs
    for name in HUB_SET:
        assert files[name] == (SOURCES / name).read_bytes()


def test_pushing_is_one_commit(author, hub):
    author("push")
    assert len(hub.repos["user/name"].messages) == 2, hub.repos["user/name"].messages


@pytest.mark.parametrize("repository", ["user/name", "user/classifier"])
def test_auto_map_serves_every_head(author, hub, repository):
    author("push")
    files = hub.repos[repository].files()
    auto_map = json.loads(files["config.json"])["auto_map"]
    assert set(auto_map) >= {"AutoConfig", *HEADS}
    for head in ["AutoConfig", *HEADS]:
        module, class_name = auto_map[head].split(".")
        assert f"class {class_name}(".encode() in files[f"{module}.py"]


@pytest.mark.parametrize("output", [*HEADS, "mems", "generate"])
def test_loads_from_the_hub(author, reader, output):
    torch.testing.assert_close(reader("read")[output], author("push")[output], **LAST_BIT)


def test_what_trainer_pushed_loads(author, reader, hub):
    trained = author("push_from_trainer")
    assert (trained - author("push")["AutoModelForCausalLM"]).abs().max() > 0
    assert set(hub.repos["user/trained"].files()) >= MODEL
    torch.testing.assert_close(reader("read_trained"), trained, **LAST_BIT)


def test_what_trainer_pushes_in_training_loads(author, reader, hub):
    """The training may never come to its end, where Trainer pushes all that it has."""
    trained = author("push_in_training")
    for name, outputs in reader("read_what_is_in_training").items():
        assert hub.repos[f"user/{name}"].messages[-1] == "Training in progress, step 1"
        assert set(hub.repos[f"user/{name}"].files()) >= MODEL
        torch.testing.assert_close(outputs, trained[name], **LAST_BIT)
    card = hub.repos["user/begun"].files()["README.md"].decode()
    for auto_class in ("AutoModelForCausalLM", "AutoTokenizer"):
        assert f'{auto_class}.from_pretrained("user/begun", trust_remote_code=True)' in card
    assert not ModelCard(card).data.eval_results
    assert hub.repos["user/begun-with-memory"].files()["README.md"] == b"# By hand\n"


def test_config_loads_from_the_hub(reader):
    assert reader("read_config") == ("TransfoXLConfig", 32, [10, 30])


def test_no_code_runs_without_trust(stranger):
    assert "trust_remote_code=True" in stranger("load_without_trust")


def test_tokenizer_loads_from_the_hub(author, reader, hub):
    ids = author("push_tokenizer")
    files = hub.repos["user/spoken"].files()
    assert set(files) >= MODEL | TOKENIZER | {"tokenizer.json", "tokenizer_config.json"}
    assert reader("read_tokenizer") == ("TransfoXLTokenizer", ids, TEXT)


def test_second_push_keeps_an_edited_card(author, hub):
    author("push_over_an_edited_card")
    repo = hub.repos["user/edited"]
    card = repo.files()["README.md"].decode()
    for kept in ("# Edited by hand", "license: mit", "- mine", "- longer"):
        assert kept in card
    assert repo.messages[-1] == "Train longer"
    before, after = (files["model.safetensors"].oid for files in list(repo.commits.values())[-2:])
    assert before != after


def test_save_pretrained_pushes(author, hub, folder):
    author("push_while_saving")
    repo = hub.repos["user/saved"]
    assert repo.private
    assert repo.messages[-1] == "From a folder"
    assert set(repo.files()) >= MODEL
    assert repo.files()["model.safetensors"] == (folder / "saved" / "model.safetensors").read_bytes()


def test_the_code_that_a_derived_class_needs_is_pushed_too(author, hub):
    author("push_a_derived_class")
    assert set(hub.repos["user/derived"].files()) >= MODEL


def test_save_pretrained_pushes_the_shards_it_saved(author, hub, folder):
    author("push_in_shards")
    saved = {path.name for path in (folder / "shards").iterdir()}
    assert "model.safetensors.index.json" in saved
    assert set(hub.repos["user/shards"].files()) == saved | {".gitattributes"}


def test_branch_and_pull_request_leave_main_alone(author, hub):
    author("push_beside_main")
    repo = hub.repos["user/branches"]
    assert set(repo.files("main")) == {".gitattributes"}
    assert set(repo.files("experiment")) >= MODEL
    assert set(repo.files("refs/pr/1")) >= MODEL


def test_push_without_rights_says_so(author, hub):
    assert "no rights" in author("push_without_rights")
    assert len(hub.repos["user/name"].messages) <= 3


def test_remote_code_saves_its_code_again(stranger, hub, folder):
    stranger("save_again")
    for saved in (folder / "again", folder / "again-classifier"):
        assert {path.name for path in saved.iterdir()} >= MODEL - {"README.md", "generation_config.json"}
        # A reference to the repository of origin would load somebody else's code, whatever becomes of it.
        assert "--" not in str(json.loads((saved / "config.json").read_text())["auto_map"])
    assert set(hub.repos["user/again"].files()) >= MODEL


@pytest.mark.parametrize("place", ["folder", "hub"])
def test_remote_code_saved_again_loads(author, next_stranger, place):
    for name, output in next_stranger(f"read_again_from_{place}").items():
        torch.testing.assert_close(output, author("push")[name], **LAST_BIT)
