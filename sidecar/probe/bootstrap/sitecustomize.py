# ruff: noqa: PTH100, PTH120 - pathlib would slow the start of every Python of the job
"""Runs at the start of every Python that inherits our PYTHONPATH; waits for torch, then hooks it.

Standard library only, and little of it: this runs in every helper process of a job, in any virtual
environment and any Python. It imports no torch, decides nothing about ranks (that is
`sidecar.probe.attach`), and whatever fails here leaves the program as if we were not there.
A `sitecustomize` that this file shadows is run first, as Python itself would have.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # the name that type checkers know, without importing typing
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import NoReturn

_HERE = os.path.dirname(os.path.abspath(__file__))
_PROJECT = os.path.dirname(os.path.dirname(os.path.dirname(_HERE)))


def _say(what: str, error: Exception) -> None:
    sys.stderr.write(f"ntp-sidecar: {what}: {type(error).__name__}: {error}\n")


def _run_shadowed() -> None:
    """Import the sitecustomize that would have been found without this directory."""
    from importlib.machinery import PathFinder

    path = [p for p in sys.path if os.path.abspath(p or ".") != _HERE]
    spec = PathFinder.find_spec("sitecustomize", path)
    if spec is None or spec.loader is None:
        return
    from importlib.util import module_from_spec  # slow to import: only where it is needed

    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        _say(f"error in {spec.origin}", error)


def _arm() -> None:
    """Hook torch through the probe, from this project if the environment has none."""
    try:
        try:
            from sidecar.probe.attach import arm_torch
        except ModuleNotFoundError:
            if _PROJECT in sys.path:
                raise
            sys.path.append(_PROJECT)
            from sidecar.probe.attach import arm_torch
        arm_torch()
    except Exception as error:
        _say("this process is not watched", error)


class _TorchFinder:
    """Finds torch once, through the other finders, and calls `_arm` when its import is over."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        if cls in sys.meta_path:
            sys.meta_path.remove(cls)
        for finder in list(sys.meta_path):
            spec = finder.find_spec(name, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None:
                _call_after_import(spec)
                return spec
        return None


def _listen_to_exit() -> None:
    """Let the probe hear `sys.exit`, which is looked up before the rank it ends is one."""
    leave = sys.exit
    listeners: list[Callable[[object], None]] = []

    def exit(status: object = None, /) -> NoReturn:
        for listener in listeners:
            listener(status)
        leave(status)  # type: ignore[arg-type] # as it comes: the job's own errors stay its own

    exit.__module__, exit.__qualname__, exit.__doc__ = "sys", "exit", leave.__doc__
    exit.nutp_listeners = listeners  # type: ignore[attr-defined] # read by sidecar.probe.leaving
    sys.exit = exit


def _call_after_import(spec: ModuleSpec) -> None:
    loader = spec.loader
    if loader is None or not hasattr(loader, "exec_module"):
        return
    load = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        load(module)
        _arm()

    try:
        loader.exec_module = exec_module  # type: ignore[method-assign] # on this one instance
    except AttributeError as error:  # someone else's loader, which takes no attribute
        _say("this process is not watched", error)


_run_shadowed()
if (
    sys.version_info >= (3, 11)
    and os.environ.get("NTP_SIDECAR_RUN_DIR")
    and os.environ.get("NTP_SIDECAR_DISABLE") != "1"
):
    _listen_to_exit()
    sys.meta_path.insert(0, _TorchFinder)
