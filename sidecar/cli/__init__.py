"""The command `ntp-sidecar`: a door that is light, so that Ctrl-C is heard at once.

Loading the commands takes about a second. What interrupts that, or a command, ends in exit code 130
and no traceback.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    is_demo = args[:1] == ["demo"]
    name = "sidecar.demo.command" if is_demo else "sidecar.cli.commands"
    try:
        code: int = importlib.import_module(name).main(args[1:] if is_demo else args)
    except KeyboardInterrupt:
        return INTERRUPTED
    return code
