"""The paper's experiments at tiny sizes, and the arithmetic of their tables."""

import argparse
import csv
import dataclasses
import lzma
import re
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, MptConfig, OPTConfig

import ablation
import article
import attention_maps
import contenders
import context_length
import miniature
import page
import prepare_corpus
from goldens import golden
from models import small_model
from txl_hf import TokenStream, TransfoXLForCausalLM, TransfoXLTokenizer
from txl_hf.conversion.command_line import main as convert
from txl_hf.transfo_xl.attention_transfo_xl import BACKENDS as ALL_BACKENDS

TINY = miniature.SMOKE


@pytest.fixture(scope="module")
def library():
    """The words of the standard library, whatever text lies about; yields what looks for another one."""
    find_articles = miniature.find_articles
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(miniature, "find_articles", lambda: None)
        yield find_articles


@pytest.fixture(scope="module")
def work(library, tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("paper")


@pytest.fixture(scope="module")
def corpus_folder(tmp_path_factory) -> Path:
    """A text as prepare_corpus.py leaves it."""
    folder = tmp_path_factory.mktemp("text")
    for name in ("train", "valid", "test"):
        (folder / f"wiki.{name}.tokens").write_text("one two three\n" * 200, encoding="utf-8")
    output = folder / "prepared"
    prepare_corpus.main(["--corpus", "wikitext-2", "--input", str(folder), "--output", str(output), "--num_proc", "1"])
    return output


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# ---- the miniature ----------------------------------------------------------------------------------------------


def test_the_corpus_is_kept_and_made_anew_for_other_sizes(library, tmp_path):
    corpus = miniature.prepare(tmp_path, TINY)
    assert corpus.name == "the standard library" and len(corpus.tokenizer) == TINY.vocabulary
    written = (tmp_path / "train.npy").stat().st_mtime_ns
    again = miniature.prepare(tmp_path, TINY)
    assert (tmp_path / "train.npy").stat().st_mtime_ns == written
    assert all(np.array_equal(corpus.texts[split], again.texts[split]) for split in miniature.SPLITS)
    other = miniature.prepare(tmp_path, dataclasses.replace(TINY, vocabulary=150))
    assert len(other.tokenizer) == 150 and other.texts["train"].max() < 150


def test_articles_are_read_from_the_folder_that_the_environment_names(library, monkeypatch, tmp_path):
    for name in ("train", "valid", "test"):
        (tmp_path / f"{name}.txt.xz").write_bytes(lzma.compress(f"{name} one.\n\n\n{name} two.\n".encode()))
    monkeypatch.setenv("TXL_WIKIPEDIA", str(tmp_path))
    assert library() == tmp_path
    assert list(miniature.read_lines(tmp_path, "validation", 5)) == ["valid one.\n"]
    assert list(miniature.read_lines(tmp_path, "test", 99)) == ["test one.\n", "test two.\n"]
    monkeypatch.setenv("TXL_WIKIPEDIA", str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match="TXL_WIKIPEDIA=.*nowhere is no folder"):
        library()


def test_results_of_another_text_go_to_a_folder_of_their_own(library, monkeypatch, tmp_path):
    folder = tmp_path / miniature.COMMITTED_TEXT
    folder.mkdir()
    (folder / miniature.FILES[0]).touch()
    for articles, expected in ((folder, miniature.RESULTS), (tmp_path, None), (None, None)):
        monkeypatch.setattr(miniature, "find_articles", lambda articles=articles: articles)
        options = ablation.parse_arguments([])
        assert options.output == (expected or miniature.WORK / "results")
    with pytest.raises(SystemExit):
        ablation.parse_arguments(["--smoke"])
    with pytest.raises(SystemExit):
        ablation.parse_arguments(["--smoke", "--output", str(miniature.RESULTS)])


def test_wikitext_is_fetched_from_the_hub_where_there_is_no_other_text(library, monkeypatch, tmp_path, capsys):
    def load_dataset(name, config, *, split, streaming):
        assert name == "Salesforce/wikitext" and streaming
        return [{"text": text} for text in ("", f" = {split} = \n", *[f" {split} one .\n"] * 200)]

    monkeypatch.delenv("TXL_WIKIPEDIA", raising=False)
    monkeypatch.setattr(miniature, "find_articles", library)
    monkeypatch.setattr(miniature, "ROOT", tmp_path)
    monkeypatch.setattr(miniature, "WORK", tmp_path / "work")
    monkeypatch.setattr(miniature, "FETCHED", tmp_path / "work" / "wikitext-103")

    def unreachable(*_, **__):
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    miniature.main()
    assert "Couldn't reach the Hub; the text is the source of Python's standard library" in capsys.readouterr().out
    assert library() is None and not miniature.FETCHED.exists()
    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    miniature.main()
    corpus = miniature.prepare(miniature.WORK / "corpus", TINY)
    assert library() == miniature.FETCHED and corpus.name == "wikitext-103"
    assert list(miniature.read_lines(library(), "validation", 20)) == [" = validation =\n", " validation one .\n"]
    # Runs of a text that was read before go on with it.
    (miniature.FETCHED / miniature.FILES[0]).unlink()
    miniature.main()
    assert not (miniature.FETCHED / miniature.FILES[0]).exists()


def test_two_folders_of_one_name_are_two_texts(library, monkeypatch, tmp_path):
    """Neither the text that was kept nor a model of it is taken for those of the other."""
    folders = [tmp_path / place / "articles" for place in ("here", "there")]
    for folder, word in zip(folders, ("one", "another"), strict=True):
        folder.mkdir(parents=True)
        for name in miniature.FILES:
            (folder / name).write_bytes(lzma.compress(f"{word} line.\n".encode() * 200))
    row, work = contenders.ROWS["recurrence-ours-full"], tmp_path / "work"
    for folder, word in zip(folders, ("one", "another"), strict=True):
        monkeypatch.setattr(miniature, "find_articles", lambda folder=folder: folder)
        corpus = miniature.prepare(work / "corpus", TINY)
        assert corpus.name == "articles" and word in corpus.tokenizer.get_vocab()
        if word == "one":
            ablation.keep_options(work / f"{row.name}-0" / "options.json", ablation.begun_with(row, TINY, corpus))
    with pytest.raises(ValueError, match="was begun with other options: files was .* and is "):
        ablation.train(ablation.Job(row, 0, TINY, work), corpus)
    assert str(tmp_path) not in (work / "corpus" / "corpus.json").read_text()


def test_shuffled_sentences_are_the_same_sentences(work):
    corpus = miniature.prepare(work / "corpus", TINY)
    streams = 3
    shuffled = miniature.shuffle_sentences(corpus, streams, segment=8, steps=len(corpus.texts["train"]))
    ends = corpus.tokenizer.convert_tokens_to_ids(list(miniature.SENTENCE_ENDS))
    for split, ids in corpus.texts.items():
        cut = [np.split(text, np.flatnonzero(np.isin(text, ends)) + 1) for text in (ids, shuffled.texts[split])]
        before, after = (sorted(tuple(sentence) for sentence in sentences if len(sentence)) for sentences in cut)
        assert len(ids) == len(shuffled.texts[split]) and not np.array_equal(ids, shuffled.texts[split])
        # The last sentence of a stretch may have no end, and then runs into the one that comes to follow it.
        assert len(set(before) ^ set(after)) <= (3 * streams if split == "train" else 3)


def test_shuffled_sentences_are_those_that_a_row_reads_in_order(work):
    """The tokens of each step's streams, whatever a row learns from, are the same up to their order."""
    for name, steps in (("recurrence-ours-full", 40), ("none-al-rfou-half", 80)):
        job = ablation.Job(contenders.ROWS[name], 0, dataclasses.replace(TINY, steps=steps), work)
        plain, shuffled = (dataclasses.replace(job, shuffled=flag).corpus().texts["train"] for flag in (False, True))
        tgt_len, _ = contenders.segments(job.row, TINY)
        streams = [TokenStream(ids, tgt_len, TINY.streams) for ids in (plain, shuffled)]
        for stream in range(TINY.streams):
            items = range(stream, steps * TINY.streams, TINY.streams)
            read, other = (torch.cat([text[item]["input_ids"] for item in items]) for text in streams)
            assert not torch.equal(read, other) and torch.equal(read.sort().values, other.sort().values)


# ---- models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", contenders.ROWS)
def test_a_row_learns_from_what_it_says(name, work):
    """Half losses: the second half of each segment. A memory is as long as a segment, whatever is learned from."""
    row = contenders.ROWS[name]
    sizes = dataclasses.replace(TINY, segment=8)
    tgt_len, ext_len = contenders.segments(row, sizes)
    assert tgt_len + ext_len == 2 * round(row.backprop * 4) and (
        ext_len == tgt_len if row.loss == "half" else ext_len == 0
    )
    corpus = miniature.prepare(work / "corpus", TINY)
    torch.manual_seed(0)
    model = contenders.make_model(row, sizes, len(corpus.tokenizer)).eval()
    stream = TokenStream(corpus.texts["train"], tgt_len, 2, ext_len=ext_len)
    mems = None
    for step in range(4):
        items = [stream[2 * step + i] for i in range(2)]
        input_ids, labels = (torch.stack([item[key] for item in items]) for key in ("input_ids", "shift_labels"))
        losses, mems = contenders.losses_of(model, input_ids, labels, mems)
        assert int((losses != 0).sum()) == 2 * tgt_len
    assert (mems is not None) == row.recurrence
    if row.recurrence and row.kind == "transfo-xl":
        assert mems[0].shape[1] == sizes.segment
        assert model.config.mem_len == sizes.segment


def test_shaw_of_the_paper_has_the_terms_a_and_b_alone(work):
    row = contenders.ROWS["recurrence-shaw-paper-full"]
    model = contenders.make_model(row, TINY, 200)
    assert not model.transformer.content_bias.any() and not model.transformer.r_bias.any()
    model(torch.zeros(1, 4, dtype=torch.long), labels=torch.ones(1, 4, dtype=torch.long)).loss.backward()
    assert model.transformer.content_bias.grad is None and model.transformer.r_emb.grad is not None


def test_naive_recurrence_cannot_tell_which_of_two_segments_came_first(tmp_path):
    """Section 3.3's opening: with U_1:L in each segment, the memory is a set of states with the same positions."""
    torch.manual_seed(0)
    ids = torch.arange(16)[None]
    change = {}
    for name in ("recurrence-vaswani-full", "recurrence-ours-full"):
        untrained = contenders.make_model(contenders.ROWS[name], TINY, 200)
        for parameter in untrained.parameters():
            # Large, so that the memory matters.
            torch.nn.init.normal_(parameter, std=0.5)
        untrained.save_pretrained(tmp_path / name)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name, mem_len=16).transformer.eval()
        older = model(ids[:, :8]).mems
        newer = model(ids[:, 8:]).mems
        told = [
            model(ids[:, 4:12], mems=tuple(map(cat, first, second))).last_hidden_state
            for first, second in ((older, newer), (newer, older))
        ]
        change[name] = float((told[0] - told[1]).abs().max())
    assert change["recurrence-vaswani-full"] < 1e-4 < 1e-2 < change["recurrence-ours-full"]


def cat(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return torch.cat([first, second], dim=1)


# ---- ablation ---------------------------------------------------------------------------------------------------


def test_ablation_trains_scores_and_tabulates(work, monkeypatch, capsys):
    """In this process, since a worker's would not know that the library is the text; a second call trains nothing."""
    monkeypatch.setattr(ablation, "ProcessPoolExecutor", InProcess)
    names = ["recurrence-ours-full", "none-al-rfou-half", "none-ours-full", "lstm"]
    command = ["--smoke", "--output", str(work), "--work", str(work), "--seeds", "0", "1", "--rows", *names]
    ablation.main(command)
    rows = read(work / "rows.csv")
    assert [(row["row"], row["seed"]) for row in rows] == [(name, seed) for seed in "01" for name in names]
    assert {row["text"] for row in rows} == {"the standard library"} and all(row["torch"] for row in rows)
    assert rows[0]["targets"] == str(3 * 4 * 8) and rows[1]["targets"] == str(3 * 4 * 4)
    curves = read(work / "curves.csv")
    lengths = [
        (row["protocol"], row["length"]) for row in curves if (row["row"], row["seed"]) == ("none-ours-full", "0")
    ]
    assert lengths == [(kind, length) for kind in ("window", "memory") for length in ("4", "8", "16")]
    # Al-Rfou's positions end where its segments do.
    assert [row["length"] for row in curves if row["row"] == "none-al-rfou-half"] == ["4", "8"] * 2
    by_length = {row["length"]: float(row["perplexity"]) for row in curves if row["row"] == "recurrence-ours-full"}
    assert float(rows[4]["best"]) == min(by_length.values()) and float(rows[4]["init"]) == by_length["8"]
    table = capsys.readouterr().out
    assert "| recurrence-ours-full | 2 | 96 | " in table and "27.02" in table
    assert "recurrence-ours-full before none-ours-full: within the spread of the seeds" in table
    assert (work / "curves.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(ablation, "train", None)
    ablation.main(command)
    assert "8 of 8 runs are done" in capsys.readouterr().out and len(read(work / "rows.csv")) == 8
    for changed, said in (
        (["--steps", "5"], "steps was 3 and is 5"),
        (["--exact"], "window was quarter and is exact"),
    ):
        with pytest.raises(SystemExit, match=f"has recurrence-ours-full, seed 0 of other options: {said}"):
            ablation.main([*command, *changed])
    # A seed that is not there yet would be averaged with those that are.
    with pytest.raises(SystemExit, match="has recurrence-ours-full, seed 0 of other options: steps was 3 and is 5"):
        ablation.main([*command, "--seeds", "2", "--steps", "5"])
    lines = (work / "log.txt").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 10 and lines[1].startswith("recurrence-ours-full, seed 0: ")


class InProcess:
    def __init__(self, *_):
        self.map = map

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def test_rows_of_different_options_are_not_averaged():
    rows = committed_rows("recurrence-ours-full", seeds="01")
    assert "| recurrence-ours-full | 2 |" in ablation.table(ablation.of(rows, rows[0]["text"]))
    rows[1]["window"] = "exact"
    with pytest.raises(ValueError, match="seeds 0 and 1 of different options: window was quarter and is exact"):
        ablation.of(rows, rows[0]["text"])


def committed_rows(*names: str, seeds: str = "0") -> list[dict[str, str]]:
    """Rows of Tables 6 and 10 as they are committed."""
    rows = read(ablation.RESULTS / "rows.csv")
    return [
        row for row in rows if row["row"] in names and row["seed"] in seeds and miniature.SHUFFLED not in row["text"]
    ]


def test_all_lengths_and_both_texts_score_the_same_tokens(work, monkeypatch):
    """Al-Rfou's windows end where its segments do, before the longest length."""
    evaluate, warm_ups = ablation.evaluate_language_model, set()

    def recorded(*args, warm_up, **kwargs):
        warm_ups.add(warm_up)
        return evaluate(*args, warm_up=warm_up, **kwargs)

    monkeypatch.setattr(ablation, "evaluate_language_model", recorded)
    ablation.train_and_score(ablation.Job(contenders.ROWS["none-al-rfou-half"], 0, TINY, work))
    assert warm_ups == {TINY.longest}


def test_rows_with_longer_segments_have_no_perplexity_at_the_length_of_training(work):
    rows = committed_rows("none-ours-full", "none-ours-full-176")
    plain, longer = (line.split(" | ") for line in ablation.table(rows).splitlines()[2:])
    assert (plain[3], longer[3]) == ("73.44", "–")
    assert (plain[6], longer[6]) == ("+0.19\u202f(1\u202fof\u202f1)", "–\u202f(1\u202fof\u202f1)")
    said = ablation.table(committed_rows("recurrence-vaswani-full"))
    assert "| +0.00\u202f(0\u202fof\u202f1) |" in said, "it is best at half of that"
    row, _ = ablation.train_and_score(ablation.Job(contenders.ROWS["none-ours-full-176"], 0, TINY, work))
    assert row["init"] == row["test_init"] == "" and row["best"] and row["test_best"]


def test_a_row_that_table_7_has_not_is_in_the_control_all_the_same():
    [line] = ablation.table(committed_rows("none-shaw-full"), ablation.TABLE_7).splitlines()[2:]
    assert line.startswith("| none-shaw-full | 1 |") and line.endswith("| – |")


def test_a_row_without_attention_lengths_alone_leaves_no_picture(work, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ablation, "ProcessPoolExecutor", InProcess)
    ablation.main(["--smoke", "--output", str(tmp_path), "--work", str(work), "--seeds", "0", "--rows", "lstm"])
    assert "lstm, seed 0: –, best – @ –" in capsys.readouterr().out
    assert [row["row"] for row in read(tmp_path / "rows.csv")] == ["lstm"]
    page.main(["--results", str(tmp_path)])
    assert not (tmp_path / "curves.png").exists()
    assert "curves.png" not in (tmp_path / "README.md").read_text(encoding="utf-8")


def test_a_run_that_was_stopped_goes_on_where_it_was(work, tmp_path, monkeypatch):
    sizes = dataclasses.replace(TINY, steps=6)
    monkeypatch.setattr(ablation, "SAVE_EVERY", 0)
    row, saved, models = contenders.ROWS["recurrence-ours-full"], ablation.save_state, []
    for name, stop in (("whole", None), ("stopped", 3)):
        job = ablation.Job(row, 0, sizes, tmp_path / name)
        corpus = miniature.prepare(work / "corpus", TINY)

        def save(state, path, stop=stop):
            saved(state, path)
            if state["step"] == stop:
                raise KeyboardInterrupt

        monkeypatch.setattr(ablation, "save_state", save)
        if stop is not None:
            with pytest.raises(KeyboardInterrupt):
                ablation.train(job, corpus)
            monkeypatch.setattr(ablation, "save_state", saved)
        models.append(ablation.train(job, corpus)[0])
    whole, stopped = (model.state_dict() for model in models)
    assert all(torch.equal(whole[name], stopped[name]) for name in whole)


@pytest.mark.parametrize(
    "difference, spread, expected",
    [
        (0.5, None, "holds with one seed"),
        (-0.5, None, "does not hold with one seed"),
        (0.5, 0.6, "within the spread of the seeds"),
        (-0.5, 0.6, "within the spread of the seeds"),
        (0.7, 0.6, "holds"),
        (-0.7, 0.6, "does not hold"),
    ],
)
def test_an_order_is_never_said_to_be_more_than_it_is(difference, spread, expected):
    assert ablation.verdict(difference, spread) == expected


def test_a_row_with_one_seed_has_no_spread_of_another():
    rows = [
        {"row": name, "seed": str(seed), "init": "9", "best": str(best), "length": "8", "segment": "8"}
        for name, seed, best in (
            ("recurrence-ours-full", 0, 5.0),
            ("none-ours-full", 0, 8.0),
            ("none-ours-full", 1, 8.1),
        )
    ]
    assert "recurrence-ours-full before none-ours-full: holds with one seed (+3.05)" in ablation.orders(rows)
    rows.append({**rows[0], "seed": "1"})
    assert "recurrence-ours-full before none-ours-full: holds (+3.05)" in ablation.orders(rows)


def test_rows_of_other_steps_have_the_targets_of_those_they_stand_beside():
    sizes = miniature.MINIATURE

    def targets(name):
        row = contenders.ROWS[name]
        return contenders.sizes_of(row, sizes).steps * contenders.segments(row, sizes)[0]

    full, half = targets("recurrence-ours-full"), targets("recurrence-ours-half")
    longer = [name for name in contenders.ROWS if name.endswith("-longer")]
    assert len(longer) == 5 and {targets(name) for name in longer} == {full} == {2 * half}
    assert targets("none-ours-full-176-shorter") == pytest.approx(full, rel=1e-3)
    assert targets("none-ours-half-172-shorter") == pytest.approx(half, rel=1e-3)


def test_smoke_leaves_the_committed_results_alone(capsys):
    with pytest.raises(SystemExit):
        ablation.main(["--smoke"])
    assert "name another folder with --output" in capsys.readouterr().err


def test_smoke_knows_the_committed_results_however_they_are_spelled(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(miniature.ROOT)
    (tmp_path / "link").symlink_to(ablation.RESULTS)
    for spelled in ("examples/results/paper", ablation.RESULTS / ".." / "paper", tmp_path / "link"):
        with pytest.raises(SystemExit):
            ablation.parse_arguments(["--smoke", "--output", str(spelled)])
        assert "name another folder with --output" in capsys.readouterr().err


@pytest.mark.parametrize("study, option", [(context_length, "--models"), (attention_maps, "--model")])
def test_models_that_are_not_the_miniature_leave_its_results_alone(study, option, tmp_path, capsys):
    command = [option, str(tmp_path), "--data", str(tmp_path)]
    with pytest.raises(SystemExit):
        study.parse_arguments(command)
    error = capsys.readouterr().err
    assert f"{option} " in error and "not the miniature" in error and "name another folder with --output" in error
    assert study.parse_arguments([*command, "--output", str(tmp_path)]).output == tmp_path


@pytest.mark.parametrize(
    "study, given, said",
    [
        (ablation, ["--seeds", "2", "2"], "--seeds has 2 twice"),
        (ablation, ["--rows", "none-ours-full", "none-ours-full"], "--rows has none-ours-full twice"),
        (context_length, ["--models", "one", "one", "--data", "text"], "--models has one twice"),
    ],
)
def test_a_model_that_is_named_twice_is_refused(study, given, said, tmp_path, capsys):
    """It would be trained twice, and count as a seed or a model more."""
    with pytest.raises(SystemExit):
        study.parse_arguments([*given, "--output", str(tmp_path)])
    assert f"{said}: name each once" in capsys.readouterr().err


# ---- effective context length -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config_class, name",
    [(GPT2Config, "n_positions"), (OPTConfig, "max_position_embeddings"), (MptConfig, "max_seq_len")],
)
def test_a_model_reads_as_many_tokens_as_it_has_learned_positions_of(config_class, name):
    model = types.SimpleNamespace(config=config_class(**{name: 16}))
    assert context_length.furthest(model, 99) == 16 and context_length.furthest(model, 9) == 9


def check_windows(model, ids, contexts, places, longest, **options):
    """Each loss is that of its window read alone, which is as long as its context, or as the model reads."""
    found = context_length.window_losses(model, ids.numpy(), contexts, places, **options)
    for k, context in enumerate(contexts):
        seen = min(context, longest)
        for j, place in enumerate(places):
            window, target = ids[place - seen : place][None], ids[place - seen + 1 : place + 1][None]
            with torch.no_grad():
                expected = contenders.losses_of(model, window, target)[0][0, -1]
            assert float(found[k, j]) == pytest.approx(float(expected), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", ["recurrence-ours-full", "none-shaw-full", "none-vaswani-half", "lstm", "gpt2"])
def test_a_loss_is_of_exactly_so_much_context(name, work):
    """Each position's window read by itself, from scratch; beyond what a model reads at once, as much as it does."""
    row = contenders.ROWS[name]
    torch.manual_seed(0)
    model = contenders.make_model(row, TINY, 200)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.eval()
    ids, contexts = torch.randint(200, (60,)), [4, 8, 16, 20]
    places = np.array([20, 24, 40, 56])
    longest = {"none-vaswani-half": 8, "gpt2": 8}.get(name, 99)
    check_windows(model, ids, contexts, places, longest, batch_size=3)


@pytest.mark.parametrize("contexts", [[6, 12], [10, 20]], ids=["no multiple", "first one"])
def test_a_model_reads_no_fewer_tokens_than_it_has_positions_of(contexts, work):
    """Eight, which are no context, or fewer than the first one."""
    torch.manual_seed(0)
    model = contenders.make_model(contenders.ROWS["gpt2"], TINY, 200).eval()
    ids, places = torch.randint(200, (60,)), np.array([20, 32])
    check_windows(model, ids, contexts, places, 8)


def test_models_that_gain_up_to_a_length_have_that_length():
    """Losses that fall by 5 % a step up to 800 and 200 tokens: the second gains nothing beside the first."""
    contexts = list(range(100, 1001, 100))
    falling = torch.tensor([[5 - 0.05 * min(k, last) for k in range(10)] for last in (7, 1)])
    losses = falling[..., None].expand(-1, -1, 50).contiguous()
    assert [context_length.effective_length(losses, contexts, i, 0.5) for i in (0, 1)] == [(800, False), (200, False)]
    assert context_length.effective_length(losses + torch.tensor([0.0, 1.0])[:, None, None], contexts, 1, 0.5) == (
        100,
        False,
    )
    own = [context_length.effective_length(losses, contexts, i, 1.0, relative=False) for i in (0, 1)]
    assert own == [(800, False), (200, False)]
    ever = torch.arange(10, 0, -1.0)[None, :, None].expand(1, 10, 50)
    assert context_length.effective_length(ever, contexts, 0, 0.1) == (1000, True)


def test_the_formula_of_appendix_c():
    """By hand: two models, two contexts, three positions, of which the hardest third and all."""
    losses = torch.tensor([[[1.0, 2.0, 4.0], [1.0, 1.0, 3.0]], [[2.0, 1.5, 3.5], [2.0, 1.5, 3.0]]])
    # b(c, t) = 1, 1.5, 3.5; the hardest position is the last: min(3.5, 3) = 3 for both models.
    for i in (0, 1):
        assert float(context_length.gains(losses, i, 1 / 3)[0]) == pytest.approx(1 - np.exp(3 - 3.5))
    # All: b has the mean 2, model 0 then (1 + 1 + 3) / 3, model 1 (1 + 1.5 + 3) / 3.
    assert float(context_length.gains(losses, 0, 1.0)[0]) == pytest.approx(1 - np.exp(5 / 3 - 2), rel=1e-5)
    assert float(context_length.gains(losses, 1, 1.0)[0]) == pytest.approx(1 - np.exp(5.5 / 3 - 2), rel=1e-5)
    # ECL of model 0: its own losses, 7 / 3 before.
    assert float(context_length.gains(losses, 0, 1.0, relative=False)[0]) == pytest.approx(1 - np.exp(-2 / 3))


def test_context_length_of_the_miniatures_group(work, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(context_length, "GROUP", ["none-ours-full", "none-vaswani-half", "gpt2"])
    command = ["--smoke", "--output", str(tmp_path), "--seeds", "0"]
    context_length.main(command)
    rows = read(tmp_path / "context_length.csv")
    assert [(row["measure"], row["model"], row["r"]) for row in rows][:4] == [
        ("RECL", "none-ours-full", "0.1"),
        ("RECL", "none-ours-full", "0.5"),
        ("RECL", "none-ours-full", "1.0"),
        ("RECL", "none-vaswani-half", "0.1"),
    ]
    assert all(int(row["low"]) <= int(row["high"]) for row in rows)
    table = capsys.readouterr().out
    assert "300 / 300 / 300" in table and "none-ours-full none-vaswani-half gpt2" in table
    assert "* none-ours-full before none-vaswani-half: " in table and "with one seed" in table
    assert (tmp_path / "context_length.png").read_bytes().startswith(b"\x89PNG")


def test_context_length_goes_on_with_the_seeds_that_are_missing(work, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(context_length, "GROUP", ["none-ours-full", "none-vaswani-half"])
    command = ["--smoke", "--output", str(tmp_path), "--work", str(work), "--seeds"]
    context_length.main([*command, "1"])
    [first, *_] = read(tmp_path / "context_length.csv")
    context_length.main([*command, "0", "1"])
    rows = read(tmp_path / "context_length.csv")
    assert rows[0] == first and [row["seed"] for row in rows[::12]] == ["1", "0"] and len(rows) == 24
    monkeypatch.setattr(ablation, "train", None)
    context_length.main([*command, "0", "1"])
    assert read(tmp_path / "context_length.csv") == rows
    monkeypatch.setattr(context_length, "GROUP", ["none-ours-full"])
    with pytest.raises(
        SystemExit, match="has seed 1 of other options: group was none-ours-full none-vaswani-half and"
    ):
        context_length.main([*command, "2"])


def rows_of_lengths(**lengths: list[list[int]]) -> list[dict[str, str]]:
    """RECL of models by seed and r."""
    return [
        {"model": name.replace("_", "-"), "measure": "RECL", "seed": str(seed), "r": str(r), "length": str(length)}
        for name, seeds in lengths.items()
        for seed, cells in enumerate(seeds)
        for r, length in zip(context_length.FRACTIONS, cells, strict=True)
    ]


def test_an_order_of_table_8_is_that_of_the_seeds_means():
    ours, shaw = [[24, 32, 32], [16, 24, 24], [24, 40, 24]], [[24, 40, 40], [48, 48, 40], [32, 48, 40]]
    rows = rows_of_lengths(
        recurrence_ours_full=ours, recurrence_shaw_full=shaw, lstm=[[16, 16, 8], [8] * 3, [16, 8, 8]]
    )
    said = context_length.orders(rows).splitlines()[2:]
    assert said == [
        "* recurrence-ours-full before recurrence-shaw-full: does not hold (-13.3; longer in 0 of 9, equal in 1)",
        "* recurrence-ours-full before lstm: holds (+16.0; longer in 9 of 9, equal in 0)",
        "* recurrence-shaw-full before lstm: holds (+29.3; longer in 9 of 9, equal in 0)",
    ]
    # In Table 8 neither is the longer one at every r.
    assert "lstm" not in context_length.orders(rows_of_lengths(none_ours_full=ours, lstm=ours))


def test_an_ecl_that_nothing_ended_is_no_number():
    row = {"model": "ours", "contexts": "40", "step": "8", "positions": "300", "group": "ours", "paper": ""}
    seeds = {"RECL": ("8", "16", "16"), "ECL": ("40", "40", "40")}
    rows = [
        row | {"measure": measure, "r": str(r), "length": length, "low": "8", "high": "40"}
        for measure, lengths in seeds.items()
        for r in context_length.FRACTIONS
        for length in lengths
    ]
    [line] = [line for line in context_length.table(rows).splitlines() if line.startswith("| ours ")]
    assert line == f"| ours |{' 8, 16, 16 (8–≥ 40) |' * 3}{' – |' * 4}"
    rows[-1]["length"] = "32"
    assert "| –, –, 32 (8–≥ 40) |" in context_length.table(rows)


def test_the_longest_context_is_a_bound_also_where_an_interval_ends_there():
    row = {"model": "ours", "contexts": "40", "step": "8", "positions": "300", "group": "ours", "paper": ""}
    rows = [
        row | {"measure": measure, "r": str(r), "length": length, "low": "8", "high": "40"}
        for measure, length in (("RECL", "40"), ("ECL", "32"))
        for r in context_length.FRACTIONS
    ]
    table = context_length.table(rows)
    assert "| ≥ 40 (8–≥ 40) |" in table and "| 32 (8–≥ 40) |" in table


def test_a_group_that_cannot_be_compared_is_refused(work):
    model = contenders.make_model(contenders.ROWS["gpt2"], TINY, 200)
    other = contenders.make_model(contenders.ROWS["gpt2"], TINY, 150)
    with pytest.raises(ValueError, match=r"one vocabulary, but theirs have \[150, 200\] tokens"):
        context_length.measure({"a": model, "b": other}, np.zeros(100, int), [4, 8], 3)
    with pytest.raises(ValueError, match="room for 3 positions 4 apart after 8 tokens, not for 30"):
        context_length.measure({"a": model}, np.zeros(20, int), [4, 8], 30)


# ---- attention maps ---------------------------------------------------------------------------------------------


def make_heads() -> TransfoXLForCausalLM:
    torch.manual_seed(0)
    model = contenders.make_model(contenders.ROWS["recurrence-ours-full"], TINY, 200).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def test_recorded_attention_is_that_of_eager_by_distance():
    """Every query that sees the whole span counts once; the model's own backend is put back."""
    model, span = make_heads(), 12
    ids = torch.randint(200, (61,)).numpy()
    before = model.config._attn_implementation
    options = argparse.Namespace(memory_length=span, clamp_len=None)
    recorder = attention_maps.record(model, ids, options)
    assert model.config._attn_implementation == before and "recorder" not in ALL_BACKENDS

    model.set_attn_implementation("eager")
    model.reset_memory_length(span)
    model.config.same_length = True
    mems, expected, queries = None, torch.zeros(2, 2, span), 0
    with torch.no_grad():
        for start in range(0, 60, 20):
            outputs = model(torch.tensor(ids[None, start : start + 20]), mems=mems, output_attentions=True)
            mems = outputs.mems
            if start > 0:
                for layer, attentions in enumerate(outputs.attentions):
                    for i in range(20):
                        expected[layer] += attentions[0, :, i, i + 1 : i + 1 + span].flip(-1)
                queries += 20
    assert recorder.queries == queries
    for part, means in recorder.means().items():
        assert torch.allclose(means.sum(-1), torch.ones(2, 2, dtype=torch.float64), atol=1e-5), part
    assert torch.allclose(recorder.means()["whole"].float(), expected / queries, atol=1e-5)


def test_the_numbers_of_attention_by_distance():
    uniform, near = torch.full((20,), 0.05, dtype=torch.float64), torch.eye(20, dtype=torch.float64)[0]
    assert attention_maps.measures(uniform) == pytest.approx({"near": 0.1, "mean_distance": 0.5, "entropy": 1.0})
    assert attention_maps.measures(near) == pytest.approx({"near": 1.0, "mean_distance": 0.025, "entropy": 0.0})


def test_the_table_has_how_a_term_follows_the_whole_over_the_heads():
    shares = {"whole": (0.1, 0.5, 0.9), "a": (0.3, 0.3, 0.3), "b": (0.2, 0.4, 0.6), "d": (0.9, 0.5, 0.1)}
    figures = {"mean_distance": "0.5", "entropy": "1", "correlation": "0.5"}
    rows = [
        {"part": part, "head": str(head), "near": str(share), **figures}
        for part, heads in shares.items()
        # Head 0 is the mean over the others.
        for head, share in enumerate((0.5, *heads))
    ]
    last = [line.split(" | ")[-1] for line in attention_maps.table(rows, 80).splitlines()[2:]]
    assert last == ["1.00 |", "– |", "1.00 |", "-1.00 |", "– |"]


def test_attention_maps_of_the_miniature(work, tmp_path, capsys):
    attention_maps.main(["--smoke", "--output", str(tmp_path)])
    assert (tmp_path / "attention_terms.png").read_bytes().startswith(b"\x89PNG")
    rows = read(tmp_path / "attention.csv")
    assert [row["part"] for row in rows if row["head"] == "0"] == ["whole", "a", "b", "d"]
    assert {row["span"] for row in rows} == {"30"} and len(rows) == 4 * (2 * 2 + 1)
    assert "| whole score |" in capsys.readouterr().out


def test_pictures_and_article_of_a_converted_checkpoint(corpus_folder, tmp_path):
    """One of the authors' own, which knows more words than the text has."""
    checkpoint, model = golden("kimiyoung_pytorch/char_base.model.pt"), tmp_path / "model"
    convert(["--from", "kimiyoung-pytorch", "--checkpoint", str(checkpoint), "--output", str(model)])
    options = ["--model", str(model), "--data", str(corpus_folder), "--output", str(tmp_path)]
    attention_maps.main([*options, "--memory_length", "20", "--max_tokens", "150"])
    rows = read(tmp_path / "attention.csv")
    assert {row["span"] for row in rows} == {"20"} and {row["part"] for row in rows} == {"whole", "a", "b", "d"}
    article.main([*options, "--context", "9", "--new_tokens", "7", "--articles", "1"])
    assert "### Article 1" in (tmp_path / "articles.md").read_text(encoding="utf-8")


def test_a_checkpoint_in_half_precision_is_looked_at_in_fp32(corpus_folder, tmp_path):
    make_heads().to(torch.bfloat16).save_pretrained(tmp_path / "model")
    options = ["--model", str(tmp_path / "model"), "--data", str(corpus_folder), "--output", str(tmp_path)]
    attention_maps.main([*options, "--memory_length", "20", "--max_tokens", "150"])
    assert {row["dtype"] for row in read(tmp_path / "attention.csv")} == {"fp32"}
    assert (tmp_path / "attention_terms.png").is_file()


@pytest.mark.parametrize(
    "study, option", [(context_length, "--models"), (attention_maps, "--model"), (article, "--model")]
)
def test_a_model_of_another_vocabulary_is_refused(study, option, corpus_folder, tmp_path):
    make_heads().save_pretrained(tmp_path / "model")
    others = TransfoXLTokenizer.train_from_iterator(["of others"], mode="whitespace", unk_token="<unk>")
    others.save_pretrained(tmp_path / "model")
    command = [option, str(tmp_path / "model"), "--data", str(corpus_folder), "--output", str(tmp_path)]
    with pytest.raises(SystemExit, match="has another vocabulary than .*model"):
        study.main(command)
    small = tmp_path / "small"
    GPT2LMHeadModel(GPT2Config(vocab_size=2, n_embd=8, n_layer=1, n_head=1)).save_pretrained(small)
    with pytest.raises(SystemExit, match="does not fit .*small with one of 2"):
        study.main([option, str(small), *command[2:]])


def test_no_span_is_refused_and_not_replaced_by_the_models_own(corpus_folder, tmp_path):
    make_heads().save_pretrained(tmp_path)
    options = ["--model", str(tmp_path), "--data", str(corpus_folder), "--output", str(tmp_path)]
    with pytest.raises(SystemExit, match="--memory_length 0 is no span to look at: give 10 or more"):
        attention_maps.main([*options, "--memory_length", "0"])


def test_a_model_without_the_four_terms_is_refused(corpus_folder, tmp_path):
    contenders.make_model(contenders.ROWS["none-shaw-full"], TINY, 200).save_pretrained(tmp_path)
    with pytest.raises(SystemExit, match="has no relative encoding with the terms"):
        attention_maps.main(["--model", str(tmp_path), "--data", str(corpus_folder), "--output", str(tmp_path)])


# ---- articles ---------------------------------------------------------------------------------------------------


def test_an_article_has_its_context_continuation_and_reference(work, tmp_path):
    options = ["--smoke", "--output", str(tmp_path), "--context", "9", "--new_tokens", "7", "--articles", "2"]
    article.main(options)
    text = (tmp_path / "articles.md").read_text()
    assert text.count("### Article") == 2 and text.count("**Generated.**") == 2
    assert "with a memory of 16" in text
    corpus = miniature.prepare(tmp_path / "work" / "corpus", TINY)
    start = int(text.split("from token ")[1].split()[0])
    reference = article.quote(corpus.tokenizer, corpus.texts["test"][start + 9 : start + 16])
    assert f"**Reference.** {reference}\n" in text
    article.main(options)
    assert (tmp_path / "articles.md").read_text() == text


def test_the_lengths_of_an_article_are_those_that_are_given():
    def lengths(*options):
        parsed = article.parse_arguments([*options])
        return parsed.context, parsed.new_tokens

    assert lengths() == (80, 80) and lengths("--context", "300", "--new_tokens", "200") == (300, 200)
    assert lengths("--model", ".", "--data", ".") == (512, 500)


def test_a_text_that_is_too_short_for_an_article_is_refused():
    options = argparse.Namespace(context=9, new_tokens=7, seed=0, articles=1)
    with pytest.raises(ValueError, match="16 tokens has no room for --context 9 and --new_tokens 7"):
        article.places(16, options)


# ---- the page ---------------------------------------------------------------------------------------------------


def test_the_page_is_what_the_results_say():
    committed = ablation.RESULTS / "README.md"
    assert committed.read_text(encoding="utf-8") == page.page(ablation.RESULTS), "run examples/paper/page.py"
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]*)\)", committed.read_text(encoding="utf-8"))
    assert pictures and all((ablation.RESULTS / name).is_file() for name in pictures)


def test_the_page_has_the_sizes_of_its_rows(tmp_path):
    rows = committed_rows("recurrence-ours-full", "none-vaswani-half-longer")
    for row in rows:
        row["layers"] = "7"
    page.harness.append(tmp_path / "rows.csv", rows)
    text = page.page(tmp_path)
    assert "The miniature has 7 layers\nof 128," in text and "3,000 steps" in text
    # None has the table's own steps.
    others = committed_rows("none-vaswani-half-longer", "none-ours-full-176-shorter")
    assert {row["steps"] for row in others} == {"6000", "2182"} and page.sizes_of(others, tmp_path)["steps"] == 3000
    rows[1]["layers"] = "3"
    (tmp_path / "rows.csv").unlink()
    page.harness.append(tmp_path / "rows.csv", rows)
    with pytest.raises(ValueError, match="rows.csv has runs with layers 3 and 7: one page needs runs of one size"):
        page.page(tmp_path)


def test_a_page_of_all_results_has_every_table(work, tmp_path, monkeypatch):
    monkeypatch.setattr(ablation, "ProcessPoolExecutor", InProcess)
    options = ["--smoke", "--output", str(tmp_path), "--work", str(work)]
    ablation.main([*options, "--rows", "recurrence-ours-full", "--seeds", "0"])
    ablation.main([*options, "--rows", "recurrence-ours-full", "--seeds", "0", "--shuffled"])
    monkeypatch.setattr(context_length, "GROUP", ["recurrence-ours-full", "gpt2"])
    context_length.main(options[:3])
    attention_maps.main(options[:3])
    article.main(options[:3] + ["--new_tokens", "3"])
    page.main(["--results", str(tmp_path)])
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    for heading in ("Ablation", "Control", "Context", "Attention", "Articles", "On a GPU", "Published checkpoints"):
        assert f"## {heading}\n" in text
    assert "Not computed yet" not in text and f"1 of {3 * len(ablation.TABLE)} runs are done" in text
    (tmp_path / "rows.csv").unlink()
    with pytest.raises(SystemExit, match="has no rows.csv: run examples/paper/ablation.py first"):
        page.main(["--results", str(tmp_path)])


def test_the_commands_for_a_gpu_are_the_recipes_with_their_options():
    """Each is parsed as typed, and describes the row that it is said to be."""
    from txl_hf.commands.recipe import parse_arguments
    from txl_hf.commands.train_lm import make_config

    lines = [line.split() for line in page.commands().splitlines() if not line.startswith("#")]
    assert len(lines) == len(page.COMMANDS)
    for _, _, recipe, *options in lines:
        arguments = parse_arguments([str(miniature.ROOT / recipe), *options])
        config = make_config(arguments, range(800_000))
        name = options[options.index("--output") + 1].removeprefix("runs/")
        if name in contenders.ROWS:
            row = contenders.ROWS[name]
            assert (config.attn_type, config.mem_len > 0) == (row.encoding, row.recurrence), name
            assert (config.ext_len == config.tgt_len) == (row.loss == "half"), name
            assert config.tgt_len + config.ext_len == round(128 * row.backprop), name


def test_an_article_is_written_behind_all_of_its_context():
    """Line ends too, whatever the model pads by."""
    model = small_model(vocab_size=10, cutoffs=[], div_val=1, mem_len=20, eos_token_id=None, pad_token_id=0).eval()
    tokenizer = TransfoXLTokenizer.from_symbols(["<eos>", "<unk>", *"abcdefgh"], mode="whitespace")
    options = argparse.Namespace(context=8, new_tokens=6, top_k=1, seed=0)
    ids = np.array([2, 3, 0, 4, 0, 0, 5, 6, 7, 8, 9, 2, 3, 4])
    expected = ids[:8].tolist()
    for _ in range(6):
        with torch.no_grad():
            expected.append(int(model(torch.tensor([expected])).logits[0, -1].argmax()))
    found = article.article(model, ids, tokenizer, 0, 1, options)
    assert f"**Generated.** {article.quote(tokenizer, expected[8:])}\n" in found
