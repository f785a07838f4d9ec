"""The training program under our launcher and under torchrun; bad input ends it in one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ntp_core.job import JobConfig
from ntp_core.proposal import FILE_NAME, Proposal
from ntp_core.observe import Reason
from ntp_core.runtime.inbox import STOP_FILE
from ntp_core.runtime.launch import LocalRanks
from tests.support.tiny_job import GROUPED, A, M, V, even, plan_of, train_config

TIMEOUT_S = 60.0
ROOT = Path(__file__).resolve().parents[2]
# Bytes are tokens here, so the vocabulary must be whole.
MODEL = GROUPED.__class__(**{f: getattr(GROUPED, f) for f in GROUPED.__slots__} | {"vocab": 256, "vocab_block": 24})
JOB = JobConfig(train=train_config(MODEL), plan=even(MODEL, (2, 1), (2, 1)), steps=3)
SLEEPER = [sys.executable, "-c", "import signal; signal.pause()"]


def program(config: Path, *more: str) -> list[str]:
    """Command of one rank."""
    return [sys.executable, "-m", "ntp_core.runtime.train", "--config", str(config), *more]


def write(folder: Path, text: str) -> Path:
    """A config file."""
    path = folder / "job.json"
    path.write_text(text)
    return path
