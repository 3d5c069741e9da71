"""How every command ends: one line on standard error, JSON where it was asked for, one exit code."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TextIO

import typer
from typer.core import TyperGroup

from kvformat.cli import output
from kvformat.cli.naming import in_options, options_of
from kvformat.codes import CODES
from kvformat.errors import KVFormatError, KVFormatWarning, UsageError, make_error
from kvformat.storage.faults import translate

__all__ = ["EXIT_CODES", "FAILED", "FAULTS", "INTERRUPTED", "USAGE", "Commands", "exit_code", "looking_at_prepared"]

FAULTS = 1
USAGE = 2
FAILED = 3
INTERRUPTED = 130
# The first line keeps the help formatter from joining the others.
EXIT_CODES = """\b
Exit codes:
  0    fine, warnings included
  1    faults or differences were found in a dataset
  2    the command line makes no sense
  3    the operation failed; nothing found at a location included
  130  interrupted
"""
# Commands that look at datasets: a fault there is what they found, not their own failure.
_LOOKING = frozenset({"check-documents", "diff", "inspect", "status", "verify"})


class _Call(NamedTuple):
    """What is known of a call before its arguments are parsed."""

    as_json: bool


def exit_code(error: KVFormatError, *, looking: bool) -> int:
    """Exit code for an error: USAGE, FAULTS (what a command that looks at datasets found in one) or FAILED."""
    if isinstance(error, UsageError):
        return USAGE
    return FAULTS if looking and CODES[error.code].kind == "reader" else FAILED


@contextmanager
def looking_at_prepared(*, as_json: bool, path: str | None = None) -> Iterator[None]:
    """A block that looks at a plan or documents file, and at nothing else, or else at ``path``.

    Their errors end the command with other codes than a dataset's: of that, E002 is a file that it lacks, here nothing
    is there at all. E307 is what was found in it.
    """
    try:
        yield
    except KVFormatError as error:
        if path is not None and error.path != path:
            raise
        output.report(error, as_json=as_json)
        codes = {"E002": FAILED, "E307": FAULTS}
        raise typer.Exit(codes.get(error.code, exit_code(error, looking=True))) from None


class Commands(TyperGroup):
    """The group of all commands, with one way to report what went wrong."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,  # noqa: FBT001, FBT002 - the signature of the base class
        windows_expand_args: bool = True,  # noqa: FBT001, FBT002
        **extra: Any,
    ) -> Any:
        """Parse, run and report; leaves by SystemExit unless ``standalone_mode`` is False, which returns the code."""
        given = list(sys.argv[1:] if args is None else args)
        as_json = "--json" in given[: given.index("--") if "--" in given else None]
        try:
            with _warnings_as_lines():
                result = super().main(
                    given,
                    prog_name,
                    complete_var,
                    standalone_mode=False,
                    windows_expand_args=windows_expand_args,
                    obj=_Call(as_json),
                    **extra,
                )
            code = result if isinstance(result, int) else 0
        except typer.Abort:
            code = _interrupted(as_json=as_json)
        except SystemExit as leaving:
            # Help whose reader went away, which the base class ends with 1.
            if not isinstance(leaving.__context__, BrokenPipeError):
                raise
            code = 0
        except Exception as error:
            # The class of a usage error moved between typer's releases; what it can do did not.
            describe = getattr(error, "format_message", None)
            if describe is None:
                raise
            command = getattr(getattr(error, "ctx", None), "command_path", None)
            if command is None:
                command = " ".join(["kvformat", *[name for name in given[:1] if name in self.commands]])
            message = f"{_in_plain_words(describe())}; see `{command} --help`"
            output.report(make_error("E081", message), as_json=as_json)
            code = USAGE
        if standalone_mode:
            sys.exit(code)
        return code

    def invoke(self, ctx: Any) -> Any:
        """Run the command; errors of kvformat and of the system end it with their code."""
        as_json = ctx.find_object(_Call).as_json
        try:
            return super().invoke(ctx)
        except KVFormatError as error:
            output.report(self._as_typed(error, ctx.invoked_subcommand), as_json=as_json)
            code = exit_code(error, looking=ctx.invoked_subcommand in _LOOKING)
        except KeyboardInterrupt:
            code = _interrupted(as_json=as_json)
        except OSError as error:
            output.report(translate(error, str(error.filename or "standard streams")), as_json=as_json)
            code = FAILED
        except Exception as error:
            if isinstance(error, typer.Exit | typer.Abort) or hasattr(error, "format_message"):
                raise
            # A defect of kvformat. Python would leave with 1, which here means that a fault was found.
            output.complain(traceback.format_exc().rstrip())
            output.report_other("internal", f"{type(error).__name__}: {error}", as_json=as_json)
            code = FAILED
        raise typer.Exit(code)

    def _as_typed(self, error: KVFormatError, name: str | None) -> KVFormatError:
        """A usage error with options in place of the parameters of functions."""
        if not isinstance(error, UsageError) or name is None or name not in self.commands:
            return error
        message = in_options(error.message, options_of(self.commands[name].params))
        return make_error(error.code, message, path=error.path, record=error.record, layer=error.layer)


def _in_plain_words(message: str) -> str:
    """What the parser says of a value, without the phrases of the library that validates it."""
    return message.rstrip(".").replace(": Value error, ", ": ").replace(": Input should be ", ": it must be ")


def _interrupted(*, as_json: bool) -> int:
    output.report_other("interrupted", "stopped on request", as_json=as_json)
    return INTERRUPTED


@contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Show kvformat's own warnings as one line each, always; those of other libraries as Python does."""
    with warnings.catch_warnings():
        shown = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if isinstance(message, KVFormatWarning):
                output.warn(message)
            else:
                shown(message, category, filename, lineno, file, line)

        warnings.filterwarnings("always", category=KVFormatWarning)
        warnings.showwarning = show
        yield
