"""The entry point: an interrupt ends the command in good order from the first import on.

Importing this loads nothing that takes time.
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line with the arguments of the process; always leaves by SystemExit."""
    try:
        from kvformat.cli import output
        from kvformat.cli.app import app

        output.prepare_streams()
        app(prog_name="kvformat")
    except KeyboardInterrupt:
        # Before the commands took over. What is imported half may not work: this says the same without it.
        if "--json" in sys.argv[1 : sys.argv.index("--") if "--" in sys.argv else None]:
            sys.stdout.write(_AS_JSON)
        sys.stderr.write("interrupted: stopped on request\n")
        sys.exit(130)


_AS_JSON = """{
  "ok": false,
  "error": {
    "code": "interrupted",
    "message": "stopped on request"
  }
}
"""
