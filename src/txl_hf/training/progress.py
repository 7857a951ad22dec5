"""What a run says of itself while it goes: a bar with the loss in it, and how long the rest will take."""

import math
import sys
import time
from collections.abc import Callable

from tqdm.auto import tqdm

from ..evaluation.language_model import figures

SECONDS_SHOWN = 5
# How long steps are measured to say how long all will take; of a short run a tenth will do. They are measured again,
# for twice as long each time, as the first ones may compile or be captured: what was said is corrected where it was
# wrong by this share.
SECONDS_MEASURED, TOLERANCE = 5, 1 / 3


def duration(seconds: float) -> str:
    """A time in the two largest units that it has."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


class Progress:
    """The bar of a run, which only the main process shows."""

    def __init__(self, step: int, max_steps: int, tokens: int, metric: str, left_out: str, is_main: bool):
        """Args:
        step: from which the run goes on. tokens: of a step. metric: of `figures`, in which a loss is shown.
        left_out: what takes time beside the steps that are measured.
        """
        self._bar = tqdm(total=max_steps, initial=step, unit="step", desc="train", disable=not is_main)
        self._total, self._tokens, self._metric, self._left_out = max_steps, tokens, metric, left_out
        # The first step is shown at once.
        self._shown = -math.inf
        # When the last step was done; steps that were measured since it was last looked at, and the time of all.
        self._last: float | None = None
        self._steps, self._since, self._clock = 0, 0.0, 0.0
        self._seconds = SECONDS_MEASURED
        # When all is done by that clock, as it was said.
        self._end: float | None = None

    def update(self, step: int, loss: Callable[[], float | None]):
        """After a step.

        Args:
            step: steps done. loss: the mean in nats since the last line of the log, for which the host waits for the
                device; None: nothing was learned from.
        """
        self._bar.update()
        if self._bar.disable:
            return
        # Every few seconds, whatever the log waits for.
        if time.perf_counter() - self._shown > SECONDS_SHOWN and (found := loss()) is not None:
            self.show(found)
        self._expect(step, loss)

    def show(self, loss: float, tokens_per_second: float | None = None):
        """Put a loss, in nats, into the bar."""
        speed = "" if tokens_per_second is None else f", {tokens_per_second:.0f} tokens/s"
        self._bar.set_postfix_str(f"{self._metric} {figures(loss)[self._metric]:.2f}{speed}")
        self._shown = time.perf_counter()

    def close(self):
        self._bar.close()

    def interrupted(self):
        """Something else than steps took time until now."""
        if self._last is not None:
            self._last = time.perf_counter()

    def _expect(self, step: int, wait: Callable[[], object]):
        """Say how long the steps will take once enough are measured."""
        if self._last is None:
            # Not the first one, which may compile.
            self._last = time.perf_counter()
            return
        self._tick()
        self._steps += 1
        left_steps = self._total - step
        is_tenth = self._steps * 10 >= left_steps + self._steps
        if self._clock - self._since <= self._seconds and not (self._end is None and is_tenth):
            return
        # What the device was given to do is done when this is known.
        wait()
        self._tick()
        seconds = (self._clock - self._since) / self._steps
        left = left_steps * seconds
        # What a few seconds take says little of as few.
        if self._end is None or abs(self._clock + left - self._end) > max(left * TOLERANCE, self._seconds):
            speed = f"{self._tokens / seconds:,.0f} tokens a second"
            tqdm.write(f"expected time: {duration(left)} more, at {speed}, {self._left_out}", file=sys.stderr)
            self._end = self._clock + left
        self._steps, self._since, self._seconds = 0, self._clock, 2 * self._seconds

    def _tick(self):
        now = time.perf_counter()
        self._clock, self._last = self._clock + now - self._last, now
