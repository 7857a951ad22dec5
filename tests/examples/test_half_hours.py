"""examples/half_hours.py: recipes at equal seconds, done once, whatever stops it."""

import json
import statistics

import pytest
import torch
import yaml

import half_hours
import tune_lm
from txl_hf.commands.train_lm import check_schedule
from txl_hf.training.trainer import TransfoXLTrainer

COMMAND = ["--smoke", "--seeds", "0", "--only", "ptb", "warandpeace"]
FIRST = {name: text.contenders[0] for name, text in half_hours.TEXTS.items()}
SETTINGS = [
    ("static", None, None, 5.0),
    ("dynamic", {"learning_rate": 0.01}, None, 4.9),
    ("cache", None, {"size": 20}, 4.8),
    ("both", {"learning_rate": 0.01}, {"size": 20}, 4.7),
]


class Examples:
    """Stands in for the example scripts: writes their outputs without computing; call `stop_at` is interrupted."""

    def __init__(self, stop_at: int | None = None):
        self.started: list[tuple[str, list[str]]] = []
        self.stop_at = stop_at

    def start(self, script: str, options: list[str], threads: int | None = None):
        if len(self.started) == self.stop_at:
            raise KeyboardInterrupt
        self.started.append((script, options))
        output = half_hours.Path(options[options.index("--output") + 1])
        if script == "prepare_corpus.py":
            output.mkdir(parents=True)
        elif script == "train_lm.py":
            output.mkdir(parents=True)
            splits = {split: {"nll": 2.0} for split in ("validation", "test")}
            results = {**splits, "model": {"parameters": 7}, "commit": "abc"}
            (output / half_hours.RESULTS).write_text(json.dumps(results))
            recipe = yaml.safe_dump(half_hours.training_arguments(options).settings)
            (output / half_hours.RECIPE).write_text(recipe)
        else:
            rows = [
                {"kind": k, "dynamic": d, "cache": c, "nll": nll, "seconds": 3.0, "text_tokens": 1500}
                for k, d, c, nll in SETTINGS
            ]
            asked = tune_lm.settings_of(tune_lm.parse_arguments(options))
            report = {"threads": threads, "complete": True, "options": asked, "validation": rows, "test": rows}
            output.write_text(json.dumps(report))


class InProcess:
    def __init__(self, *args):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def submit(self, function, *args):
        value = function(*args)
        return type("Result", (), {"result": lambda self: value})()


@pytest.fixture
def examples(monkeypatch):
    def use(stop_at: int | None = None) -> Examples:
        examples = Examples(stop_at)
        monkeypatch.setattr(half_hours, "start", examples.start)
        return examples

    monkeypatch.setattr(half_hours, "ProcessPoolExecutor", InProcess)
    seconds = {each: 2.0 for each in FIRST.values()}
    monkeypatch.setattr(half_hours, "seconds_of_steps", lambda run: [seconds.get(run.contender, 4.0)] * 2)
    return use


def test_contenders_train_for_equal_seconds_and_are_read_in_four_ways(examples, tmp_path, capsys):
    started = examples().started
    half_hours.main([*COMMAND, "--output", str(tmp_path)])
    trained = [options for script, options in started if script == "train_lm.py"]
    # Eight steps of two seconds are four of four.
    steps = [
        [value for name, value in zip(options, options[1:], strict=False) if name == "--max_steps"][-1]
        for options in trained
    ]
    assert steps == ["8", "4", "8", "8"], "characters are compared at equal steps"
    rows = half_hours.harness.read(tmp_path / "rows.csv")
    assert [row["kind"] for row in rows] == [*half_hours.KINDS] * 2 + ["static"] * 2
    seconds = {(row["text"], row["contender"]): row["train_seconds"] for row in rows}
    assert [*seconds.values()] == ["16", "16", "16", "32"] and {row["commit"] for row in rows} == {"abc"}
    assert json.loads(rows[3]["settings"]) == {"dynamic": {"learning_rate": 0.01}, "cache": {"size": 20}}
    assert rows[0]["command"].startswith("train_lm.py examples/recipes/wikitext2_small.yaml --data ")
    page = (tmp_path / "README.md").read_text()
    assert "| recipe | 1 | 4 | 16 | 148.41 | 134.29 | 121.51 | 109.95 |" in page
    assert "| as enwik8_base | 1 | 8 | 16 | 2.885 |" in page
    assert "Perplexity of the test text, 1,500 tokens; " in page and "Bits a character of the test text; " in page
    assert page in capsys.readouterr().out


def test_a_share_of_the_seconds_is_a_share_of_steps_and_warm_up_and_nothing_is_tuned(examples, tmp_path):
    started = examples().started
    half_hours.main([*COMMAND, "--share", "0.5", "--output", str(tmp_path)])
    trained = [half_hours.training_arguments(options) for script, options in started if script == "train_lm.py"]
    assert [each.training.max_steps for each in trained] == [4, 2, 4, 4]
    assert [each.training.warmup_steps for each in trained] == [0] * 4, "half of one step"
    assert not [script for script, _ in started if script == "tune_lm.py"]
    rows = half_hours.harness.read(tmp_path / "rows.csv")
    assert [(row["kind"], row["share"]) for row in rows] == [("static", "0.5")] * 4
    assert (tmp_path / "README.md").read_text().startswith("# 50% of half an hour on two cores\n")


def test_a_run_of_another_share_is_not_taken_for_one(examples, tmp_path):
    examples()
    half_hours.main([*COMMAND, "--share", "0.5", "--output", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"has ptb, first recipe, 0 of --share 0.5, not 0.2: name another"):
        half_hours.main([*COMMAND, "--share", "0.2", "--output", str(tmp_path)])


def test_a_share_of_the_warm_up(tmp_path):
    contender = FIRST["wikitext-2"]
    run = half_hours.Run("wikitext-2", contender, seed=0, work=tmp_path, smoke=False, share=0.2)
    half_hours.timed(run).write_text(json.dumps({contender.name: {"turns": [[1.0]], "options": {}}}))
    assert half_hours.steps_of(run) == [["--max_steps", "1000", "--warmup_steps", "40", "--eval_memory_lengths"]]


def test_halves_are_of_equal_seconds_and_the_second_trains_the_model_of_the_first(examples, tmp_path, monkeypatch):
    started = examples().started
    halves = half_hours.Contender(
        "halves", "wikitext2_small", "--dropout 0.2", before="--lr_scheduler_type constant_with_warmup"
    )
    text = half_hours.TEXTS["ptb"]
    monkeypatch.setitem(half_hours.TEXTS, "ptb", half_hours.replace(text, contenders=(text.contenders[0], halves)))
    seconds = {text.contenders[0]: 2.0, halves.first_half: 1.0, halves: 4.0}
    monkeypatch.setattr(half_hours, "seconds_of_steps", lambda run: [seconds[run.contender]] * 2)
    # Halves of the same work would be timed as one.
    monkeypatch.setattr(half_hours, "FREE", set())
    command = ["--smoke", "--seeds", "0", "--only", "ptb", "--contenders", "halves", "--output", str(tmp_path)]
    half_hours.main(command)
    first, second = [half_hours.training_arguments(options) for script, options in started if script == "train_lm.py"]
    # Eight steps of two seconds are, in halves, eight of one and two of four.
    assert (first.training.max_steps, second.training.max_steps) == (8, 2)
    assert (first.training.lr_scheduler_type, second.training.lr_scheduler_type) == ("constant_with_warmup", "cosine")
    assert first.config["dropout"] == second.config["dropout"] == 0.2
    assert (first.model.model_name_or_path, second.model.model_name_or_path) == (None, first.training.output_dir)
    tuned = [options for script, options in started if script == "tune_lm.py"]
    assert [options[options.index("--model") + 1] for options in tuned] == [second.training.output_dir]
    row = half_hours.harness.read(tmp_path / "rows.csv")[0]
    assert (row["steps"], row["seconds_of_step"], row["train_seconds"]) == ("10", "1.6", "16")
    page = (tmp_path / "README.md").read_text()
    assert page.count("\ntrain_lm.py ") == 2 and half_hours.AND not in page
    # What is done is of these halves, and of no others.
    half_hours.main(command)
    for changed in (
        half_hours.replace(halves, before="--lr_scheduler_type constant_with_warmup --tgt_len 8"),
        text.contenders[1],
    ):
        contenders = (text.contenders[0], half_hours.replace(changed, name="halves"))
        monkeypatch.setitem(half_hours.TEXTS, "ptb", half_hours.replace(text, contenders=contenders))
        with pytest.raises(
            SystemExit,
            match="of other options, --dropout 0.2 --lr_scheduler_type constant_with_warmup --n_layer .* && ",
        ):
            half_hours.main(command)


def test_a_row_says_how_many_threads_its_run_had(examples, tmp_path, monkeypatch):
    examples()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    half_hours.main([*COMMAND, "--jobs", "2", "--output", str(tmp_path)])
    assert {row["threads"] for row in half_hours.harness.read(tmp_path / "rows.csv")} == {"2"}


@pytest.mark.parametrize(
    ("text", "contender"),
    [(name, piece) for name, text in half_hours.TEXTS.items() for each in text.contenders for piece in each.pieces],
    ids=str,
)
def test_each_contender_can_be_timed(tmp_path, text, contender):
    """A warm-up longer than the steps that are timed was refused where the rate goes down at the end."""
    run = half_hours.Run(text, contender, seed=0, work=tmp_path, smoke=False)
    arguments = half_hours.training_arguments(run.training(tmp_path / "timed", *half_hours.TIMING)).training
    check_schedule(arguments, half_hours.PLANNED)


def test_steps_that_are_timed_remember_as_much_as_those_of_the_whole_training(tmp_path, monkeypatch):
    """A memory that grows was timed with 0.69 of its length where it has 0.75: 1.5 % too many steps were the gain."""
    [growing] = [each for each in half_hours.TEXTS["wikitext-2"].contenders if "--mem_warmup_ratio" in each.options]
    run = half_hours.Run("wikitext-2", growing, seed=0, work=tmp_path, smoke=True)
    half_hours.prepare(run, None)
    found, training_step = [], TransfoXLTrainer.training_step

    def noted(trainer, *batch):
        [memory] = trainer._memory.memories
        found.append(memory["mems"][0].shape[1] if memory else 0)
        return training_step(trainer, *batch)

    monkeypatch.setattr(TransfoXLTrainer, "training_step", noted)
    assert len(half_hours.seconds_of_steps(run)) == half_hours.TIMED
    steps, mem_len = 2000, 16
    whole = [max(1, min(mem_len, int(mem_len * step / (0.5 * steps)))) for step in range(steps)]
    # Where the text ends, the first step of the next epoch remembers nothing.
    timed = found[-half_hours.TIMED :]
    timed = [length or timed[place + 1] for place, length in enumerate(timed)]
    assert timed == sorted(timed) and timed[0] == 1 and timed[-1] == mem_len
    assert statistics.fmean(timed) == pytest.approx(statistics.fmean(whole), rel=0.01)


def test_some_contenders_are_run_and_timed_beside_the_first(examples, tmp_path):
    started = examples().started
    command = ["--smoke", "--seeds", "0", "--only", "wikitext-2", "--contenders", "recipe", "without Muon"]
    half_hours.main([*command, "--output", str(tmp_path)])
    rows = half_hours.harness.read(tmp_path / "rows.csv")
    assert {row["contender"] for row in rows} == {"recipe", "without Muon"}
    assert [script for script, _ in started].count("train_lm.py") == 2
    [timed] = tmp_path.rglob("wikitext-2.json")
    seconds = json.loads(timed.read_text())
    assert [*seconds] == ["first recipe", "recipe", "without Muon"]
    assert [seconds[name]["options"]["optimizer"] for name in seconds] == ["adamw", "muon", "adamw"]


def test_contenders_whose_steps_are_the_same_work_are_equally_fast(examples, tmp_path, monkeypatch):
    """Noise gave one schedule 8 % more steps than another, and the better figure; it is in four of five turns."""
    names = ["recipe", "without Muon", "with a weight decay of 0.01", "stable, then down"]
    turns = iter([[2.0, 1.0], [3.0, 3.0], [1.5, 3.0], [1.5, 1.5], [2.0, 2.0]])
    examples()
    monkeypatch.setattr(
        half_hours, "seconds_of_steps", lambda run: next(turns) if run.contender.name == "recipe" else [1.5, 1.5]
    )
    command = ["--smoke", "--seeds", "0", "--only", "wikitext-2", "--contenders", *names]
    half_hours.main([*command, "--output", str(tmp_path)])
    rows = half_hours.harness.read(tmp_path / "rows.csv")
    assert {row["contender"]: (row["seconds_of_step"], row["steps"]) for row in rows} == {
        "recipe": ("1.25", "10"),
        "without Muon": ("1.5", "8"),
        "with a weight decay of 0.01": ("1.25", "10"),
        "stable, then down": ("1.25", "10"),
    }


def test_times_without_a_contender_are_refused(examples, tmp_path):
    examples()
    work = tmp_path / "work"
    work.mkdir()
    (work / "wikitext-2.json").write_text('{"first recipe": 2.0}')
    with pytest.raises(
        SystemExit, match=r"wikitext-2\.json has no time with options of first recipe, recipe, .*: delete it"
    ):
        half_hours.main(["--smoke", "--seeds", "0", "--only", "wikitext-2", "--output", str(tmp_path)])


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ("ptb.json", r"ptb\.json is of other options: dropout was 0\.3 and is 0\.45; delete it"),
        ("ptb-recipe-0/recipe.yaml", r"ptb-recipe-0 is of other options: dropout was 0\.3 and is 0\.45; delete it"),
        ("ptb-recipe-0/tuned.json", r"tuned\.json is of other options: rate was \[0\.01\] and is \[0\.02\]; delete"),
    ],
)
def test_what_was_begun_with_other_options_is_refused(examples, tmp_path, monkeypatch, kept, message):
    """Each file of a run by itself, the others being gone."""
    examples()
    command = ["--smoke", "--seeds", "0", "--only", "ptb", "--output", str(tmp_path)]
    half_hours.main(command)
    for path in [*tmp_path.rglob("*")]:
        if path.is_file() and not path.match(kept):
            path.unlink()
    text = half_hours.TEXTS["ptb"]
    changed = half_hours.replace(text.contenders[1], options="--dropout 0.45 --weight_decay 0.3")
    monkeypatch.setitem(half_hours.TEXTS, "ptb", half_hours.replace(text, contenders=(text.contenders[0], changed)))
    monkeypatch.setattr(half_hours, "SMALL_TUNING", half_hours.SMALL_TUNING.replace("0.01", "0.02"))
    started = examples().started
    with pytest.raises(SystemExit, match=message):
        half_hours.main(command)
    assert not started, "refused before anything is done again"


def test_a_row_of_other_options_is_refused(examples, tmp_path, monkeypatch):
    examples()
    command = ["--smoke", "--seeds", "0", "--only", "ptb", "--output", str(tmp_path)]
    half_hours.main(command)
    half_hours.main(command)
    text = half_hours.TEXTS["ptb"]
    for options in ("--dropout 0.3", "--dropout 0.45 --weight_decay 0.3"):
        changed = half_hours.replace(text.contenders[1], options=options)
        contenders = (text.contenders[0], changed)
        monkeypatch.setitem(half_hours.TEXTS, "ptb", half_hours.replace(text, contenders=contenders))
        with pytest.raises(SystemExit, match="has ptb, recipe, 0 of other options, --dropout 0.3 --weight_decay 0.3"):
            half_hours.main(command)


def test_the_rows_that_are_committed_are_of_today_s_options():
    results = half_hours.OUTPUT.parent
    shares = ("shares", "shares_family_26", "schedules", "growing_memory")
    for output in (half_hours.OUTPUT, *(results / name for name in shares)):
        for row in half_hours.harness.read(output / "rows.csv"):
            for contender in half_hours.TEXTS[row["text"]].contenders:
                if contender.name == row["contender"]:
                    share = float(row.get("share") or 1)
                    run = half_hours.Run(row["text"], contender, int(row["seed"]), output, False, share)
                    half_hours.check_done(run, row, output)


def test_times_of_another_machine_are_refused(examples, tmp_path, monkeypatch):
    examples()
    command = ["--smoke", "--seeds", "0", "--only", "ptb", "--output", str(tmp_path)]
    half_hours.main(command)
    (tmp_path / "rows.csv").unlink()
    monkeypatch.setattr(half_hours.harness, "processor", lambda: "another")
    with pytest.raises(SystemExit, match=r"ptb\.json is of other options: processor was .* and is another; delete it"):
        half_hours.main(command)


def test_each_contender_s_command_is_on_the_page_whatever_its_seed():
    rows = [{"contender": name, "seed": seed, "command": f"{name} {seed}"} for name, seed in ("a1", "a2", "b2")]
    assert half_hours.commands(rows) == ["a 1", "b 2"]


def test_a_part_of_a_tuning_is_done_again(examples, tmp_path):
    examples()
    command = ["--smoke", "--seeds", "0", "--only", "ptb", "--contenders", "recipe", "--output", str(tmp_path)]
    half_hours.main(command)
    [tuned] = tmp_path.rglob("tuned.json")
    tuned.write_text(json.dumps(json.loads(tuned.read_text()) | {"complete": False, "test": []}))
    (tmp_path / "rows.csv").unlink()
    started = examples().started
    half_hours.main(command)
    assert [script for script, _ in started] == ["tune_lm.py"]


@pytest.mark.parametrize("stop_at", [pytest.param(n, marks=pytest.mark.slow if n % 4 else ()) for n in range(9)])
def test_what_is_done_is_not_done_again(examples, tmp_path, stop_at):
    whole = examples()
    half_hours.main([*COMMAND, "--output", str(tmp_path / "whole")])
    assert len(whole.started) == 8
    first = examples(stop_at)
    try:
        half_hours.main([*COMMAND, "--output", str(tmp_path / "stopped")])
    except (KeyboardInterrupt, SystemExit):
        pass
    second = examples()
    half_hours.main([*COMMAND, "--output", str(tmp_path / "stopped")])
    assert len(first.started) + len(second.started) == 8
    read = [half_hours.harness.read(tmp_path / name / "rows.csv") for name in ("whole", "stopped")]
    assert [[half_hours.key(row) for row in rows] for rows in read][0] == [half_hours.key(row) for row in read[1]]


def test_a_text_whose_models_are_scored_alone_has_a_page_too(examples, tmp_path):
    examples()
    half_hours.main(["--smoke", "--seeds", "0", "--only", "warandpeace", "--output", str(tmp_path)])
    page = (tmp_path / "README.md").read_text()
    assert "| recipe | 1 | 8 | 32 | 2.885 |" in page and "to read the test text" not in page


def test_seeds_are_averaged_with_their_range():
    assert half_hours.with_range([90.0, 92.0, 91.0], 1) == "91.0 ± 1.0"
    assert half_hours.with_range([90.0], 2) == "90.00"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--smoke"], "--smoke measures nothing worth keeping"),
        ([], "--texts is missing: name the folder of the texts"),
        (["--texts", ".", "--share", "0.2"], "--share 0.2 is not the whole time: name other folders with --output"),
        (["--texts", ".", "--share", "1.5"], "--share 1.5 must be above 0 and at most 1"),
        (["--contenders", "Moon"], "--contenders ['Moon']: of wikitext-2, ptb,"),
        # Each would be trained again, and count as a seed more.
        (["--texts", ".", "--seeds", "0", "1", "0"], "--seeds has 0 twice: name each once"),
        (["--texts", ".", "--only", "ptb", "ptb"], "--only has ptb twice: name each once"),
        (["--texts", ".", "--contenders", "recipe", "recipe"], "--contenders has recipe twice: name each once"),
    ],
)
def test_errors_are_one_line(options, message, capsys):
    with pytest.raises(SystemExit):
        half_hours.main(options)
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_in_miniature(tmp_path, capfd):
    command = ["--smoke", "--seeds", "0", "--only", "ptb", "--output", str(tmp_path)]
    half_hours.main(command)
    rows = half_hours.harness.read(tmp_path / "rows.csv")
    assert [row["kind"] for row in rows] == [*half_hours.KINDS] * 2
    capfd.readouterr()
    half_hours.main(command)
    said = capfd.readouterr().out
    assert f"2 of 2 runs are done in {tmp_path}" in said
    assert f"  ptb, recipe, 0: {rows[-1]['date']}, {rows[-1]['processor']}" in said
    assert half_hours.harness.read(tmp_path / "rows.csv") == rows


def test_seconds_of_two_machines_are_not_one_figure(examples, tmp_path):
    examples()
    half_hours.main([*COMMAND, "--output", str(tmp_path)])
    rows = [row for row in half_hours.harness.read(tmp_path / "rows.csv") if row["text"] == "ptb"]
    assert "| *to read the test text* |" in half_hours.table(rows) and "| recipe | 1 | 4 | 16 |" in half_hours.table(
        rows
    )
    second = [row | {"processor": "another", "seed": "1"} for row in rows]
    table = half_hours.table(rows + second)
    assert "to read the test text" not in table and "| recipe | 2 | 4 ± 0 | – |" in table
