"""Bars of a piece of music, and which token may follow which, by MidiTok's own graph of token types."""

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor

from txl_hf.command_line import one_line_errors
from txl_hf.midi.pieces import last_end

with one_line_errors():
    from miditok import MusicTokenizer, TokSequence
    from symusic import Score

# Of MIDI, each with an instrument, without that of drums.
CHANNELS = 15
ONCE = ("KeySig", "Tempo", "TimeSig")
PITCHES = ("Pitch", "PitchDrum")
DRUMS = "-1"


def bar_lines(score: Score) -> np.ndarray:
    """Where each bar begins, and where the last one with a note ends, in ticks: (bars + 1,), of at least one bar.

    Until the first metre it is 4/4; a bar in which it changes ends there, but for the last.
    """
    whole = 4 * score.ticks_per_quarter
    # One of no parts, or of parts of no length, which a broken file may have, says nothing.
    metres = [metre for metre in score.time_signatures if metre.numerator and metre.denominator]
    lengths = [whole * metre.numerator / metre.denominator for metre in metres]
    end = last_end(score)
    lines = [0.0]
    for length, until in zip([whole, *lengths], [*(metre.time for metre in metres), end], strict=True):
        while lines[-1] < min(until, end):
            # The last bar is a whole one, whenever its last note ends.
            following = lines[-1] + length
            lines.append(following if until >= end else min(following, until))
    return np.array(lines)


@dataclass(frozen=True)
class Place:
    """Where a piece is.

    Attributes:
        kind: the type of the last token.
        bars: bars begun.
        position: the last position in the bar; -1 at its beginning.
        positions: how many the bar has.
        program: the instrument of the next note.
        programs: all instruments so far but drums.
        played: (instrument, pitch) of the notes that begin at this time.
        told: types of `ONCE` that were said of this time.
    """

    kind: str
    positions: int
    bars: int = 0
    position: int = -1
    program: str = "0"
    programs: frozenset = frozenset()
    played: frozenset = frozenset()
    told: frozenset = frozenset()


class MusicGrammar(LogitsProcessor):
    """Lets `generate` choose only tokens that continue a piece.

    Types follow one another as in the tokenizer's `tokens_types_graph`; beside that, time goes forward, positions lie
    within their bar, drums alone are drums, no note begins twice at once, each instrument can have a channel of MIDI,
    and a piece begins with a bar and ends after a complete event. Of joined tokens (BPE) every part has to fit. A row
    that has ended is padded.

    Args:
        tokenizer: MidiTok's, of tokens with bars, such as REMI's.
        bars: end after so many bars, not before; those of a prompt count. None: the model ends the piece.

    Raises:
        ValueError: the tokens have no bars, or are compound ones, or not every bar begins with one `Bar` token, or
            some tell a pitch by its interval from another.
    """

    def __init__(self, tokenizer: MusicTokenizer, bars: int | None = None):
        if tokenizer.is_multi_voc or "Bar" not in tokenizer.tokens_types_graph:
            raise ValueError(f"{type(tokenizer).__name__} has compound tokens or none for bars: use REMI")
        if tokenizer.config.use_rests or tokenizer.config.additional_params.get("use_bar_end_tokens"):
            # Rests pass over bars, and what ends a bar is a `Bar` token too.
            raise ValueError("the tokenizer must have use_rests=False and use_bar_end_tokens=False: bars are counted")
        if tokenizer.config.use_pitch_intervals:
            # What a note is depends on the notes before it, and may be none.
            raise ValueError("the tokenizer must have use_pitch_intervals=False: each note is told by its pitch")
        self.tokenizer, self.bars = tokenizer, bars
        self.graph = tokenizer.tokens_types_graph
        self.resolution = tokenizer.config.max_num_pos_per_beat
        self.parts = [self._parts(index) for index in range(len(tokenizer))]
        self.end = [parts == [("EOS", "None")] for parts in self.parts].index(True)
        # How many there are of each kind.
        self.pitches = Counter(parts[0][0] for parts in self.parts if len(parts) == 1)
        self.closing = torch.tensor([bool(parts) and parts[0][0] in ("Bar", "EOS") for parts in self.parts])
        self.begin = Place("BOS", 4 * self.resolution)
        self._rows: list[tuple[Tensor, Place]] = []
        self._masks: dict[Place, Tensor] = {}

    def _parts(self, index: int) -> list[tuple[str, str]]:
        """Type and value of each of the tokens that are joined in one."""
        sequence = TokSequence(ids=[index], are_ids_encoded=self.tokenizer.is_trained)
        self.tokenizer.decode_token_ids(sequence)
        self.tokenizer.complete_sequence(sequence)
        pairs = (token.split("_", 1) for token in sequence.tokens)
        return [(kind, value) for kind, value in pairs]

    def _pitch(self, program: str) -> str:
        """The names of its pitches."""
        return PITCHES[program == DRUMS and self.tokenizer.config.use_pitchdrum_tokens]

    # --- one token after the other -----------------------------------------------------------------------------------

    def complete(self, place: Place) -> bool:
        """Whether a piece may end here: where another bar could begin, once there has been one."""
        return place.bars > 0 and "Bar" in self.graph[place.kind]

    def _last_bar(self, place: Place) -> bool:
        return self.bars is not None and place.bars >= self.bars

    def may_follow(self, place: Place, kind: str, value: str) -> bool:
        """Whether a token may stand at this place."""
        last_bar = self._last_bar(place)
        if kind == "EOS":
            return self.complete(place) and (self.bars is None or last_bar)
        if place.kind == "BOS":
            return kind == "Bar"
        if kind in ("BOS", "PAD", "MASK") or kind not in self.graph[place.kind]:
            return False
        if kind == "Bar":
            return not last_bar
        if kind == "Position":
            return place.position < int(value) < place.positions
        if kind == "TimeSig" and place.position >= 0:
            # Positions may have been said that a bar of another metre has not.
            return False
        if kind in ONCE:
            return kind not in place.told
        if kind == "Program":
            has_channel = value == DRUMS or value in place.programs or len(place.programs) < CHANNELS
            return (
                has_channel and sum(value == program for program, _ in place.played) < self.pitches[self._pitch(value)]
            )
        if kind in PITCHES:
            return kind == self._pitch(place.program) and (place.program, value) not in place.played
        return True

    def advance(self, place: Place, kind: str, value: str) -> Place:
        """The place behind a token, whether it may stand there or not; nothing leads on from the end."""
        if place.kind == "EOS":
            return place
        place = replace(place, kind=kind)
        if kind == "Bar":
            return replace(place, bars=place.bars + 1, position=-1, played=frozenset(), told=frozenset())
        if kind == "Position":
            place = replace(place, position=int(value))
            # The first position is where the bar begins, and so the same time.
            return place if place.position == 0 else replace(place, played=frozenset(), told=frozenset())
        if kind == "TimeSig":
            place = replace(place, positions=int(value.split("/")[0]) * self.resolution)
        if kind in ONCE:
            return replace(place, told=place.told | {kind})
        if kind == "Program":
            return replace(place, program=value, programs=place.programs | ({value} - {DRUMS}))
        if kind in PITCHES:
            return replace(place, played=place.played | {(place.program, value)})
        return place

    def read(self, ids: Tensor | list[int], place: Place | None = None) -> Place:
        """The place behind tokens of the model."""
        place = place or self.begin
        for index in ids:
            for kind, value in self.parts[int(index)]:
                place = self.begin if kind == "BOS" else self.advance(place, kind, value)
        return place

    def whole(self, ids: list[int]) -> list[int]:
        """The tokens without an event at their end that was cut off."""
        place, end = self.begin, 0
        for i, index in enumerate(ids):
            place = self.read([index], place)
            if self.complete(place):
                end = i + 1
        return ids[:end]

    # --- all tokens at once ------------------------------------------------------------------------------------------

    def mask(self, place: Place) -> Tensor:
        """(V,) bool: which tokens may stand at this place."""
        if place not in self._masks:
            if len(self._masks) > 10_000:
                self._masks.clear()
            self._masks[place] = torch.tensor([self._fits(place, parts) for parts in self.parts])
        return self._masks[place]

    def _fits(self, place: Place, parts: list[tuple[str, str]]) -> bool:
        if place.kind == "EOS":
            return parts == [("PAD", "None")]
        if not parts:
            # An id that says nothing, as some of a vocabulary of joined tokens do.
            return False
        for kind, value in parts:
            if not self.may_follow(place, kind, value):
                return False
            place = self.advance(place, kind, value)
        return True

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(B, L) tokens so far and (B, V) scores of the next → the scores, -inf for what may not be next."""
        rows, known = [], self._rows
        for i, row in enumerate(input_ids.cpu()):
            read, place = known[i] if i < len(known) else (row[:0], self.begin)
            if not torch.equal(read, row[: len(read)]):
                read, place = row[:0], self.begin
            rows.append((row, self.read(row[len(read) :], place)))
        self._rows = rows
        allowed = torch.stack([self.mask(place) for _, place in rows])
        if ending := [i for i, (_, place) in enumerate(rows) if self._last_bar(place) and self.complete(place)]:
            # What would begin another bar ends the piece: otherwise the last bar would be filled until nothing fits.
            scores = scores.clone()
            scores[ending, self.end] = scores[ending][:, self.closing.to(scores.device)].logsumexp(1)
        return scores.masked_fill(~allowed.to(scores.device), -torch.inf)
