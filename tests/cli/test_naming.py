from __future__ import annotations

import pytest
import typer

from kvformat.cli.app import app
from kvformat.cli.naming import in_options, options_of

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("batch_size must be at least 1, found 0", "--batch-size must be at least 1, found 0"),
        ("shard_nbytes must be 1 to 2^48-1", "--shard-size must be 1 to 2^48-1"),
        ("leave out batch_tokens, order", "leave out --batch-tokens, order"),
        ("give rank and world_size, or set RANK", "give --rank and --world-size, or set RANK"),
        ("truncate is 99, but the model has 64 positions", "--truncate is 99, but the model has 64 positions"),
        ("no worker with num_cpus=4 and num_gpus=1 fits", "no worker with --ray-cpus 4 and --ray-gpus 1 fits"),
        ("weights=live|ema goes with a preset", "--weights live|ema goes with a preset"),
        # Words that are words, and names that are somebody's own.
        ("the model is of another plan, in rank order", "the model is of another plan, in rank order"),
        (
            "no record 'batch_size' in /data/key_stage/x.key_stage",
            "no record 'batch_size' in /data/key_stage/x.key_stage",
        ),
        ("--adapter-mode and --layers are given", "--adapter-mode and --layers are given"),
        ("token_ids of batch_sizes", "token_ids of batch_sizes"),
    ],
)
def test_parameters_are_named_as_they_were_typed(message: str, said: str) -> None:
    assert in_options(message, options_of(COMMANDS["extract"].params)) == said


def test_only_options_of_the_command_are_named() -> None:
    options = options_of(COMMANDS["copy"].params)
    assert "--spool" in options.values()
    assert in_options("batch_size is 1", options) == "batch_size is 1"


def test_a_usage_error_of_a_function_names_the_option(run, tmp_path) -> None:
    base = ["extract", "--model", "m", "--documents", "d", "--out", tmp_path / "o"]
    for given, said in (
        (["--rank", 3, "--world-size", 2], "give --rank and --world-size, or set RANK and WORLD_SIZE"),
        (["--world-size", 2], "give --rank, or set RANK"),
    ):
        result = run(*base, *given)
        assert (result.code, result.stdout) == (2, "")
        assert said in result.stderr
    assert "--rank" in run(*base, "--rank", 3, "--world-size", 2, "--json").json["error"]["message"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--engine", "no"], "Invalid value for '--engine': 'no' is not one of 'process', 'ray'"),
        (["--threads", "0"], "Invalid value for '--threads': it must be greater than or equal to 1"),
        (["--images=3"], "Option '--images' does not take a value"),
    ],
)
def test_what_the_parser_refuses_is_said_in_its_own_words(run, given: list[str], said: str) -> None:
    result = run("extract", "--model", "m", "--documents", "d", "--out", "o", *given)
    assert (result.code, result.stdout) == (2, "")
    assert result.stderr == f"error [E081]: {said}; see `kvformat extract --help`\n"
