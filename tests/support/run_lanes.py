"""Runs the suite in two lanes side by side: `python tests/support/run_lanes.py [pytest arguments]`.

Tests of whole processes mostly wait, all others compute: together they share two cores well. What
the second lane says is shown when both are over. A shell's `&` would not do: it has the background
ignore SIGINT, and tests send that.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

LANES = (["tests/process"], ["tests/core", "tests/repo", "tests/sidecar"])


def main() -> int:
    """The first exit status that is not 0, if any."""
    shown, kept = ([sys.executable, "-m", "pytest", *lane, *sys.argv[1:]] for lane in LANES)
    with tempfile.TemporaryFile() as output:
        second = subprocess.Popen(kept, stdout=output, stderr=subprocess.STDOUT)
        try:
            first_status = subprocess.run(shown, check=False).returncode
            second_status = second.wait()
        finally:
            second.kill()
            second.wait()
        output.seek(0)
        sys.stdout.flush()
        sys.stdout.buffer.write(output.read())
    return first_status or second_status


if __name__ == "__main__":
    sys.exit(main())
