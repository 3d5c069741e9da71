"""``python -m kvformat``: the command line."""

from __future__ import annotations

from kvformat.cli.main import main

if __name__ == "__main__":
    main()
