"""How long a run says that it will take, by a clock of the test."""

import pytest

from txl_hf.training import progress
from txl_hf.training.progress import Progress, duration


@pytest.mark.parametrize(
    ("seconds", "words"), [(59.4, "59 s"), (61, "1 min 1 s"), (7260, "2 h 1 min"), (26 * 3600, "1 d 2 h")]
)
def test_a_time_in_its_two_largest_units(seconds, words):
    assert duration(seconds) == words


def said(monkeypatch, seconds_of_steps, interrupted_after=()):
    """The times that a run of so many steps says that the rest will take, each with the step after which it does."""
    now, found, lines, left_out = 0.0, [], [], "without the validations"
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now)
    monkeypatch.setattr(progress.tqdm, "write", lambda line, file: lines.append(line))
    shown = Progress(0, len(seconds_of_steps), 100, "perplexity", left_out, is_main=True)
    for step, seconds in enumerate(seconds_of_steps, 1):
        now += seconds
        shown.update(step, lambda: 1.0)
        while lines:
            line = lines.pop()
            assert line.startswith("expected time: ") and line.endswith(f" tokens a second, {left_out}")
            found.append((step, line.removeprefix("expected time: ").partition(" more")[0]))
        if step in interrupted_after:
            now += 100
            shown.interrupted()
    shown.close()
    return found


def test_it_says_so_once_where_steps_take_as_long_as_ever(monkeypatch):
    [(step, expected)] = said(monkeypatch, [30] + [0.1] * 9999)
    assert step < 55 and expected.startswith("16 min")


def test_of_a_short_run_a_tenth_will_do(monkeypatch):
    assert said(monkeypatch, [3] + [0.1] * 30) == [(4, "3 s")]


def test_it_corrects_what_the_first_steps_made_it_say(monkeypatch):
    """Ten steps a second, then a hundred: from 1,000 seconds to 100, and that within a minute."""
    (_, expected), (step, corrected) = said(monkeypatch, [0.1] * 60 + [0.01] * 9940)
    assert expected.startswith("16 min")
    assert step < 1500 and corrected.startswith("1 min")


@pytest.mark.parametrize("interval", [20, 200])
def test_what_took_time_between_the_steps_is_not_counted(monkeypatch, interval):
    """In intervals that are shorter than what is measured at first, and later."""
    found = said(monkeypatch, [0.1] * 10_000, interrupted_after=range(interval, 10_000, interval))
    assert len(found) == 1 and found[0][0] < 60 and found[0][1].startswith("16 min")
    slow = [0.1] * 150 + [0.01] * 9850
    (_, expected), (step, corrected) = said(monkeypatch, slow, range(interval, 10_000, interval))
    assert expected.startswith("16 min")
    assert step < 2500 and corrected.startswith("1 min")
