"""How options are typed, and what is said of those that do not exist, in the parser that the commands share."""

import argparse
import multiprocessing
import os
import signal
import socket
import subprocess
import sys

import pytest

from txl_hf import commands
from txl_hf.command_line import CommandParser, check_files, hub_or_folder, interrupted_by_signals, one_line_errors
from txl_hf.commands.recipe import parse_arguments
from txl_hf.commands.train_lm import load_data
from txl_hf.files import disk_errors


@pytest.fixture
def parser():
    parser = CommandParser(prog="command")
    parser.add_argument("--memory_length", type=int)
    parser.add_argument("--max-new-tokens", type=int)
    parser.add_argument("--prompt")
    return parser


@pytest.mark.parametrize("typed", ["--memory_length", "--memory-length", "--memory-l", "--memory"])
def test_options_are_typed_with_hyphens_or_underscores(parser, typed):
    assert parser.parse_args([typed, "3"]).memory_length == 3
    assert parser.parse_args([f"{typed}=4"]).memory_length == 4


@pytest.mark.parametrize("typed", ["--max-new-tokens", "--max_new_tokens", "--max_new-tokens", "--max_new"])
def test_also_those_that_are_declared_with_hyphens(parser, typed):
    assert parser.parse_args([typed, "3", "--prompt=--not_an-option"]).max_new_tokens == 3
    assert parser.parse_args(["--prompt=--not_an-option"]).prompt == "--not_an-option"


@pytest.mark.parametrize(
    "name", ["./model", "../model", ".model", "/model", "~/model", "runs/model", "a/b/c", "model/", "runs\\model"]
)
def test_a_path_that_leads_nowhere_is_no_name_on_the_hub(name, tmp_path, monkeypatch, parser):
    (tmp_path / "runs" / "other").mkdir(parents=True)
    (tmp_path / "runs" / "other" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    parser.add_argument("--model", type=hub_or_folder)
    with pytest.raises(SystemExit) as end:
        parser.parse_args(["--model", name])
    assert end.value.code == f"error: --model {name} does not exist: give a folder, or a name on the Hub"


@pytest.mark.parametrize("name", ["gpt2", "owner/model", "runs", "runs/", "./runs", "runs/model.v2", "runs/model"])
def test_what_is_there_and_what_may_be_on_the_hub_passes(name, tmp_path, monkeypatch):
    (tmp_path / "runs" / "model.v2").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub_or_folder(name) == name


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FileNotFoundError(2, "No such file or directory", "a.txt"), "a.txt: No such file or directory"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (FileNotFoundError("--data a does not exist"), "--data a does not exist"),
        (ValueError("two\nlines"), "two lines"),
    ],
)
def test_an_error_is_one_line_without_numbers_of_the_system(error, said):
    with pytest.raises(SystemExit) as end, one_line_errors():
        raise error
    assert end.value.code == f"error: {said}"


@pytest.mark.parametrize("error", [multiprocessing.TimeoutError, BrokenPipeError, ValueError])
def test_an_interrupt_that_became_an_error_ends_as_one(error):
    """As datasets makes of it what its processes have not returned by then."""

    def wait():
        try:
            raise KeyboardInterrupt
        finally:
            raise error

    with pytest.raises(SystemExit) as end, one_line_errors():
        wait()
    assert end.value.code == "stopped"


def test_a_reader_that_ends_ends_the_command_in_silence():
    """`txl-generate … | head -1`; standard output is a pipe that nobody reads."""
    code = "from txl_hf.command_line import one_line_errors\nwith one_line_errors():\n    print('x', flush=True)"
    read, write = os.pipe()
    os.close(read)
    process = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (process.returncode, process.stderr) == (1, "")


def test_what_a_user_cannot_mend_is_raised():
    with pytest.raises(multiprocessing.TimeoutError), one_line_errors():
        raise multiprocessing.TimeoutError


def test_what_a_disk_refuses_is_named(tmp_path):
    """The system's answer to a write has no name."""
    with pytest.raises(SystemExit) as end, one_line_errors(), disk_errors(tmp_path / "log.jsonl"):
        raise OSError(28, "No space left on device")
    assert end.value.code == f"error: {tmp_path / 'log.jsonl'}: No space left on device"
    with pytest.raises(FileNotFoundError) as missing, disk_errors(tmp_path):
        (tmp_path / "other").read_text()
    assert missing.value.filename == str(tmp_path / "other")


def test_a_folder_that_is_no_tokenised_text_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"--data {tmp_path} is no folder of txl-prepare, which writes one"):
        load_data(tmp_path)


@pytest.mark.parametrize("option", ["output", "plot"])
def test_a_file_that_cannot_be_written_is_refused_before_any_work(option, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "mine").mkdir()
    options = argparse.Namespace(data=tmp_path, output=None, plot=None)
    setattr(options, option, tmp_path / "mine" / "new" / "a.png")
    check_files(options)
    assert not (tmp_path / "mine" / "new").exists()
    setattr(options, option, tmp_path / "file" / "a.png")
    with pytest.raises(OSError, match=r"a\.png cannot be written, as .*file is no folder"):
        check_files(options)
    setattr(options, option, tmp_path / "mine" / "a.png")
    # Who runs as root may write everywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path / "mine")
    with pytest.raises(OSError, match=r"a\.png cannot be written, as .*mine may not be written to"):
        check_files(options)


@pytest.mark.parametrize("typed", ["--mem_lenn", "--mem-lenn"])
def test_the_parser_of_recipes_reads_both_too(typed, tmp_path, capsys):
    (tmp_path / "recipe.yaml").write_text("max_steps: 1\n")
    with pytest.raises(SystemExit):
        parse_arguments([str(tmp_path / "recipe.yaml"), "--smoke", typed, "3"])
    assert capsys.readouterr().err == f"error: unrecognized arguments: {typed} 3\n"
    read = parse_arguments([str(tmp_path / "recipe.yaml"), "--smoke", typed[:-1], "3"])
    assert read.config["mem_len"] == 3


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("127.0.0.1", "error: --port {port} of 127.0.0.1 is in use: choose another, or 0 for any that is free"),
        # An address kept for documentation, which no machine has.
        ("192.0.2.1", "error: --host 192.0.2.1 --port {port}: Cannot assign requested address"),
    ],
)
def test_an_address_where_nothing_can_listen_is_said_before_a_model_is_looked_for(host, said):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit) as end:
        port = taken.getsockname()[1]
        commands.serve(["no-such-model", "--host", host, "--port", str(port)])
    assert end.value.code.startswith(said.format(port=port))


def test_commands_begin_where_a_system_has_no_signal_of_a_lost_terminal(monkeypatch):
    """As Windows."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.delattr(signal, "SIGHUP")
    with interrupted_by_signals():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
