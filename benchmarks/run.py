"""Runs every benchmark and prints one table: `python -m benchmarks.run [--quick] [NAME ...]`.

Each `bench_*.py` prints one JSON object with `--json`; a target without a value says why.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def main() -> int:
    """Exit code 1 when a benchmark could not run; a missed target is no error."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="benchmarks, without bench_ (default: all)")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    args = parser.parse_args()
    scripts = sorted(HERE.glob("bench_*.py"))
    if args.names:
        scripts = [s for s in scripts if s.stem.removeprefix("bench_") in args.names]
    failed = [s.stem for s in scripts if not _run(s, args.quick)]
    if failed:
        print("could not run:", ", ".join(failed), file=sys.stderr)
    return 1 if failed else 0


def _run(script: Path, quick: bool) -> bool:
    command = [sys.executable, "-m", f"benchmarks.{script.stem}", "--json"]
    done = subprocess.run(
        command + (["--quick"] if quick else []), stdout=subprocess.PIPE, cwd=HERE.parent
    )
    if done.returncode != 0:
        return False
    result: dict[str, Any] = json.loads(done.stdout)
    print(f"{result['bench']}  ({result['hardware']})")
    for t in result["targets"]:
        value = "not measured" if t["value"] is None else f"{t['value']:.4g} {t['unit']}"
        sign = "<=" if t["better"] == "lower" else ">="
        met = {True: "met", False: "missed", None: "unknown"}[t["met"]]
        beside = ", ".join(f"{k} {v:.4g}" for k, v in t.get("beside", {}).items() if v is not None)
        print(f"  {t['name']:<28} {value:>16}  {sign} {t['target']:g}  {met:<8} {beside}")
    return True


if __name__ == "__main__":
    sys.exit(main())
