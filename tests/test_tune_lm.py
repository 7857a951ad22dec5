"""The command that tunes on the validation text: its points are evaluate_language_model's, the test is last."""

import json

import pytest
from datasets import load_from_disk
from transformers import AutoModelForCausalLM

import tune_lm
from test_evaluate_lm import corpus, model, text  # noqa: F401 -- fixtures
from txl_hf import ContinuousCache, DynamicEvaluation, evaluate_language_model
from txl_hf import evaluate as evaluate_lm

RATES, DECAYS = ["0.01", "0.1", "1e6"], ["0", "0.1"]
CACHES = ["--cache_size", "10", "80", "--cache_weight", "0.2", "--cache_temperature", "0", "0.2"]


def test_chooses_on_validation_and_tests_once(corpus, model, tmp_path, capsys, monkeypatch):  # noqa: F811
    read, texts = [], load_from_disk(corpus).with_format("numpy")
    texts = {split: texts[split]["token_ids"] for split in ("train", "validation", "test")}
    evaluate = tune_lm.evaluate_caches

    def watched(found, token_ids, **settings):
        read.append("test" if len(token_ids) == len(texts["test"]) else "validation")
        return evaluate(found, token_ids, **settings)

    monkeypatch.setattr(tune_lm, "evaluate_caches", watched)
    options = ["--model", model, "--data", corpus, "--rate", *RATES, "--decay", *DECAYS, "--statistics", "100"]
    options += ["--epsilon", "0.1", *CACHES, "--max_tokens", "150", "--output", tmp_path / "tuned.json"]
    tune_lm.main([*map(str, options), "--plot", str(tmp_path / "tuned.png")])
    printed = capsys.readouterr().out
    report = json.loads((tmp_path / "tuned.json").read_text())
    assert (tmp_path / "tuned.png").stat().st_size > 10_000

    # One reading for each way to step, before the first look at the test text; of that, one for each kind.
    assert read == ["validation"] * 7 + ["test"] * 4
    assert len({row["seconds"] for row in report["test"]}) == 4, "seconds of one are another's"
    points = report["validation"]
    assert len(points) == (1 + 2 * 2) * (1 + 4)
    assert printed.count("with learning_rate=1e+06 the weights have diverged") == 2
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
    by_kind = {row["kind"]: row["nll"] for row in report["test"]}
    assert len(by_kind) == 4 and by_kind["both"] < by_kind["static"]


def test_a_value_at_the_end_of_those_tried_is_named(corpus, model, capsys):  # noqa: F811
    options = ["--model", model, "--data", corpus, "--rate", "1e-6", "1e-5", "--max_tokens", "60"]
    tune_lm.main([*map(str, options), "--max_test_tokens", "30"])
    printed = capsys.readouterr().out
    assert "the best --rate for dynamic is 1e-05, at the end of those tried" in printed
    assert "test static" in printed and "test dynamic" in printed and "test both" not in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "nothing to tune: give --rate, --cache_size or both"),
        (["--rate", "-1"], "error: learning_rate=-1.0 must be a finite number at least 0"),
        (["--cache_size", "0"], "error: size=0 must be an integer of at least 1"),
        (["--rate", "0.1", "--parameters", "lora"], "error: parameters='lora' is found in the name of no parameter"),
        (["--rate", "0.1", "--statistics", "0"], "--statistics must be at least 1"),
    ],
)
def test_errors_are_one_line(corpus, model, capsys, options, message):  # noqa: F811
    with pytest.raises(SystemExit) as stopped:
        tune_lm.main(["--model", str(model), "--data", str(corpus), *options])
    assert message in str(stopped.value.code) + capsys.readouterr().err


def test_evaluate_lm_takes_what_was_chosen(corpus, model, capsys):  # noqa: F811
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
