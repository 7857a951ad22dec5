"""`txl-generate` as it is typed: on a folder that `txl-train` made, from an option, a file and standard input."""

import re
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from models import small_model
from scripts import run_script
from txl_hf import TransfoXLTokenizer

GENERATE = "import sys; from txl_hf.commands import generate; generate(sys.argv[1:])"
TRAIN = "import sys; from txl_hf.commands import prepare, train; prepare(sys.argv[1:9]); train(sys.argv[9:])"
SIZES = "--n_layer 1 --d_model 16 --n_head 2 --d_head 8 --d_inner 16 --tgt_len 8 --mem_len 8 --batch_size 4"
WORDS = "the abbey is near the sea , and the bridge is near the dome .".split()


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The folder of `txl-train` for a text of characters."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "book.txt").write_text("the abbey of yebba is near the sea\n" * 100)
    recipe = Path(__file__).parents[2] / "examples" / "recipes" / "characters_small.yaml"
    prepare = f"--corpus text --mode characters --input {folder}/book.txt --output {folder}/data".split()
    options = f"--data {folder}/data --output {folder}/run {SIZES} --max_steps 2 --warmup_steps 1".split()
    options += "--eval_batch_size 2 --eval_memory_lengths 0".split()
    run = run_script("-c", TRAIN, *prepare, recipe, *options, cwd=folder)
    assert run.returncode == 0, run.stderr[-2000:]
    return folder / "run"


@pytest.fixture
def words(tmp_path) -> Path:
    """A model of words whose lines end in a token."""
    tokenizer = TransfoXLTokenizer.train_from_iterator(
        [" ".join(WORDS) + "\n"], mode="moses", eos_token="<eos>", line_ends=True
    )
    model = small_model(vocab_size=len(tokenizer), cutoffs=[], div_val=1, eos_token_id=None)
    model.save_pretrained(tmp_path / "words")
    tokenizer.save_pretrained(tmp_path / "words")
    return tmp_path / "words"


def write(*options: object, input: str = "") -> str:
    run = run_script("-c", GENERATE, *options, input=input)
    assert run.returncode == 0 and not run.stderr, run.stderr[-2000:]
    return run.stdout


def refused(*options: object, input: str = "") -> str:
    run = run_script("-c", GENERATE, *options, input=input)
    assert run.returncode != 0 and not run.stdout
    return run.stderr


def test_a_seed_decides_the_text(trained):
    options = (trained, "--prompt", "the abb", "--max_new_tokens", 40)
    texts = [write(*options, "--seed", seed) for seed in (3, 3, 4, 5)]
    assert texts[0] == texts[1] and len(set(texts)) > 1
    assert all(re.fullmatch(r"the abb[a-z\n ]{0,40}\n", text) for text in texts)


def test_a_prompt_comes_from_a_file_or_from_standard_input(trained, tmp_path):
    """Without the line feed that ends it; a long one is read in the segments of training."""
    prompt = "the abbey of yebba is near the sea\n" * 5 + "the"
    (tmp_path / "prompt.txt").write_text(prompt + "\n")
    expected = write(trained, "--prompt", prompt, "--no-do_sample")
    assert write(trained, "--prompt_file", tmp_path / "prompt.txt", "--no-do_sample") == expected
    assert write(trained, "--no-do_sample", input=prompt + "\n") == expected


def test_the_likeliest_text_is_that_of_generate(words):
    """Words are joined to the prompt as the tokenizer joins them, and lines end where `<eos>` ends them."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(words), AutoTokenizer.from_pretrained(words)
    prompt = tokenizer("the abbey", return_tensors="pt")
    expected = model.generate(**prompt, max_new_tokens=30, do_sample=False)[0]
    text = write(words, "--prompt", "the abbey", "--no-do-sample", "--max_new_tokens", 30)
    assert text == tokenizer.decode(expected, skip_special_tokens=True) + "\n"


def test_a_sentence_that_is_not_over_has_no_end(tmp_path):
    """A tokenizer of lm1b puts `<S>` behind a text, at which the model's text ends."""
    tokenizer = TransfoXLTokenizer.train_from_iterator([" ".join(WORDS)], mode="lm1b")
    model = small_model(vocab_size=len(tokenizer), cutoffs=[], div_val=1, eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    ids = tokenizer("the sea", return_tensors="pt")["input_ids"][:, :-1]
    expected = model.eval().generate(ids, max_new_tokens=8, do_sample=False)[0]
    text = write(tmp_path, "--prompt", "the sea", "--no-do_sample", "--max_new_tokens", 8)
    assert text == tokenizer.decode(expected, skip_special_tokens=True) + "\n"


@pytest.mark.parametrize(
    ("options", "input", "said"),
    [
        ([], "", "the prompt has no token: give the beginning of a text, with --prompt or --prompt_file"),
        (["--prompt_file", "nothing.txt"], "", "--prompt_file nothing.txt does not exist"),
        (["--prompt", "a", "--device", "abacus"], "", "--device abacus: "),
    ],
)
def test_what_is_wrong_is_one_line(words, options, input, said):
    [line] = refused(words, *options, input=input).splitlines()
    assert line.startswith(f"error: {said}")


def test_options_that_do_nothing_are_refused(words):
    for option in ("--temperature", "--top_k", "--top_p"):
        said = refused(words, "--prompt", "the", "--no-do_sample", option, 1).splitlines()[-1]
        assert re.search(rf"error: {option} does nothing with --no-do_sample", said)


def test_a_model_without_a_tokenizer_is_refused(words):
    for path in words.glob("*token*"):
        path.unlink()
    [line] = refused(words, "--prompt", "the").splitlines()
    assert line.startswith(f"error: the tokenizer of {words} cannot be read")
