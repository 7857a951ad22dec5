"""Write music with a model that `txl-train` trained on `txl-prepare --corpus midi`.

    python examples/music/generate.py --model runs/music --output pieces --count 5 --bars 32
    python examples/music/generate.py --model runs/music --output more --prompt piece.mid --prompt-bars 4 --bars 64
    python examples/music/generate.py --model runs/music --output slow --key Dm --tempo 60 --wav

Each piece is a MIDI file, a picture of its notes (a piano roll), and with --wav a recording. The model remembers the
last --memory_length tokens however long the piece is. What may follow what is told by MidiTok's own graph of token
types (`MusicGrammar`), so that every file is valid, also of a model that has hardly learned. --key and --tempo begin a
piece; they are not held on to. --wav needs the program fluidsynth, of the distribution's packages; its sounds are
those of --soundfont, or else of the soundfont that these (`fluid-soundfont-gm`) or pretty_midi bring.
"""

import argparse
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from transformers import LogitsProcessorList, set_seed

from pieces import CHANNELS, MusicGrammar, bar_lines
from txl_hf import TransfoXLForCausalLM
from txl_hf.command_line import CommandParser, hub_or_folder, not_negative, one_line_errors
from txl_hf.data.loading import load_midi_tokenizer
from txl_hf.files import whole_folder
from txl_hf.midi.pieces import boundary_tokens, preprocess, read_score, spelled

with one_line_errors():
    import matplotlib
    import symusic
    from matplotlib.ticker import MaxNLocator
    from miditok import MusicTokenizer, TokSequence

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402 -- after the choice of what draws.

SHARPS = {"F": -1, "C": 0, "G": 1, "D": 2, "A": 3, "E": 4, "B": 5}
SOUNDFONTS = Path("/usr/share/sounds/sf2")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=hub_or_folder, required=True, help="folder of the model, with MidiTok's tokenizer"
    )
    parser.add_argument("--output", type=Path, required=True, help="a new folder")
    parser.add_argument("--count", type=int, default=1, help="pieces, written side by side (%(default)s)")
    parser.add_argument("--bars", type=int, default=32, help="of each piece, behind the prompt (%(default)s)")
    parser.add_argument("--prompt", type=Path, help="a MIDI file to go on from")
    parser.add_argument("--prompt_bars", type=int, help="bars of it (all)")
    parser.add_argument("--key", type=key_signature, help="such as C, F#, Bb, or Am for A minor")
    parser.add_argument("--tempo", type=float, help="quarter notes a minute")
    parser.add_argument("--memory_length", type=int, help="tokens remembered, at least 1 (the model's)")
    parser.add_argument("--temperature", type=not_negative, default=1.0, help="0: the likeliest token (%(default)s)")
    parser.add_argument("--top_p", type=float, default=0.95, help="(%(default)s)")
    parser.add_argument("--max_tokens", type=int, default=20_000, help="at most, of each piece (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--wav", action="store_true", help="record the pieces")
    parser.add_argument("--soundfont", type=Path, help="a file .sf2 or .sf3")
    options = parser.parse_args(arguments)
    for name in ("count", "bars", "prompt_bars", "memory_length", "max_tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name} must be at least 1")
    if not 0 < options.top_p <= 1:
        parser.error("--top_p must be above 0, and at most 1")
    if options.prompt and (options.key is not None or options.tempo is not None):
        parser.error("--key and --tempo begin a piece: leave them out with --prompt, which has its own")
    if options.prompt_bars and not options.prompt:
        parser.error("--prompt_bars is of --prompt, which is missing")
    if options.soundfont and not options.wav:
        parser.error("--soundfont is of --wav, which is missing")
    return options


# --- how a piece begins ----------------------------------------------------------------------------------------------


def key_signature(name: str) -> symusic.KeySignature:
    """A key as people write it, spelled as those that models learn from.

    Raises:
        argparse.ArgumentTypeError: it is none, or has more than seven accidentals.
    """
    match = re.fullmatch(r"([A-G])([#b]?)(m?)", name)
    sharps = 0
    if match is not None:
        letter, accidental, minor = match.groups()
        sharps = SHARPS[letter] + {"#": 7, "b": -7, "": 0}[accidental] - (3 if minor else 0)
    if match is None or abs(sharps) > 7:
        raise argparse.ArgumentTypeError(
            f"{name} must be a letter from A to G, then # or b, then m for minor, such as Bbm"
        )
    return symusic.KeySignature(0, spelled(sharps), 1 if minor else 0)


def heading(tokenizer: MusicTokenizer, key: "symusic.KeySignature | None", tempo: float | None) -> list[int]:
    """The tokens that come before the first note of a piece in this key and at this tempo.

    Its metre is 4/4, and what comes before the key is its tempo.
    """
    if key is None and tempo is None:
        return []
    config = tokenizer.config
    if (key is not None and not config.use_key_signatures) or (tempo is not None and not config.use_tempos):
        lacks = "tempos" if key is None else "key signatures"
        raise ValueError(f"the model's tokenizer has no {lacks}: leave out the option")
    if tempo is not None:
        tempos = tokenizer.tempos
        if not tempos.min() <= tempo <= tempos.max():
            raise ValueError(f"--tempo {tempo:g} is outside the model's {tempos.min():g} to {tempos.max():g}")
        nearest = tempos[np.abs(tempos - tempo).argmin()]
        if nearest != tempo:
            print(f"The model's tempo that is nearest to {tempo:g} is {nearest:g}.")
    score = symusic.Score(480)
    score.time_signatures.append(symusic.TimeSignature(0, 4, 4))
    score.tempos.append(symusic.Tempo(0, tempo or tokenizer.default_tempo))
    if key is not None:
        score.key_signatures.append(key)
    score.tracks.append(symusic.Track("one", int(next(p for p in config.programs if p >= 0))))
    score.tracks[0].notes.append(symusic.Note(0, 480, sum(config.pitch_range) // 2, 64))
    sequence = tokenizer.encode(score, encode_ids=False)
    # What is not asked for and comes last is left to the model.
    ends = ("Program", "Pitch") if key is not None else ("Program", "Pitch", "KeySig")
    sequence = sequence[: next(i for i, token in enumerate(sequence.tokens) if token.startswith(ends))]
    told = ["in 4/4"] if config.use_time_signatures else []
    if tempo is None and config.use_tempos:
        told.append(f"at {tokenizer.default_tempo:g} quarter notes a minute")
    if told:
        print(f"The music begins {' '.join(told)}, too.")
    if tokenizer.is_trained:
        tokenizer.encode_token_ids(sequence)
    return sequence.ids


def prompt_tokens(tokenizer: MusicTokenizer, path: Path, bars: int | None) -> list[int]:
    """The tokens of a file, or of its first bars."""
    try:
        score = read_score(path)
        for signature in score.key_signatures:
            signature.key = spelled(signature.key)
        kept, lost = preprocess(score, tokenizer)
    except (ValueError, OSError) as error:
        raise ValueError(f"--prompt {path} cannot be read: {error}") from None
    if tokenizer.score_has_time_signatures_not_in_vocab(score):
        print(f"{path.name} has a time signature that the model lacks: its bars are read as the model has them.")
    if lost:
        print(f"{path.name}: {lost} of {score.note_num()} notes are left out, which the model lacks or has already.")
    instruments = {track.program for track in kept.tracks if not track.is_drum}
    if len(instruments) > CHANNELS:
        print(f"{path.name} has {len(instruments)} instruments, and MIDI {CHANNELS} channels: players mix some up.")
    sequence = tokenizer.encode(kept, encode_ids=False, no_preprocess_score=True)
    starts = [i for i, token in enumerate(sequence.tokens) if token.startswith("Bar")]
    if bars is not None and bars < len(starts):
        sequence = sequence[: starts[bars]]
    if tokenizer.is_trained:
        tokenizer.encode_token_ids(sequence)
    return sequence.ids


# --- writing ---------------------------------------------------------------------------------------------------------


def write_tokens(
    model: TransfoXLForCausalLM, tokenizer: MusicTokenizer, prompt: list[int], options: argparse.Namespace
) -> list[list[int]]:
    """The tokens of each piece, from its first bar on."""
    begin, end = boundary_tokens(tokenizer)
    grammar = MusicGrammar(tokenizer)
    grammar.bars = options.bars + (grammar.read(prompt).bars if options.prompt else 0)
    ids = torch.tensor([[begin, *prompt]] * options.count, device=model.device)
    sampling: dict = {"do_sample": options.temperature > 0}
    if sampling["do_sample"]:
        sampling |= {"temperature": options.temperature, "top_p": options.top_p, "top_k": 0}
    written = model.generate(
        ids,
        # A prompt of any length is read segment by segment.
        prefill_chunk_size=model.config.tgt_len,
        attention_mask=torch.ones_like(ids),
        logits_processor=LogitsProcessorList([grammar]),
        **sampling,
        max_new_tokens=options.max_tokens,
        eos_token_id=end,
        pad_token_id=tokenizer.pad_token_id,
    )
    pieces = []
    for i, row in enumerate(written[:, 1:].tolist(), start=1):
        if end not in row:
            print(f"piece {i} is cut short, as it has no end within --max_tokens {options.max_tokens}.")
        pieces.append(grammar.whole(row[: row.index(end)] if end in row else row))
    return pieces


def to_score(tokenizer: MusicTokenizer, ids: list) -> symusic.Score:
    """The music that the tokens say; a note that sounds when it begins anew ends there, and two at once are one."""
    score = tokenizer.decode(TokSequence(ids=ids, are_ids_encoded=tokenizer.is_trained))
    for track in score.tracks:
        kept: list[symusic.Note] = []
        sounding: dict[int, symusic.Note] = {}
        for note in sorted(track.notes, key=lambda note: note.time):
            before = sounding.get(note.pitch)
            if before is not None and before.time == note.time:
                before.duration = max(before.duration, note.duration)
                continue
            if before is not None:
                before.duration = min(before.duration, note.time - before.time)
            sounding[note.pitch] = note
            kept.append(note)
        track.notes = kept
    return score


def draw(score: symusic.Score, path: Path, title: str):
    """A piano roll: pitches against bars, a colour for each instrument."""
    lines = bar_lines(score)
    bars = np.arange(1, 1 + len(lines))
    # The instruments' names stand beside the notes, one below the other.
    count = len(score.tracks)
    figure, axes = plt.subplots(figsize=(11, max(4, 0.3 * count)), layout="constrained")
    colours = plt.get_cmap("tab10" if count <= 10 else "tab20") if count <= 20 else plt.get_cmap("turbo", count)
    for i, track in enumerate(score.tracks):
        notes = track.notes.numpy()
        starts, ends = (np.interp(time, lines, bars) for time in (notes["time"], notes["time"] + notes["duration"]))
        # A little shorter, so that repeated notes can be told apart.
        axes.barh(notes["pitch"], 0.93 * (ends - starts), 0.9, starts, color=colours(i), label=track.name)
    axes.set_title(title, fontsize=15)
    axes.set_xlabel("bar", fontsize=14)
    axes.set_ylabel("MIDI pitch", fontsize=14)
    axes.tick_params(labelsize=13)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    if count:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=13)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def find_soundfont(given: Path | None) -> Path:
    """The sounds that are asked for, or that there are.

    Raises:
        ValueError: there are none, or nothing that plays them.
    """
    if shutil.which("fluidsynth") is None:
        raise ValueError("--wav needs the program fluidsynth: apt install fluidsynth, or brew install fluid-synth")
    if given is not None:
        if not given.is_file():
            raise ValueError(f"--soundfont {given} does not exist")
        # fluidsynth would play others, or silence.
        with given.open("rb") as file:
            begin = file.read(12)
        if (begin[:4], begin[8:]) != (b"RIFF", b"sfbk"):
            raise ValueError(f"--soundfont {given} is none: one begins with RIFF and sfbk")
        return given
    package = find_spec("pretty_midi")
    inside = list(Path(package.origin).parent.glob("*.sf2")) if package and package.origin else []
    found = [*sorted(SOUNDFONTS.glob("*.sf2")), *inside]
    if not found:
        raise ValueError('--wav needs a soundfont: name one with --soundfont, or pip install "txl-hf[music]"')
    return found[0]


def record(midi: Path, soundfont: Path):
    """A WAV file beside a MIDI file."""
    command = ["fluidsynth", "-n", "-i", "-q", "-r", "44100", "-F", midi.with_suffix(".wav"), soundfont, midi]
    run = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    # It ends well when it could not load a soundfont.
    if run.returncode != 0 or not midi.with_suffix(".wav").exists() or "SoundFont" in run.stderr:
        raise ValueError(f"fluidsynth made no sound of {midi.name} with {soundfont}: {run.stderr}")


def main(arguments: list[str] | None = None):
    options = parse_arguments(arguments)
    with one_line_errors():
        if options.output.exists():
            raise ValueError(f"--output {options.output} exists: choose another folder")
        soundfont = find_soundfont(options.soundfont) if options.wav else None
        tokenizer = load_midi_tokenizer(options.model)
        settings = {} if options.memory_length is None else {"mem_len": options.memory_length}
        if options.prompt:
            prompt = prompt_tokens(tokenizer, options.prompt, options.prompt_bars)
        else:
            prompt = heading(tokenizer, options.key, options.tempo)
        model = TransfoXLForCausalLM.from_pretrained(options.model, **settings).eval()
        if model.config.mem_len == 0:
            # Then `generate` reads the whole piece again for each token.
            raise ValueError(
                f"{options.model} has mem_len=0: say by --memory_length how much of a piece is remembered"
            )
        model.to(torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu")
        set_seed(options.seed)
        with whole_folder(options.output) as folder:
            for i, ids in enumerate(write_tokens(model, tokenizer, prompt, options), start=1):
                score = to_score(tokenizer, ids)
                score.dump_midi(folder / f"piece-{i}.mid")
                draw(score, folder / f"piece-{i}.png", f"piece {i}")
                if soundfont is not None:
                    record(folder / f"piece-{i}.mid", soundfont)
                seconds = score.to("second").end()
                print(f"piece {i}: {len(ids):,} tokens, {score.note_num():,} notes, {seconds:.0f} s of music")
    print(f"{options.output} has {options.count} piece(s); the model remembered {model.config.mem_len} tokens.")


if __name__ == "__main__":
    main()
