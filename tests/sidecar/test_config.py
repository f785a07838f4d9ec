"""Settings: who wins, what is refused, and that secrets stay secret."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from sidecar.config import Config, ConfigError, load


def test_config_defaults() -> None:
    """Without anything the defaults hold and say so."""
    loaded = load()
    assert loaded.config == Config()
    assert set(loaded.sources.values()) == {"default"}
    assert loaded.config.port == 9440


def test_config_flag_over_environment_over_file_over_default(tmp_path: Path) -> None:
    """Each level wins over those below it, and the source is kept."""
    file = tmp_path / "sidecar.toml"
    file.write_text("port = 1\npoll_ms = 20\nclear_s = 3\n")
    env = {"NTP_SIDECAR_PORT": "2", "NTP_SIDECAR_POLL_MS": "30"}
    loaded = load({"port": "3", "host": None}, env, file)
    assert (loaded.config.port, loaded.config.poll_ms, loaded.config.clear_s) == (3, 30, 3.0)
    assert loaded.sources["port"] == "--port"
    assert loaded.sources["poll_ms"] == "NTP_SIDECAR_POLL_MS"
    assert loaded.sources["clear_s"] == str(file)
    assert loaded.sources["host"] == "default"


def test_config_file_named_by_the_environment(tmp_path: Path) -> None:
    """NTP_SIDECAR_CONFIG names the file."""
    file = tmp_path / "c.toml"
    file.write_text('autopilot = "act"\n')
    assert load(env={"NTP_SIDECAR_CONFIG": str(file)}).config.autopilot == "act"


@pytest.mark.parametrize(
    ("flags", "needles"),
    [
        ({"port": "x"}, ("port", "'x'", "--port", "whole number")),
        ({"port": "70000"}, ("port", "from 0 to 65535")),
        ({"poll_ms": 1}, ("poll_ms", "from 5 to 1000")),
        ({"clear_s": "nan"}, ("clear_s", "a number")),
        ({"clear_s": "inf"}, ("clear_s", "a number")),
        ({"autopilot": "on"}, ("autopilot", "off, advise, act")),
        ({"webhook_url": "ftp://x"}, ("webhook_url", "http://host")),
        ({"webhook_url": "http://:80"}, ("webhook_url", "http://host")),
        ({"alertmanager_url": "alertmanager:9093"}, ("alertmanager_url", "http://host")),
        ({"alertmanager_url": "http://am:99999"}, ("alertmanager_url", "http://host")),
        ({"alertmanager_url": "http://a m:9093"}, ("alertmanager_url", "http://host")),
        ({"alertmanager_url": "http://am:9093\n"}, ("alertmanager_url", "http://host")),
        ({"otlp_endpoint": "localhost:4318"}, ("otlp_endpoint", "http://host")),
        ({"host": "0.0.0.0"}, ("host", "NTP_SIDECAR_TOKEN")),
        ({"host": ""}, ("host is ''", "127.0.0.1")),
        ({"host": "\u00fc..x"}, ("host", "127.0.0.1")),
        ({"host": "a b"}, ("host", "127.0.0.1")),
        ({"host": "x" * 64}, ("host", "127.0.0.1")),
        ({"webhook_url": "http://\u00fc..x/"}, ("webhook_url", "http://host")),
        ({"alertmanager_url": "zz"}, ("alertmanager_url", "http://host")),
        ({"port": "\u0663"}, ("port", "whole number")),
        ({"port": "1_000"}, ("port", "whole number")),
        ({"port": "9" * 5000}, ("port", "whole number")),
        ({"clear_s": "1_0.5"}, ("clear_s", "a number")),
        ({"clear_s": "\u0661.\u0665"}, ("clear_s", "a number")),
        ({"clear_s": 10**400}, ("clear_s", "a number")),
        ({"slow_rank_clear": 1.9}, ("slow_rank_clear", "lower")),
        ({"slow_rank_steps": True}, ("slow_rank_steps", "whole number")),
    ],
)
def test_config_bad_value_one_line_with_value_source_and_fix(
    flags: dict[str, object], needles: tuple[str, ...]
) -> None:
    """The message is one line and names what is wrong, where it came from and the fix."""
    with pytest.raises(ConfigError) as error:
        load(flags)
    message = str(error.value)
    assert "\n" not in message
    for needle in needles:
        assert needle in message
    assert "from --" in message


@pytest.mark.parametrize(
    ("text", "needle"),
    [
        ("prot = 1", "did you mean 'port'"),
        ("port = ", "not TOML"),
        ("port = [1]", "whole number"),
        ("host = 3", "give text"),
        ("port = 1.5", "whole number"),
        ("port = " + "[" * 10_000, "not TOML"),
        ("port = " + "9" * 5000, "not TOML"),
        ("# " + "x" * (1 << 20), "larger than"),
    ],
)
def test_config_bad_file_refused(tmp_path: Path, text: str, needle: str) -> None:
    """A file with a fault says which."""
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=needle):
        load(file=file)


def test_config_endless_file_refused() -> None:
    """A device that never ends is read up to a bound."""
    with pytest.raises(ConfigError, match="larger than"):
        load(file=Path("/dev/zero"))


def test_config_state_dir_of_nobody_refused() -> None:
    """A home that there is not: one line with the fix."""
    with pytest.raises(ConfigError, match="--state-dir"):
        load({"state_dir": "~no-such-user-here/x"})


def test_config_numbers_in_their_usual_forms_are_taken() -> None:
    """Text as the environment gives it: signs, fractions, exponents."""
    config = load({"clear_s": "1.5e1", "progress_floor_s": "+.5", "port": "0"}).config
    assert (config.clear_s, config.progress_floor_s, config.port) == (15.0, 0.5, 0)


def test_config_missing_file_refused(tmp_path: Path) -> None:
    """A file that is named must be there."""
    with pytest.raises(ConfigError, match="cannot be read"):
        load(file=tmp_path / "none.toml")


def test_config_secrets_are_never_shown() -> None:
    """Neither the rows nor an error repeat a secret or a password in a URL."""
    env = {
        "NTP_SIDECAR_TOKEN": "tok-123",
        "NTP_SIDECAR_WEBHOOK_SECRET": "whsec_abc",
        "NTP_SIDECAR_WEBHOOK_URL": "http://user:pw-456@hooks.example/x",
    }
    rows = load(env=env).rows()
    text = json.dumps(rows)
    for secret in ("tok-123", "whsec_abc", "pw-456"):
        assert secret not in text
    by_name = {r["name"]: r for r in rows}
    assert by_name["token"]["value"] == "(set)"
    assert by_name["token"]["source"] == "NTP_SIDECAR_TOKEN"
    with pytest.raises(ConfigError) as error:
        load(env=env | {"NTP_SIDECAR_WEBHOOK_URL": "gopher://user:pw-456@hooks.example/x"})
    assert "pw-456" not in str(error.value)


def test_config_rows_list_every_setting_with_help() -> None:
    """`ntp-sidecar config` leaves nothing out."""
    rows = load().rows()
    assert [r["name"] for r in rows] == [f.name for f in fields(Config)]
    assert all(r["help"] for r in rows)


def test_config_token_allows_other_addresses() -> None:
    """With a token the page may be reached from elsewhere."""
    assert load({"host": "0.0.0.0", "token": "t"}).config.host == "0.0.0.0"


def test_config_state_path_follows_xdg() -> None:
    """As set, else XDG_STATE_HOME, else ~/.local/state."""
    assert Config(state_dir="/x").state_path({}) == Path("/x")
    assert Config().state_path({"XDG_STATE_HOME": "/y"}) == Path("/y/ntp-sidecar")
    assert Config().state_path({}).parts[-3:] == (".local", "state", "ntp-sidecar")


def test_config_limits_reach_the_checks() -> None:
    """Settings arrive where they are used."""
    config = load({"slow_rank_threshold": 2.0, "progress_floor_s": 1.0}).config
    assert config.slow_rank_limits().threshold == 2.0
    assert config.progress_limits().floor_s == 1.0
    assert set(config.policies()) == {
        "slow_rank",
        "no_progress",
        "replica_divergence",
        "dead_rank",
    }
