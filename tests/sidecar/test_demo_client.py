"""The demo's client: what goes wrong with the sidecar breaks the story in one line."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sidecar.demo.client import Api, StoryBroken
from tests.support.servers import free_port


def test_client_of_a_killed_sidecar_says_what_ended() -> None:
    """The port is closed a moment before the process is seen to be gone."""
    looks: Iterator[str] = iter(["", "", "the sidecar ended with -9"])
    api = Api(f"http://127.0.0.1:{free_port()}", lambda: next(looks))
    with pytest.raises(StoryBroken, match="the sidecar ended with -9"):
        api.job()
    api.close()


def test_client_without_answer_from_a_living_sidecar_says_so() -> None:
    """Nothing has ended, and still nobody answers."""
    api = Api(f"http://127.0.0.1:{free_port()}", lambda: "")
    with pytest.raises(StoryBroken, match="no answer"):
        api.wait("a step", 5.0, lambda: api.job())
    api.close()
