"""Signatures by Standard Webhooks 1.0 (symmetric, `v1`), and where the secret comes from.

The secret never appears in a message, a log line or a repr.
"""

from __future__ import annotations

import base64
import binascii
import os
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from standardwebhooks import Webhook

from ntp_core.errors import InvalidInput

SECRET_VARIABLE = "NTP_SIDECAR_WEBHOOK_SECRET"
SECRET_FILE = "webhook-secret"
_PREFIX = "whsec_"
_BYTES_MIN, _BYTES_MAX = 24, 64  # Standard Webhooks, "Signature scheme"


class Signer:
    """Signs bodies for one endpoint.

    Args:
        secret: `whsec_` and base64 of 24 to 64 bytes. Several, apart by spaces, sign all at once:
            the receiver may hold any of them while the secret is being changed.

    Raises:
        InvalidInput: when it has another form.
    """

    def __init__(self, secret: str) -> None:
        parts = secret.split()
        if not parts:
            raise InvalidInput("the webhook secret is empty; " + _HOW)
        for part in parts:
            _check(part)
        self._keys = [Webhook(p) for p in parts]

    def __repr__(self) -> str:
        return f"Signer({len(self._keys)} secret{'s' if len(self._keys) > 1 else ''}, hidden)"

    def headers(self, message_id: str, body: bytes, now_s: float) -> dict[str, str]:
        """The three headers for one attempt at unix time `now_s`. Send exactly `body`."""
        at = datetime.fromtimestamp(int(now_s), UTC)
        text = body.decode()
        return {
            "webhook-id": message_id,
            "webhook-timestamp": str(int(now_s)),
            "webhook-signature": " ".join(k.sign(message_id, at, text) for k in self._keys),
        }


_HOW = (
    f"give {_PREFIX} and base64 of {_BYTES_MIN} to {_BYTES_MAX} random bytes in "
    f"{SECRET_VARIABLE} or in a file, or give none and one is made"
)


def new_secret() -> str:
    """A fresh secret of 32 random bytes."""
    return _PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def load_secret(
    state_dir: Path, *, environ: Mapping[str, str] = os.environ, secret_file: Path | None = None
) -> str:
    """The secret: from `secret_file`, else from the environment, else from the state directory.

    The one in the state directory is made at first use, readable by its owner only.

    Raises:
        InvalidInput: when `secret_file` cannot be read or a secret has a wrong form.
    """
    if secret_file is not None:
        text = _read(secret_file)
    elif environ.get(SECRET_VARIABLE):
        text = environ[SECRET_VARIABLE].strip()
    else:
        text = _own_secret(state_dir)
    Signer(text)
    return text


def _own_secret(state_dir: Path) -> str:
    path = state_dir / SECRET_FILE
    if path.exists():
        return _read(path)
    state_dir.mkdir(parents=True, exist_ok=True)
    # Written whole under another name first: two sidecars that start at once agree on one secret.
    draft = state_dir / f".{SECRET_FILE}.{os.getpid()}"
    draft.unlink(missing_ok=True)
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(new_secret() + "\n")
    try:
        os.link(draft, path)
    except FileExistsError:
        pass  # the other one was first
    finally:
        draft.unlink()
    return _read(path)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(
            f"the webhook secret file '{path}' cannot be read ({type(error).__name__}); {_HOW}"
        ) from None


def _check(secret: str) -> None:
    """Refuse a malformed secret without repeating it."""
    try:
        if not secret.startswith(_PREFIX):
            raise ValueError
        size = len(base64.b64decode(secret[len(_PREFIX) :], validate=True))
    except (ValueError, binascii.Error):
        raise InvalidInput(
            f"the webhook secret is not {_PREFIX} followed by base64; {_HOW}"
        ) from None
    if not _BYTES_MIN <= size <= _BYTES_MAX:
        raise InvalidInput(f"the webhook secret has {size} bytes; {_HOW}")
