"""lm_eval itself on the model `txl`: its figures are those of the model with its memory."""

import json
import math
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import huggingface_hub
import lm_eval
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer, models
from transformers import LogitsProcessor, PreTrainedTokenizerFast
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from txl_hf import TransfoXLTokenizer, evaluate_language_model, token_losses
from txl_hf.data.texts import encode_text
from txl_hf.integrations import lm_eval_model
from txl_hf.lm_eval import TransfoXLLM

WORDS = [f"word{i}" for i in range(40)]
# The whole text is in the longest memory.
SEGMENT, SHORT, WHOLE = 5, 12, 200
TASKS = {
    "rolling": """
task: rolling
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: word_perplexity
""",
    "choice": """
task: choice
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - metric: acc
""",
    "until": """
task: until
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{written}}"
generation_kwargs: {until: ["word7"], max_gen_toks: 12, do_sample: false}
metric_list:
  - metric: exact_match
""",
}


def words(length: int, seed: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (length,), generator=generator))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("lm_eval")


@pytest.fixture
def saved(make_model, folder):
    """A model and its tokenizer, in a folder."""
    path = folder / "model"
    tokenizer = TransfoXLTokenizer.from_symbols(["<eos>", "<unk>", *WORDS], mode="whitespace")
    if not path.exists():
        make_model(vocab_size=len(tokenizer), mem_len=WHOLE, tgt_len=SEGMENT).save_pretrained(path)
        tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def documents(saved, folder, request):
    """Texts longer than segment and short memory together, with what the model writes after them and three choices.

    Behind their last token a segment begins, so that a text with its continuation is cut into the same segments.
    """
    lm, memory_length = TransfoXLLM(str(saved)), getattr(request, "param", WHOLE)
    rows = []
    for seed, length in enumerate([61, 6, 31]):
        row = {"text": words(length, seed), "choices": [" " + words(n, 10 * seed + n) for n in (1, 4, 9)]}
        losses = [by_hand(lm, row["text"], choice, memory_length) for choice in row["choices"]]
        best = min(range(3), key=losses.__getitem__)
        rows.append(row | {"answer": best, "losses": losses, "written": written(saved, row["text"], memory_length)})
    (folder / "documents.json").write_text("\n".join(map(json.dumps, rows)))
    for name, task in TASKS.items():
        data = f"dataset_path: json\ndataset_kwargs: {{data_files: {folder}/documents.json}}\ntest_split: train\n"
        (folder / f"{name}.yaml").write_text(task.strip() + "\n" + data)
    return rows


def by_hand(lm: TransfoXLLM, context: str, continuation: str, memory_length: int, segment_length: int = SEGMENT):
    """The cost of a continuation in a text that is read as one."""
    ids = lm.tok_encode(context + continuation)
    losses = token_losses(lm.model, ids, segment_length, memory_length)
    return losses[len(lm.tok_encode(context)) - 1 :].sum().item()


def written(saved, text: str, memory_length: int) -> str:
    """Greedily, word by word behind a text that was read in segments."""
    lm = TransfoXLLM(str(saved), SEGMENT, memory_length)
    ids, found, mems = torch.tensor([lm.tok_encode(text)]), [], None
    for segment in ids[:, :-1].split(SEGMENT, dim=1):
        mems = lm.model(segment, mems=mems).mems
    last = ids[:, -1:]
    while len(found) < 12:
        outputs = lm.model(last, mems=mems)
        mems, last = outputs.mems, outputs.logits[:, -1:].argmax(-1)
        if last.item() == lm.eot_token_id:
            break
        found.append(last.item())
    return lm.tok_decode(found).split("word7")[0]


def arguments(saved, memory_length: int) -> str:
    return f"pretrained={saved},segment_length={SEGMENT},memory_length={memory_length}"


def expected_word_perplexity(lm: TransfoXLLM, documents, memory_length: int) -> float:
    total = 0.0
    for document in documents:
        ids = [lm.eot_token_id, *encode_text(lm.tokenizer, document["text"])]
        result = evaluate_language_model(lm.model, ids, SEGMENT, memory_length)
        total += result.nll * result.tokens
    return math.exp(total / sum(len(document["text"].split()) for document in documents))


@pytest.mark.parametrize(
    ("documents", "memory_length"), [(WHOLE, WHOLE), (SHORT, SHORT)], indirect=["documents"], ids=["whole", "short"]
)
def test_simple_evaluate(saved, documents, memory_length, folder):
    tasks = TaskManager(include_path=str(folder), include_defaults=False)
    found = lm_eval.simple_evaluate(
        model="txl",
        model_args=arguments(saved, memory_length),
        tasks=list(TASKS),
        task_manager=tasks,
        log_samples=True,
    )
    results, lm = found["results"], TransfoXLLM(str(saved))
    expected = expected_word_perplexity(lm, documents, memory_length)
    assert results["rolling"]["word_perplexity,none"] == pytest.approx(expected, rel=1e-5)
    assert results["choice"]["acc,none"] == 1.0
    for sample, document in zip(found["samples"]["choice"], documents, strict=True):
        for answer, loss in zip(sample["resps"], document["losses"], strict=True):
            assert float(answer[0][0]) == pytest.approx(-loss, rel=1e-4)
    assert [sample["resps"][0][0] for sample in found["samples"]["until"]] == [row["written"] for row in documents]
    assert results["until"]["exact_match,none"] == 1.0


def test_a_text_of_any_length_token_by_token(saved):
    """Which is cut into the same segments wherever its continuation begins."""
    lm = TransfoXLLM(str(saved), segment_length=1, memory_length=SHORT)
    pairs = [(words(length, length), " " + words(n, n)) for length in (3, 60) for n in (1, 17)]
    expected = [-by_hand(lm, *pair, SHORT, segment_length=1) for pair in pairs]
    found = [value for value, _ in lm.loglikelihood([Request(*pair) for pair in pairs])]
    assert found == pytest.approx(expected, rel=1e-5)
    assert found[-1] != pytest.approx(-by_hand(lm, *pairs[-1], WHOLE, segment_length=1), rel=1e-3)


@pytest.mark.parametrize("attn_type", [0, 2, 3])
def test_without_a_memory_each_token_sees_as_many_as_a_segment_holds(make_model, tmp_path, attn_type):
    """Also where fewer come before it, and whatever continuations there are beside."""
    tokenizer = TransfoXLTokenizer.from_symbols(["<eos>", "<unk>", *WORDS], mode="whitespace")
    sizes = {"mem_len": 0, "max_klen": SEGMENT} if attn_type else {}
    make_model(vocab_size=len(tokenizer), tgt_len=SEGMENT, attn_type=attn_type, **sizes).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    lm = TransfoXLLM(str(tmp_path), memory_length=0)
    context, choices = words(17, 1), [" " + words(n, n) for n in (1, 4, 9)]
    pairs = [(text, choice) for text in (context, "word1 word2") for choice in choices]
    expected = []
    for pair in pairs:
        first, ids = len(lm.tok_encode(pair[0])), lm.tok_encode("".join(pair))
        with torch.no_grad():
            rows = [
                lm.model(torch.tensor([ids[max(0, i - SEGMENT) : i]])).logits[0, -1] for i in range(first, len(ids))
            ]
        expected.append(sum(row[token].item() for row, token in zip(rows, ids[first:], strict=True)))
    assert [value for value, _ in lm.loglikelihood([Request(*pair) for pair in pairs])] == pytest.approx(expected)

    def best_after(ids):
        return int(lm.model(torch.tensor([ids[-SEGMENT:]])).logits[0, -1].argmax())

    best = lm.tok_decode([best_after(lm.tok_encode(context))])
    assert lm.loglikelihood([Request(context, " " + best)])[0][1]
    for seed in range(9):
        ids = lm.tok_encode(words(17, seed))
        while len(ids) < 23 and (token := best_after(ids)) != tokenizer.eos_token_id:
            ids.append(token)
        request = Request(words(17, seed), {"until": [], "max_gen_toks": 6})
        assert lm.generate_until([request]) == [lm.tok_decode(ids[17:])]


@pytest.mark.parametrize("ext_len", [3, 2 * SEGMENT])
@pytest.mark.parametrize("memory_length", [0, SHORT, WHOLE])
def test_what_a_model_reads_again_is_read_again(make_model, tmp_path, ext_len, memory_length):
    """In log-likelihoods and in generation: no token falls out between memory and segment."""
    tokenizer = TransfoXLTokenizer.from_symbols(["<eos>", "<unk>", *WORDS], mode="whitespace")
    found = []
    for length in (ext_len, 0):
        model = make_model(vocab_size=len(tokenizer), mem_len=WHOLE, tgt_len=SEGMENT, ext_len=length)
        model.save_pretrained(tmp_path / str(length))
        tokenizer.save_pretrained(tmp_path / str(length))
        lm = TransfoXLLM(str(tmp_path / str(length)), memory_length=memory_length)
        # Behind their last token a segment begins.
        requests = [Request(words(n, n), " " + words(14, 3)) for n in (1, 6, 31)]
        segment_length, again = (SEGMENT, length) if memory_length else (1, length + SEGMENT - 1)
        for request, (value, _) in zip(requests, lm.loglikelihood(requests), strict=True):
            losses = token_losses(lm.model, lm.tok_encode("".join(request.args)), segment_length, ext_len=again)
            assert value == pytest.approx(-losses[-14:].sum().item(), rel=1e-5)
        written = lm.generate_until([Request(words(n, n), {"max_gen_toks": 9}) for n in (3, 9, 31)])
        found.append(([value for value, _ in lm.loglikelihood(requests)], written))
    if memory_length == WHOLE:
        assert found[0][0] == pytest.approx(found[1][0], rel=1e-5) and found[0][1] == found[1][1]


def test_the_command(saved, documents, folder, tmp_path):
    command = [
        sys.executable,
        "-m",
        "txl_hf.lm_eval",
        "run",
        "--model",
        "txl",
        "--model_args",
        arguments(saved, SHORT),
    ]
    options = ["--tasks", "rolling", "--include_path", str(folder), "--output_path", str(tmp_path)]
    process = subprocess.run([*command, *options], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    [path] = tmp_path.rglob("results_*.json")
    found = json.loads(path.read_text())
    expected = expected_word_perplexity(TransfoXLLM(str(saved)), documents, SHORT)
    assert found["results"]["rolling"]["word_perplexity,none"] == pytest.approx(expected, rel=1e-5)
    described = {"segment_length": SEGMENT, "memory_length": SHORT}
    assert {name: found["config"][name] for name in described} == described


class Request:
    def __init__(self, *args):
        self.args = args


def test_memory_reaches_beyond_the_segment(saved):
    """With another memory the same long text costs something else."""
    requests = [Request(words(60, 0))]
    found = {
        length: TransfoXLLM(str(saved), SEGMENT, length).loglikelihood_rolling(requests)[0] for length in (0, 4, 40)
    }
    assert len({round(value, 3) for value in found.values()}) == 3


def test_its_own_wrapper_cuts_windows_as_long_as_what_the_model_was_trained_to_see(saved):
    """And a tokenizer knows no limit, because the memory has none."""
    lm = HFLM(pretrained=str(saved), batch_size=1, device="cpu")
    assert lm.max_length == lm.config.n_positions == lm.config.tgt_len + lm.config.mem_len
    assert lm.tokenizer.model_max_length == VERY_LARGE_INTEGER
    text = words(lm.max_length - 1, 5)
    [found] = lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)])
    # Its rolling text ends without the end of its line.
    [(with_memory, _)] = TransfoXLLM(str(saved), segment_length=lm.max_length).loglikelihood([Request("", text)])
    assert found == pytest.approx(with_memory, rel=1e-5), "one window is one segment"


def test_many_continuations_of_one_context_are_read_in_groups(saved, monkeypatch):
    """As the sentences of a task without contexts, whose logits would not be held side by side."""
    model = TransfoXLLM(str(saved), segment_length=SEGMENT)
    context, generator = list(range(3, 20)), torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 9, (11,), generator=generator).tolist()
    continuations = [torch.randint(30, (length,), generator=generator).tolist() for length in lengths]
    together = model._score(context, continuations)
    monkeypatch.setattr(lm_eval_model, "MOST_LOGITS", 3 * SEGMENT * model.config.vocab_size)
    rows, forward = [], model.model.transformer.forward
    monkeypatch.setattr(model.model.transformer, "forward", lambda *a, **k: rows.append(len(a[0])) or forward(*a, **k))
    apart = model._score(context, continuations)
    assert max(rows) == 3 and [greedy for _, greedy in together] == [greedy for _, greedy in apart]
    torch.testing.assert_close([loss for loss, _ in together], [loss for loss, _ in apart])


def test_whether_a_continuation_is_greedy(saved):
    lm = TransfoXLLM(str(saved))
    context = words(30, 1)
    ids = lm.tok_encode(context)
    best = lm.tok_decode([int(lm.model(torch.tensor([ids])).logits[0, -1].argmax())])
    found = lm.loglikelihood([Request(context, " " + best), Request(context, " word3 word4"), Request("", "word3")])
    assert [greedy for _, greedy in found][:2] == [True, best == "word3"]
    assert found[2][0] == pytest.approx(-token_losses(lm.model, [0, *lm.tok_encode("word3")], 1).sum().item())


@pytest.fixture(params=["converted", "prepared", "lm1b"])
def of_lines(request, make_model, tmp_path):
    """A model of words, whose tokenizer reads line feeds in a call or not, and the tokens before and after a line."""
    mode, symbols = ("lm1b", ["<S>", "<UNK>"]) if request.param == "lm1b" else ("whitespace", ["<eos>", "<unk>"])
    line_ends = True if request.param == "prepared" else None
    tokenizer = TransfoXLTokenizer.from_symbols([*symbols, *WORDS], mode=mode, line_ends=line_ends)
    make_model(vocab_size=len(tokenizer), eos_token_id=None, tgt_len=SEGMENT).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return TransfoXLLM(str(tmp_path), memory_length=SHORT), [0] if mode == "lm1b" else [], [0]


def ids_of(lines: list[str], begin: list[int], end: list[int]) -> list[int]:
    return [token for line in lines for token in [*begin, *(WORDS.index(word) + 2 for word in line.split()), *end]]


def test_a_rolling_text_is_that_of_an_evaluation(of_lines):
    lm, begin, end = of_lines
    lines = ["", words(7, 0), words(12, 1), "", words(3, 2)]
    ids = ids_of(lines, begin, end)
    assert encode_text(lm.tokenizer, "\n".join(lines)).tolist() == ids
    # What begins a line is there already.
    result = evaluate_language_model(lm.model, ids if begin else [0, *ids], SEGMENT, SHORT)
    found = lm.loglikelihood_rolling([Request("\n".join(lines)), Request("\n".join([*lines, ""])), Request("")])
    assert found == pytest.approx([-result.nll * result.tokens] * 2 + [0.0], rel=1e-5)


def test_a_context_has_its_line_ends(of_lines):
    lm, begin, end = of_lines
    ids = ids_of(["word1 word2", "", "word3 word4"], begin, end)[:-1]
    losses = token_losses(lm.model, ids, 1)
    requests = [Request("word1 word2\n\nword3", " word4"), Request("word1 word2\n", "\nword3 word4")]
    # White space at the end of a context belongs to what follows.
    expected = [-losses[-1].item(), -losses[len(begin) + 1 :].sum().item()]
    assert [value for value, _ in lm.loglikelihood(requests)] == pytest.approx(expected, rel=1e-5)


class Writes(LogitsProcessor):
    """Makes the model write these tokens."""

    def __init__(self, token_ids: list[int]):
        self.left = list(token_ids)

    def __call__(self, input_ids, scores):
        return torch.full_like(scores, -math.inf).index_fill(1, torch.tensor([self.left.pop(0)]), 0)


@pytest.mark.parametrize(
    ("until", "written"),
    [
        (["\n"], "word5 word6"),
        ("\n", "word5 word6"),
        (["\n\n"], "word5 word6\nword7"),
        (["word9", "word7"], "word5 word6\n"),
        ([], "word5 word6\nword7\n\nword8"),
    ],
)
def test_a_line_ends_where_the_model_ends_it(of_lines, until, written):
    lm, begin, end = of_lines
    ids = ids_of(["word1 word5 word6", "word7", "", "word8"], begin, end)[len(begin) + 1 : -1]
    settings = {"until": until, "max_gen_toks": len(ids), "logits_processor": [Writes(ids)]}
    assert lm.generate_until([Request("word1", settings)]) == [written]


def test_a_line_end_that_ends_the_text_is_no_part_of_it(of_lines):
    lm, begin, end = of_lines
    ids = ids_of(["word5 word6"], [], end)
    settings = {"until": ["word7"], "eos_token_id": 0, "logits_processor": [Writes(ids)]}
    assert lm.generate_until([Request("word1", settings)]) == ["word5 word6"]
    lm.model.generation_config.eos_token_id = [0, 1]
    del settings["eos_token_id"]
    assert lm.generate_until([Request("word1", settings)]) == ["word5 word6"]


def test_the_line_ends_of_a_context_are_read_in_generation(of_lines):
    """Whatever the model is to pad by."""
    lm, begin, end = of_lines
    context, settings = "word1 word2\n\nword3 word4", {"max_gen_toks": 6}
    ids = torch.tensor([lm.tok_encode(context)])
    lm.model.generation_config.pad_token_id = 0
    written = lm.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    assert lm.generate_until([Request(context, settings)]) == [lm.tok_decode(written[0, ids.shape[1] :].tolist())]


def test_settings_of_generation_mean_what_they_mean_to_lm_eval(saved):
    lm = TransfoXLLM(str(saved), max_gen_toks=20)
    lm.model.generation_config.eos_token_id = None

    def generate(**settings) -> str:
        torch.manual_seed(0)
        return lm.generate_until([Request("word1 word2", settings)])[0]

    greedy, sampled = generate(), generate(do_sample=True, temperature=5.0)
    assert greedy != sampled and generate(temperature=5.0) == sampled
    assert generate(temperature=0.0) == generate(do_sample=False, temperature=5.0) == greedy
    assert generate(do_sample=False, temperature=0) == greedy
    short = generate(max_gen_toks=3)
    assert greedy.startswith(short) and short != greedy
    for name in ("max_new_tokens", "max_tokens", "max_completion_tokens"):
        assert generate(**{name: 3}) == generate(**{name: 17, "max_gen_toks": 3}) == short


@pytest.mark.parametrize(
    ("context", "continuation", "expected"),
    [
        ("word2 word", "3 word4", ["word2", "word3 word4"]),
        ("word2 word3", "x word4", ["word2", "<unk> word4"]),
        ("word2 other", "s word4", ["word2", "<unk> word4"]),
        ("word2 other", " word4", ["word2 <unk>", "word4"]),
        ("word2 other", "", ["word2 <unk>", ""]),
        ("other", "s", ["<eos>", "<unk>"]),
    ],
)
def test_a_word_that_begins_in_the_context_is_the_continuations(saved, context, continuation, expected):
    """It was left out: a continuation of such a word alone had a likelihood of 1 and won every choice."""
    lm = TransfoXLLM(str(saved))
    parts = lm._encode_pair(context, continuation)
    assert [" ".join(lm.tokenizer.convert_ids_to_tokens(ids)) for ids in parts] == expected
    [(found, _)] = lm.loglikelihood([Request(context, continuation)])
    assert (found < 0) == bool(continuation)


def test_a_continuation_without_a_token_is_named(make_model, tmp_path):
    backend = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="a").save_pretrained(tmp_path)
    make_model(vocab_size=2, cutoffs=[], div_val=1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="the continuation 'NN' of 'ab' has no token"):
        TransfoXLLM(str(tmp_path)).loglikelihood([Request("ab", "NN")])


def test_a_continuation_without_tokens_costs_nothing(saved):
    lm = TransfoXLLM(str(saved))
    requests = [Request("word1", " "), Request("", " "), Request("word2", " word3"), Request("word2", " ")]
    *found, nothing = lm.loglikelihood(requests)
    assert found[:2] == [(0.0, True), (0.0, True)] and nothing == (0.0, True) and found[2][0] < 0


def test_a_context_without_words(of_lines):
    lm, begin, end = of_lines
    [(spaces, _), (nothing, _), (line_feed, _)] = lm.loglikelihood(
        [Request(context, "word3 word4") for context in ("  ", "", "\n")]
    )
    assert spaces == nothing == pytest.approx(-token_losses(lm.model, [0, 5, 6], 1).sum().item(), rel=1e-5)
    # The line end is taken for the token that begins the text.
    expected = token_losses(lm.model, [*begin, *end, *begin, 5, 6], 1).sum().item()
    assert line_feed == pytest.approx(-expected, rel=1e-5)
    for context in ("\n", "  ", ""):
        assert lm.generate_until([Request(context, {"max_gen_toks": 3})])[0]


def test_code_and_revision_are_those_of_from_pretrained(saved, make_model, tmp_path, monkeypatch):
    """A repository of two commits, as the Hub's client keeps it."""
    symbols = TransfoXLTokenizer.from_pretrained(saved).symbols
    (tmp_path / "models--user--name" / "refs").mkdir(parents=True)
    commits = {"main": "a" * 40, "old": "b" * 40}
    for old, (branch, commit) in enumerate(commits.items()):
        snapshot = tmp_path / "models--user--name" / "snapshots" / commit
        make_model(vocab_size=len(symbols), tgt_len=SEGMENT + old).save_pretrained(snapshot)
        TransfoXLTokenizer.from_symbols(symbols, mode="whitespace", line_ends=bool(old)).save_pretrained(snapshot)
        (tmp_path / "models--user--name" / "refs" / branch).write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))

    def loaded(settings: str) -> tuple[int, bool]:
        lm = get_model("txl").create_from_arg_string(f"pretrained=user/name,trust_remote_code=True{settings}")
        return lm.segment_length, lm.tokenizer.line_ends

    assert loaded("") == loaded(",revision=main") == (SEGMENT, False)
    assert loaded(",revision=old") == loaded(f",revision={commits['old']}") == (SEGMENT + 1, True)
    assert loaded(f",revision=old,tokenizer={saved}") == (SEGMENT + 1, False), "the tokenizer is of another repository"


def test_a_tokenizer_without_a_token_to_begin_with(make_model, tmp_path):
    tokenizer = TransfoXLTokenizer.from_symbols(list("abc "), mode="characters")
    make_model(vocab_size=4, cutoffs=[], div_val=1).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    lm = TransfoXLLM(str(tmp_path))
    assert lm.prefix_token_id is None
    ids = lm.tok_encode("abcab cab")
    found = lm.loglikelihood_rolling([Request("abcab cab"), Request("a")])
    assert found[0] == pytest.approx(-token_losses(lm.model, ids, 5).sum().item(), rel=1e-5) and found[1] == 0.0
    with pytest.raises(ValueError, match="give one in model_args, prefix_token_id="):
        lm.loglikelihood([Request("", "abc")])
    prefixed = TransfoXLLM(str(tmp_path), prefix_token_id=3)
    expected = -token_losses(lm.model, [3, *ids], 5).sum().item()
    assert prefixed.loglikelihood_rolling([Request("abcab cab")])[0] == pytest.approx(expected, rel=1e-5)


def test_what_cannot_be_evaluated_is_named(make_model, tmp_path):
    make_model().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="the tokenizer of .* cannot be read"):
        TransfoXLLM(str(tmp_path))
    TransfoXLTokenizer.from_symbols(["<eos>", *WORDS], mode="whitespace").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="mem_len=-1"):
        TransfoXLLM(str(tmp_path), memory_length=-1)
    make_model().transformer.save_pretrained(tmp_path / "headless")
    shutil.copy(tmp_path / "tokenizer.json", tmp_path / "headless")
    shutil.copy(tmp_path / "tokenizer_config.json", tmp_path / "headless")
    with pytest.raises(ValueError, match=r"is no whole language model: its weights lack lm_head\."):
        TransfoXLLM(str(tmp_path / "headless"))


def test_the_entry_point_is_the_class():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    point = EntryPoint("txl", project["entry-points"]["lm_eval.models"]["txl"], "lm_eval.models")
    assert point.load() is TransfoXLLM
    assert get_model("txl") is TransfoXLLM
