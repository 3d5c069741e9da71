"""Messages of functions in the words of the command line: parameters as the options that set them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["in_options", "options_of"]

# Parameters that the option is not named after.
_OTHERS = {
    "columns": "--column",
    "num_cpus": "--ray-cpus",
    "num_gpus": "--ray-gpus",
    "num_workers": "--ray-workers",
    "shard_nbytes": "--shard-size",
    "storage_options": "--storage-option",
    "too_long": "--skip-too-long",
}


def options_of(parameters: Iterable[Any]) -> dict[str, str]:
    """The long option by parameter of the functions behind a command, of the command's own parameters."""
    found = {one.name: next((opt for opt in one.opts if opt.startswith("--")), None) for one in parameters}
    options = {name: option for name, option in found.items() if option is not None}
    there = set(options.values())
    return options | {name: option for name, option in _OTHERS.items() if option in there}


def in_options(message: str, options: Mapping[str, str]) -> str:
    """A message with options in place of parameters.

    A name with an underscore is a parameter wherever it stands. One without is a word as well, and taken for the
    parameter only at the start of what is required of it, after "give", and before an equals sign.
    """
    for name in sorted(options, key=len, reverse=True):
        whole = rf"(?<![\w.\-/'\"`=]){name}"
        message = re.sub(rf"{whole}=(?=\S)", f"{options[name]} ", message)
        if "_" in name:
            message = re.sub(rf"{whole}(?![\w./(=])", options[name], message)
        else:
            message = re.sub(rf"^{name}(?= (?:is|must) )|(?<=\bgive ){name}\b(?!-)", options[name], message)
    return message
