"""The HTTP server of `txl-serve`, installed as `txl_hf.serve`: a program that is written with the library.

It imports public names of `txl_hf`, and the options, loading and conversations that the library's own commands use;
only `txl_hf.commands` starts it, by name.
"""
