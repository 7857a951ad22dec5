"""MIDI files as a corpus, installed as `txl_hf.midi`: `txl-prepare --corpus midi` imports `corpus` by its name.

It may import every wing of the package, by absolute imports; no wing imports it. MidiTok, symusic and mido are in the
extra `music`.
"""
