"""The address of the store, and a store that is not there, or not any more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from torch.distributed import DistNetworkError

from ntp_core.errors import InvalidInput, StoreLost
from ntp_core.runtime.elastic.store import (
    StoreAddress,
    bound_silence,
    loss_told,
    serve,
    store_outside,
)
from tests.support.rank_pool import ROOT
from tests.support.servers import free_port


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("10.0.0.1:29400", "10.0.0.1", 29400),
        ("node-1:1", "node-1", 1),
        ("[::1]:65535", "::1", 65535),
    ],
)
def test_store_address_is_read_and_written_alike(text: str, host: str, port: int) -> None:
    """host:port, with brackets around IPv6."""
    address = StoreAddress.parse("NTP_STORE", text)
    assert (address.host, address.port) == (host, port)
    assert str(address) == text


@pytest.mark.parametrize(
    "text", ["x", "x:", ":1", "x:0", "x:65536", "x:-1", "x:1.0", "x:\u00b2", "x:" + "9" * 5000]
)
def test_store_address_that_is_none_is_refused(text: str) -> None:
    """The variable is named with what it held."""
    with pytest.raises(InvalidInput, match=r"^NTP_STORE=.*: give host:port"):
        StoreAddress.of({"NTP_STORE": text})


def test_store_of_a_launcher_is_taken_only_where_it_says_so() -> None:
    """Without TORCHELASTIC_USE_AGENT_STORE it would be in rank 0, and die with it."""
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with pytest.raises(InvalidInput, match="needs a store outside its ranks"):
        StoreAddress.of(environ)
    environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    assert str(StoreAddress.of(environ)) == "127.0.0.1:29500"
    assert str(StoreAddress.of({**environ, "NTP_STORE": "h:1"})) == "h:1"
    with pytest.raises(InvalidInput, match=r"^MASTER_ADDR:MASTER_PORT="):
        StoreAddress.of({**environ, "MASTER_PORT": ""})


def test_store_that_is_not_there_is_told_without_pages_of_torch(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """After the time that ranks may be earlier than their store."""
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(InvalidInput, match=f"^no store answers at {address}: "):
        store_outside({"NTP_STORE": address}, timeout_s=0.3)
    assert capfd.readouterr().err == ""


def test_store_that_falls_silent_fails_a_request_in_bounded_time() -> None:
    """Like one whose host has vanished: nothing comes back, not even a reset."""
    command = [sys.executable, "-m", "ntp_core.runtime.elastic.store"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        name, address = process.stdout.readline().strip().split("=")
        try:
            store = store_outside({name: address})
            store.set("a", "1")
            assert bound_silence(StoreAddress.of({name: address}).port, 0.5) == 1
            assert store.check(["a"])
            os.kill(process.pid, signal.SIGSTOP)
            begin_s = time.monotonic()
            with (
                pytest.raises(StoreLost, match=f"^the store at {address} is gone"),
                loss_told({name: address}),
            ):
                store.check(["a"])
            assert time.monotonic() - begin_s < 20
        finally:
            process.kill()


def test_store_lost_leaves_other_errors_alone() -> None:
    """Only torch's word for a lost connection is turned into ours."""
    with pytest.raises(KeyError), loss_told({}):
        raise KeyError("a")
    with pytest.raises(StoreLost, match="is gone"), loss_told({"NTP_STORE": "h:1"}):
        raise DistNetworkError("reset")


def test_store_cannot_listen_twice() -> None:
    """The port is taken: an OSError with its reason."""
    store = serve("127.0.0.1", 0)
    with pytest.raises(OSError, match="in use"):
        serve("127.0.0.1", store.port)
