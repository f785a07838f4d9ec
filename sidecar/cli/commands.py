"""All commands but the demo. Answers go to stdout, errors to stderr; exit code 2 is bad input."""

from __future__ import annotations

import argparse
import errno
import json
import logging
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from ntp_core.errors import InvalidInput
from sidecar import __version__
from sidecar.announce import check_outlets
from sidecar.config import Config, ConfigError, Loaded, flag_of, load
from sidecar.daemon import Daemon, run_until_signal
from sidecar.run import RunRequest, run
from sidecar.status import NoAnswer, fetch_status, find_url, status_lines
from sidecar.top import run_top
from sidecar.web.server import ServeError
from sidecar.wire.holders import RunDirInUse
from sidecar.wire.ring import BadJobId, check_job_id

BAD_INPUT = 2
UNAVAILABLE = 1


def main(args: Sequence[str]) -> int:
    """Run one command; returns the exit code."""
    own, cmd = _split(list(args))
    parsed = _parser().parse_args(own)
    try:
        match parsed.command:
            case "run":
                return _run(parsed, cmd)
            case "daemon":
                return _daemon(parsed)
            case "status":
                return _status(parsed)
            case "top":
                return _top(parsed)
            case _:
                return _config(parsed)
    except (ConfigError, InvalidInput, ServeError, BadJobId, RunDirInUse) as error:
        return _refuse(str(error), BAD_INPUT)
    except NoAnswer as error:
        return _refuse(str(error), UNAVAILABLE)
    except OSError as error:  # the machine failed, not the input
        where = f"{error.filename}: " if error.filename else ""
        return _refuse(f"{where}{error.strerror or error}", UNAVAILABLE)


def _split(args: list[str]) -> tuple[list[str], list[str]]:
    """What is ours, and the command behind the first `--`."""
    if "--" not in args:
        return args, []
    at = args.index("--")
    return args[:at], args[at + 1 :]


def _refuse(message: str, code: int) -> int:
    print(f"ntp-sidecar: {message}", file=sys.stderr)
    return code


def _run(args: argparse.Namespace, cmd: list[str]) -> int:
    if not cmd:
        return _refuse("no command to run; put it after '--': ntp-sidecar run -- CMD", BAD_INPUT)
    if args.job_id:
        check_job_id(args.job_id)
    return run(RunRequest(cmd=cmd, job_id=args.job_id or "", loaded=_load(args)))


def _daemon(args: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.WARNING, format="ntp-sidecar: %(message)s")
    loaded = _load(args)
    run_dir = _run_dir(args.run_dir)
    job_id = check_job_id(args.job_id or run_dir.name)
    if args.parent_pid is not None and args.parent_pid != os.getppid():
        return _refuse(
            f"--parent-pid {args.parent_pid} is not the parent of this process ({os.getppid()}); "
            "leave it out",
            BAD_INPUT,
        )
    daemon = _open_daemon(loaded, run_dir, job_id)

    def tell(ready: Daemon) -> None:
        print(f"ntp-sidecar: page {ready.url}", flush=True)

    run_until_signal(daemon, tell, args.parent_pid)
    return 0


def _run_dir(text: str) -> Path:
    """The directory to watch. It may be made later; what is there now must be one."""
    path = Path(text).absolute() if text else None
    if path is None or (path.exists() and not path.is_dir()):
        raise ConfigError(f"--run-dir is {text!r}; give the job's run directory")
    return path


def _open_daemon(loaded: Loaded, run_dir: Path, job_id: str | None) -> Daemon:
    """The daemon. When nobody chose a port and the usual one is taken, any free one will do: a
    second job on a node must not fail for that."""
    try:
        return Daemon(loaded.config, run_dir, job_id=job_id)
    except ServeError as error:
        cause = error.__cause__
        is_taken = isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE
        if not is_taken or loaded.sources["port"] != "default":
            raise
        return Daemon(replace(loaded.config, port=0), run_dir, job_id=job_id)


def _status(args: argparse.Namespace) -> int:
    status = fetch_status(args.url or find_url())
    if args.json:
        print(json.dumps(status, indent=2))
    else:
        print("\n".join(status_lines(status)))
    return 0


def _top(args: argparse.Namespace) -> int:
    return run_top(
        args.url or find_url(),
        once=args.once,
        as_json=args.json,
        token=os.environ.get("NTP_SIDECAR_TOKEN"),
    )


def _config(args: argparse.Namespace) -> int:
    loaded = _load(args)
    check_outlets(loaded.config)
    rows = loaded.rows()
    if args.json:
        print(json.dumps({"settings": rows}, indent=2))
        return 0
    width = max(len(r["name"]) for r in rows)
    for r in rows:
        shown = '""' if r["value"] == "" else r["value"]
        print(f"{r['name']:<{width}} = {shown!s:<14} ({r['source']})  {r['help']}")
    return 0


def _load(args: argparse.Namespace) -> Loaded:
    flags = {f.name: getattr(args, f.name) for f in fields(Config)}
    file = Path(args.config_file) if args.config_file else None
    return load(flags, os.environ, file)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ntp-sidecar",
        description="Watches allocation changes and silent degradation of training jobs.",
        epilog="example: ntp-sidecar run -- torchrun --nproc-per-node 4 train.py",
    )
    parser.add_argument("--version", action="version", version=f"ntp-sidecar {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    p = _command(commands, "run", "run a command and watch it", "run -- torchrun train.py")
    p.usage = "ntp-sidecar run [options] -- CMD"
    p.add_argument("--job-id", help="name of the job; default: one is made")
    _add_settings(p)
    p = _command(
        commands, "daemon", "watch a run directory", "daemon --run-dir /dev/shm/nutp-0/my-job"
    )
    p.add_argument("--run-dir", required=True, help="the job's run directory")
    p.add_argument("--job-id", help="name of the job; default: the directory's name")
    p.add_argument("--parent-pid", type=_pid, help="end when this parent and its job are gone")
    _add_settings(p)
    p = _command(commands, "status", "what a running sidecar says", "status --json")
    p.add_argument("--url", help="address of the sidecar; default: the one on this node")
    p.add_argument("--json", action="store_true", help="print JSON")
    p = _command(commands, "top", "live table of the ranks", "top --url http://127.0.0.1:9440")
    p.add_argument("--url", help="address of the sidecar; default: the one on this node")
    p.add_argument("--once", action="store_true", help="print one table and end")
    p.add_argument("--json", action="store_true", help="print one snapshot as JSON and end")
    p = _command(commands, "config", "settings in force and their source", "config --port 9500")
    p.add_argument("--json", action="store_true", help="print JSON")
    _add_settings(p)
    _command(commands, "demo", "an uneven job with faults, and its sidecar", "demo")
    return parser


def _pid(text: str) -> int:
    if not re.fullmatch("[0-9]{1,10}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a process id")
    return int(text)


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    text: str,
    example: str,
) -> argparse.ArgumentParser:
    return commands.add_parser(
        name, help=text, description=text, epilog=f"example: ntp-sidecar {example}"
    )


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """One flag for each setting. Values stay text: `load` checks all sources alike."""
    group = parser.add_argument_group("settings (also NTP_SIDECAR_<NAME>, or a TOML file)")
    group.add_argument("--config", dest="config_file", metavar="FILE", help="TOML file")
    for f in fields(Config):
        text = f.metadata["help"]
        if f.metadata["secret"]:
            text += "; better by the environment: flags show in process lists"
        default = "" if f.default == "" else f" (default {f.default})"
        group.add_argument(flag_of(f.name), dest=f.name, metavar="VALUE", help=text + default)
