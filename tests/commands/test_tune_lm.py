"""The command that tunes on the validation text: its points are evaluate_language_model's, the test is last."""

# ruff: noqa: F811 -- a test's arguments have the names of the fixtures that are imported, as pytest wants it

import json
import re
from argparse import Namespace

import pytest
from datasets import load_from_disk
from test_evaluate_lm import corpus, model, text  # noqa: F401 -- fixtures
from transformers import AutoModelForCausalLM

import tune_lm
from txl_hf import ContinuousCache, DynamicEvaluation, GradientStatistics, evaluate_language_model
from txl_hf.commands import evaluate_lm as evaluate_lm
from txl_hf.evaluation.dynamic import Diverged

RATES, DECAYS = ["0.01", "0.1", "1e6"], ["0", "0.1"]
CACHES = ["--cache_size", "10", "80", "--cache_weight", "0.2", "--cache_temperature", "0", "0.2"]


def test_chooses_on_validation_and_tests_once(corpus, model, tmp_path, capsys, monkeypatch):
    read, texts = [], load_from_disk(corpus).with_format("numpy")
    texts = {split: texts[split]["token_ids"] for split in ("train", "validation", "test")}
    evaluate = tune_lm.evaluate_caches

    def watched(found, token_ids, **settings):
        read.append("test" if len(token_ids) == len(texts["test"]) else "validation")
        return evaluate(found, token_ids, **settings)

    statistics, collect = [], GradientStatistics.of

    def collected(found, token_ids, *args, **settings):
        statistics.append(len(token_ids))
        return collect(found, token_ids, *args, **settings)

    monkeypatch.setattr(tune_lm, "evaluate_caches", watched)
    monkeypatch.setattr(GradientStatistics, "of", collected)
    options = ["--model", model, "--data", corpus, "--rate", *RATES, "--decay", *DECAYS, "--statistics", "100"]
    options += ["--epsilon", "0.1", "1", *CACHES, "--max_tokens", "150", "--output", tmp_path / "tuned.json"]
    tune_lm.main([*map(str, options), "--plot", str(tmp_path / "tuned.png")])
    printed = capsys.readouterr().out
    report = json.loads((tmp_path / "tuned.json").read_text())
    assert (tmp_path / "tuned.png").stat().st_size > 10_000

    assert report["words"] is None and report["characters"] is None, "of the beginning they are not known"
    assert "commit" in report, "what code gave the figures"
    # One reading for each way to step, before the first look at the test text; of that, one for each kind.
    assert read == ["validation"] * 13 + ["test"] * 4
    assert statistics == [100] and report["statistics_seconds"] > 0, "read once, not for each way to step"
    assert len({row["seconds"] for row in report["test"]}) == 4, "seconds of one are another's"
    points = report["validation"]
    assert len(points) == (1 + 2 * 2 * 2) * (1 + 4)
    assert printed.count("with learning_rate=1e+06 the weights have diverged") == 4
    assert [found["dynamic"]["learning_rate"] for found in report["diverged"]] == [1e6] * 4 and report["complete"]
    best = {
        "static": [point for point in points if not point["dynamic"] and not point["cache"]],
        "dynamic": [point for point in points if not point["cache"]],
        "cache": [point for point in points if not point["dynamic"]],
        "both": points,
    }
    assert [row["kind"] for row in report["test"]] == list(best)
    loaded = AutoModelForCausalLM.from_pretrained(model)
    for row in report["test"]:
        chosen = min(best[row["kind"]], key=lambda point: point["nll"])
        assert (row["dynamic"], row["cache"]) == (chosen["dynamic"], chosen["cache"])
        dynamic = row["dynamic"] and DynamicEvaluation(**row["dynamic"] | {"statistics": texts["train"][:100]})
        cache = row["cache"] and ContinuousCache(**row["cache"])
        for split, figures in (("validation", chosen), ("test", row)):
            ids = texts[split] if split == "test" else texts[split][:150]
            expected = evaluate_language_model(loaded, ids, 8, dynamic=dynamic, cache=cache)
            assert figures["nll"] == pytest.approx(expected.nll, rel=1e-5)
        assert f"test {row['kind']}: perplexity {row['perplexity']:.3f}" in printed
        weights = f"rate {dynamic.learning_rate:g}" if dynamic else "static weights"
        assert re.search(rf"test {row['kind']}: .* bits a token, with {weights}", printed)
        assert not cache or f", cache of {cache.size}, weight {cache.weight:g}," in printed
    by_kind = {row["kind"]: row["nll"] for row in report["test"]}
    assert len(by_kind) == 4 and by_kind["both"] < by_kind["static"]


def test_what_is_chosen_twice_is_read_once(corpus, model, capsys, monkeypatch):
    """No rate gains, so that the best of all is the model alone."""
    lengths, evaluate = [], tune_lm.evaluate_caches
    monkeypatch.setattr(
        tune_lm, "evaluate_caches", lambda *args, **given: lengths.append(len(args[1])) or evaluate(*args, **given)
    )
    options = ["--model", model, "--data", corpus, "--rate", "1", "--max_tokens", "60", "--max_test_tokens", "30"]
    tune_lm.main([*map(str, options)])
    static, dynamic = re.findall("^test .*: (.*), with static weights$", capsys.readouterr().out, re.MULTILINE)
    assert lengths == [60, 60, 30] and static == dynamic


def test_a_value_at_the_end_of_those_tried_is_named(corpus, model, capsys):
    options = ["--model", model, "--data", corpus, "--rate", "1e-6", "1e-5", "--max_tokens", "60"]
    tune_lm.main([*map(str, options), "--max_test_tokens", "30"])
    printed = capsys.readouterr().out
    assert "the best --rate for dynamic is 1e-05, at the end of those tried" in printed
    assert "test static" in printed and "test dynamic" in printed and "test both" not in printed


TRIED = {
    "rate": [0.0, 0.1, 1.0],
    "decay": [0.0, 0.5, 1.0],
    "epsilon": [0.1, 0.2, 0.3],
    "cache_size": [1, 50, 100],
    "cache_weight": [0.0, 0.1, 0.5],
    "cache_temperature": [0.0, 0.1, 1.0],
}


@pytest.mark.parametrize(
    ("place", "statistics", "named"),
    [
        (0, 100, ["epsilon"]),
        (1, 100, []),
        (2, 100, ["rate", "decay", "epsilon", "cache_weight", "cache_temperature"]),
        (2, None, ["rate", "epsilon", "cache_weight", "cache_temperature"]),
    ],
)
def test_an_end_is_named_where_something_is_beyond_it(capsys, place, statistics, named):
    """Nothing is before 0, above a decay of 1 without statistics, or in a cache that is longer than the text."""
    rate, decay, epsilon, *cache = (values[place] for values in TRIED.values())
    point = tune_lm.Point(DynamicEvaluation(rate, decay, epsilon), ContinuousCache(*cache), None, 0.0)
    tune_lm.warn_of_an_end("both", point, Namespace(**TRIED, statistics=statistics), 100)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("--")[1].split()[0] for line in lines] == named
    tune_lm.warn_of_an_end("both", point, Namespace(**TRIED, statistics=statistics), 101)
    assert ("the best --cache_size for both is 100" in capsys.readouterr().out) == (place == 2)


@pytest.mark.parametrize(
    ("kind", "tried", "said"),
    [
        ("dynamic", {"rate": [0.1, 0.01]}, "no --rate of those tried is better than none: try smaller ones than 0.01"),
        ("cache", {}, "no --cache_weight of those tried is better than none: try smaller ones than 0.1"),
        ("cache", {"cache_weight": [0.0]}, "no --cache_weight of those tried is better than none: try one above 0"),
    ],
)
def test_it_is_said_that_none_of_those_tried_is_better_than_none(capsys, kind, tried, said):
    options = Namespace(**TRIED | tried, statistics=None)
    tune_lm.warn_of_an_end(kind, tune_lm.Point(None, None, None, 0.0), options, 100)
    [line] = capsys.readouterr().out.splitlines()
    assert line == f"note: {said}"


class Stopped(Exception):
    pass


def test_what_is_known_is_kept_when_it_stops(corpus, model, tmp_path, monkeypatch):
    """In a folder that was not there."""
    output, evaluate, read = tmp_path / "new" / "tuned.json", tune_lm.evaluate_caches, []

    def stopping(*args, **settings):
        read.append(settings)
        if len(read) == 4:
            raise Stopped
        return evaluate(*args, **settings)

    monkeypatch.setattr(tune_lm, "evaluate_caches", stopping)
    options = ["--model", model, "--data", corpus, "--rate", "0.01", "--max_tokens", "60", "--max_test_tokens", "30"]
    with pytest.raises(Stopped):
        tune_lm.main([*map(str, options), "--output", str(output)])
    report = json.loads(output.read_text())
    assert len(report["validation"]) == 2 and [row["kind"] for row in report["test"]] == ["static"]
    assert report["complete"] is False


def test_weights_that_diverge_on_the_test_text_leave_the_other_figures(corpus, model, tmp_path, capsys, monkeypatch):
    evaluate = tune_lm.evaluate_caches

    def diverging(found, token_ids, *, dynamic, **settings):
        if dynamic is not None and len(token_ids) == 30:
            raise Diverged("the weights have diverged")
        return evaluate(found, token_ids, dynamic=dynamic, **settings)

    monkeypatch.setattr(tune_lm, "evaluate_caches", diverging)
    options = ["--model", model, "--data", corpus, "--rate", "0.1", "--max_tokens", "150", "--max_test_tokens", "30"]
    options += [*CACHES[:2], "--cache_weight", "0.2", "--output", tmp_path / "tuned.json"]
    tune_lm.main([*map(str, options)])
    report = json.loads((tmp_path / "tuned.json").read_text())
    assert [row["kind"] for row in report["test"]] == ["static", "cache"] and report["complete"]
    assert [found["where"] for found in report["diverged"]] == ["test dynamic", "test both"]
    assert "test dynamic: the weights have diverged" in capsys.readouterr().out


def test_nothing_dynamic_is_evaluated_where_all_diverge(corpus, model, capsys):
    options = ["--model", model, "--data", corpus, "--rate", "1e6", "1e7", "--max_test_tokens", "30"]
    tune_lm.main([*map(str, options)])
    printed = capsys.readouterr().out
    assert "diverged at every --rate, so that nothing dynamic is evaluated" in printed
    assert "test static" in printed and "test dynamic" not in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cache_size", "5", "--decay", "0.1"], "--decay does nothing without --rate: give both or neither"),
        (["--cache_size", "5", "--statistics", "9"], "--statistics does nothing without --rate"),
        (["--cache_size", "5", "--parameters", "layers"], "--parameters does nothing without --rate"),
        (["--rate", "0.1", "--epsilon", "0.1"], "--epsilon does nothing without --statistics"),
        (["--rate", "0.1", "--cache_weight", "0.1"], "--cache_weight does nothing without --cache_size"),
        (["--rate", "0.1", "--output", "/dev/null/tuned.json"], "/dev/null"),
        ([], "nothing to tune: give --rate, --cache_size or both"),
        (["--rate", "-1"], "error: learning_rate=-1.0 must be a finite number at least 0"),
        (["--cache_size", "0"], "error: size=0 must be an integer of at least 1"),
        (["--rate", "0.1", "--parameters", "lora"], "error: parameters='lora' is found in the name of no parameter"),
        (["--rate", "0.1", "--statistics", "0"], "--statistics must be at least 1"),
        (["--rate", "0.1", "--statistics", "1"], "error: --statistics 1: "),
        (["--rate", "0.1", "--statistics", "999999"], "--statistics 999999 is more than the training text has: "),
        (["--rate", "0.1", "--batch_size", "30", "--max_test_tokens", "30"], "of the test text 30 are read"),
        (["--rate", "0.1", "--segment_length", "0"], "segment_length=0 must be an integer of at least 1"),
        (["--rate", "0.1", "--batch_size", "0"], "batch_size=0 must be an integer of at least 1"),
    ],
)
def test_errors_are_one_line(corpus, model, capsys, options, message):
    with pytest.raises(SystemExit) as stopped:
        tune_lm.main(["--model", str(model), "--data", str(corpus), *options])
    assert message in str(stopped.value.code) + capsys.readouterr().err


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("--rate -1", "must be a"),
        ("--cache_size 5 --cache_weight 1.5", "must be a"),
        ("--rate 1 --parameters nothing", "parameters='nothing' is found in the name of no parameter"),
    ],
)
def test_settings_are_refused_before_statistics_are_taken(corpus, model, monkeypatch, bad, message):
    monkeypatch.setattr(GradientStatistics, "of", lambda *_, **__: pytest.fail("they take long"))
    options = ["--model", str(model), "--data", str(corpus), "--rate", "0.1", "--statistics", "100", *bad.split()]
    with pytest.raises(SystemExit, match=message):
        tune_lm.main(options)


def test_evaluate_lm_takes_what_was_chosen(corpus, model, capsys):
    options = ["--model", model, "--data", corpus, "--dynamic", "0.1", "--decay", "0.05", "--epsilon", "0.1"]
    options += ["--statistics", "100", "--parameters", r"layers\.1", "--cache", "50", "0.2", "0.1", "--json"]
    evaluate_lm.main([*map(str, options)])
    [row] = json.loads(capsys.readouterr().out)["results"]
    texts = load_from_disk(corpus).with_format("numpy")
    dynamic = DynamicEvaluation(0.1, 0.05, 0.1, texts["train"]["token_ids"][:100], r"layers\.1")
    expected = evaluate_language_model(
        AutoModelForCausalLM.from_pretrained(model),
        texts["test"]["token_ids"],
        8,
        dynamic=dynamic,
        cache=ContinuousCache(50, 0.2, 0.1),
    )
    assert row["nll"] == pytest.approx(expected.nll, rel=1e-5)
    assert (row["dynamic"], row["cache"]) == (expected.dynamic, expected.cache)
