"""All settings of the sidecar, in one frozen dataclass, and where each value came from.

A flag wins over the environment (`NTP_SIDECAR_<NAME>`), that over the TOML file, that over the
default. A bad value is refused with one line that names the value, its source and the fix. Secrets
are never printed; give them by the environment or the file, as flags show in process lists.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sidecar.checks.no_progress import ProgressLimits
from sidecar.checks.slow_rank import SlowRankLimits
from sidecar.incidents.tracker import Policy

ENV_PREFIX = "NTP_SIDECAR_"
FILE_VARIABLE = "NTP_SIDECAR_CONFIG"
LOOPBACK = ("127.0.0.1", "::1", "localhost")
MAX_FILE_BYTES = 1 << 20

# Python's own parsers also take digits of other scripts and underscores.
_INT = re.compile(r"[+-]?[0-9]{1,20}")
_FLOAT = re.compile(r"[+-]?([0-9]{1,40}(\.[0-9]{0,40})?|\.[0-9]{1,40})([eE][+-]?[0-9]{1,4})?")


class ConfigError(ValueError):
    """A setting that cannot be. The message is one line: value, source, fix."""


def _setting(
    default: Any,
    text: str,
    *,
    least: float | None = None,
    most: float | None = None,
    choices: tuple[str, ...] = (),
    is_secret: bool = False,
) -> Any:
    meta = {"help": text, "min": least, "max": most, "choices": choices, "secret": is_secret}
    return field(default=default, metadata=meta)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Settings in force. `docs` of each field stand in its metadata, as `--help` shows them."""

    host: str = _setting("127.0.0.1", "address of the page and the API")
    port: int = _setting(
        9440, "port of the page and the API; 0 takes a free one", least=0, most=65535
    )
    token: str = _setting("", "bearer token; needed for any address but loopback", is_secret=True)
    poll_ms: int = _setting(100, "milliseconds between ticks", least=5, most=1000)
    max_ranks: int = _setting(1024, "ranks with series of their own on /metrics", least=1)
    autopilot: str = _setting(
        "advise",
        "what to do about a slow rank: off, advise (show a new plan), act (leave it for the job)",
        choices=("off", "advise", "act"),
    )
    slow_rank_threshold: float = _setting(1.5, "ratio to the peers that is slow", least=1.01)
    slow_rank_clear: float = _setting(1.25, "ratio under which it is over", least=1.0)
    slow_rank_steps: int = _setting(3, "steps in a row that must be slow", least=1, most=100)
    slow_rank_warmup_steps: int = _setting(2, "steps of each epoch not judged", least=0, most=100)
    slow_rank_min_ranks: int = _setting(3, "fewest ranks to compare", least=2)
    progress_floor_s: float = _setting(5.0, "least time without a step, seconds", least=0.1)
    progress_factor: float = _setting(10.0, "limit in median step times", least=1)
    progress_ceiling_s: float = _setting(300.0, "most time without a step, seconds", least=1)
    progress_first_step_s: float = _setting(120.0, "limit for the first step, seconds", least=0.1)
    progress_change_s: float = _setting(60.0, "limit inside a change, seconds", least=0.1)
    progress_save_s: float = _setting(600.0, "limit during a checkpoint, seconds", least=0.1)
    slow_rank_confirm: int = _setting(1, "ticks before slow_rank fires", least=1)
    no_progress_confirm: int = _setting(2, "ticks before no_progress fires", least=1)
    replica_divergence_confirm: int = _setting(1, "ticks before it fires", least=1)
    dead_rank_confirm: int = _setting(1, "ticks before dead_rank fires", least=1)
    clear_s: float = _setting(1.0, "seconds without a finding that resolve an incident", least=0)
    proposal_cooldown_s: float = _setting(10.0, "seconds between proposals", least=0)
    proposal_pending_s: float = _setting(60.0, "seconds a proposal waits for the job", least=1)
    proposal_min_gain: float = _setting(0.05, "least gain worth a change", least=0, most=0.99)
    judge_margin: float = _setting(0.02, "gain under which a change is undone", least=0, most=0.99)
    judge_skip_steps: int = _setting(2, "steps after a change not judged", least=0, most=100)
    judge_steps: int = _setting(5, "steps that judge a change", least=1, most=200)
    proposal_return_steps: int = _setting(
        16,
        "steps that a slowed rank must have been fast again before it gets shares back; 0: never",
        least=0,
        most=400,
    )
    kill_stopped: float = _setting(
        0.0,
        "seconds after which a rank that stands still while others wait is killed; 0 kills none",
        least=0,
    )
    webhook_url: str = _setting("", "where incidents are sent; empty sends none")
    webhook_secret: str = _setting("", "signing secret (whsec_...) of the webhook", is_secret=True)
    alertmanager_url: str = _setting("", "Alertmanager that incidents are posted to; empty: none")
    webhook_format: str = _setting("nutp", "body of a webhook", choices=("nutp", "alertmanager"))
    state_dir: str = _setting(
        "", "directory for the webhook outbox and secret; empty: ~/.local/state/ntp-sidecar"
    )
    otlp_endpoint: str = _setting("", "base URL of an OTLP/HTTP receiver; empty exports no traces")

    def state_path(self, env: Mapping[str, str] = os.environ) -> Path:
        """The state directory: as set, else by the XDG base directory rules.

        Raises ConfigError when it names the home of nobody.
        """
        place = self.state_dir or f"{env.get('XDG_STATE_HOME') or '~/.local/state'}/ntp-sidecar"
        try:
            return Path(place).expanduser()
        except RuntimeError as error:
            raise ConfigError(
                f"state_dir is {place!r} and there is no such home directory; "
                "give a full path with --state-dir"
            ) from error

    def slow_rank_limits(self) -> SlowRankLimits:
        """Limits of the check slow_rank."""
        return SlowRankLimits(
            threshold=self.slow_rank_threshold,
            clear=self.slow_rank_clear,
            steps=self.slow_rank_steps,
            warmup_steps=self.slow_rank_warmup_steps,
            min_ranks=self.slow_rank_min_ranks,
        )

    def progress_limits(self) -> ProgressLimits:
        """Limits of the check no_progress."""
        return ProgressLimits(
            floor_s=self.progress_floor_s,
            ceiling_s=self.progress_ceiling_s,
            factor=self.progress_factor,
            first_step_s=self.progress_first_step_s,
            change_s=self.progress_change_s,
            save_s=self.progress_save_s,
            stopped_floor_s=min(self.progress_floor_s, ProgressLimits().stopped_floor_s),
        )

    def policies(self) -> dict[str, Policy]:
        """Check -> how its findings become incidents."""
        return {
            "slow_rank": Policy(confirm=self.slow_rank_confirm, clear_s=self.clear_s),
            "no_progress": Policy(confirm=self.no_progress_confirm, clear_s=self.clear_s),
            "replica_divergence": Policy(
                confirm=self.replica_divergence_confirm, clear_s=self.clear_s
            ),
            "dead_rank": Policy(confirm=self.dead_rank_confirm, clear_s=self.clear_s),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A configuration and where each value came from: name -> "--port", a variable, a file."""

    config: Config
    sources: dict[str, str]

    def rows(self) -> list[dict[str, Any]]:
        """What `ntp-sidecar config` prints. A secret shows only whether it is set."""
        return [
            {
                "name": f.name,
                "value": _shown(f.metadata["secret"], getattr(self.config, f.name)),
                "source": self.sources[f.name],
                "help": f.metadata["help"],
            }
            for f in fields(Config)
        ]


def _shown(is_secret: bool, value: Any) -> Any:
    if not is_secret:
        return _without_password(value) if isinstance(value, str) else value
    return "(set)" if value else "(not set)"


def load(
    flags: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Loaded:
    """Settle every setting.

    Args:
        flags: values given on the command line; None means not given.
        env: environment variables.
        file: TOML file; without it the one that NTP_SIDECAR_CONFIG names, if any.

    Raises:
        ConfigError: one line with the value, its source and the fix.
    """
    env = env or {}
    if file is None and env.get(FILE_VARIABLE):
        file = Path(env[FILE_VARIABLE])
    table = _read_file(file) if file is not None else {}
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for f in fields(Config):
        raw, source = f.default, "default"
        if f.name in table:
            raw, source = table[f.name], str(file)
        if (variable := ENV_PREFIX + f.name.upper()) in env:
            raw, source = env[variable], variable
        if flags and flags.get(f.name) is not None:
            raw, source = flags[f.name], flag_of(f.name)
        values[f.name] = _convert(f.name, str(f.type), raw, source, f.metadata)
        sources[f.name] = source
    config = Config(**values)
    _check_together(config, sources)
    return Loaded(config=config, sources=sources)


def flag_of(name: str) -> str:
    """The flag of a setting: `poll_ms` -> `--poll-ms`."""
    return "--" + name.replace("_", "-")


def _read_file(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ValueError(f"it is larger than {MAX_FILE_BYTES} bytes")
        table = tomllib.loads(data.decode())
    except OSError as error:
        raise ConfigError(
            f"config file '{file}' cannot be read ({error.strerror}); give a readable TOML file"
        ) from error
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, numbers or nests no end
        raise ConfigError(f"config file '{file}' is not TOML: {error}; correct it") from error
    names = [f.name for f in fields(Config)]
    for key in table:
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1)
            hint = f"did you mean '{near[0]}'?" if near else "see `ntp-sidecar config`"
            raise ConfigError(f"unknown setting '{key}' in {file}; {hint}")
    return table


def _convert(name: str, kind: str, raw: Any, source: str, meta: Mapping[str, Any]) -> Any:
    shown = "(secret)" if meta["secret"] else repr(raw)
    value = _parse(kind, raw)
    if value is None:
        wanted = {"int": "a whole number", "float": "a number", "str": "text"}[kind]
        raise ConfigError(f"{name} is {shown} (from {source}); give {wanted}")
    if meta["choices"] and value not in meta["choices"]:
        raise ConfigError(
            f"{name} is {shown} (from {source}); give one of {', '.join(meta['choices'])}"
        )
    least, most = meta["min"], meta["max"]
    if (least is not None and value < least) or (most is not None and value > most):
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ConfigError(f"{name} is {shown} (from {source}); give a value {bounds}")
    return value


def _parse(kind: str, raw: Any) -> int | float | str | None:
    """The value in its type; None when it is not of it. NaN and infinity are no settings."""
    if isinstance(raw, bool):
        return None
    try:
        match kind:
            case "int":
                is_number = isinstance(raw, int) or _is_text_of(_INT, raw)
                return int(raw) if is_number else None
            case "float":
                is_number = isinstance(raw, int | float) or _is_text_of(_FLOAT, raw)
                number = float(raw) if is_number else float("nan")
                return number if abs(number) < float("inf") else None
            case _:
                return raw if isinstance(raw, str) else None
    except (TypeError, ValueError, OverflowError):
        return None


def _is_text_of(form: re.Pattern[str], raw: Any) -> bool:
    return isinstance(raw, str) and form.fullmatch(raw) is not None


def _check_together(config: Config, sources: Mapping[str, str]) -> None:
    """What single values cannot tell."""
    if not is_host(config.host):
        raise ConfigError(
            f"host is {config.host!r} (from {sources['host']}); give a host name or an address, "
            "as 127.0.0.1"
        )
    if config.state_dir:
        config.state_path()
    if config.host not in LOOPBACK and not config.token:
        raise ConfigError(
            f"host is '{config.host}' (from {sources['host']}) and no token is set; "
            "set NTP_SIDECAR_TOKEN, or use 127.0.0.1"
        )
    if config.slow_rank_clear > config.slow_rank_threshold:
        raise ConfigError(
            f"slow_rank_clear is {config.slow_rank_clear} (from {sources['slow_rank_clear']}), "
            f"above slow_rank_threshold {config.slow_rank_threshold}; make it lower"
        )
    for name in ("webhook_url", "alertmanager_url", "otlp_endpoint"):
        value = getattr(config, name)
        if value and not is_http_url(value):
            raise ConfigError(
                f"{name} is {_without_password(value)!r} (from {sources[name]}); "
                "give a URL like http://host:port/path"
            )


def is_host(text: str) -> bool:
    """Whether this can be the name or the address of a host; whether there is one is not asked."""
    if any(c.isspace() or not c.isprintable() for c in text):
        return False
    try:
        return bool(text.encode("idna"))
    except UnicodeError:  # an empty label, or one that is too long
        return False


def is_http_url(text: str) -> bool:
    """Whether this is an http or https URL with a host and, if any, a valid port."""
    if any(c.isspace() or not c.isprintable() for c in text):  # urlsplit takes some of them out
        return False
    try:
        parts = urlsplit(text)
        is_web = parts.scheme in ("http", "https") and parts.port != 0
        return is_web and is_host(parts.hostname or "")
    except ValueError:
        return False


def _without_password(url: str) -> str:
    head, at, tail = url.rpartition("@")
    return f"...@{tail}" if at and head else url  # user and password stand before the @
