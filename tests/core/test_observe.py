"""The observer protocol: the one that hears nothing, and the one that tests use."""

from __future__ import annotations

import inspect

import pytest

from ntp_core.observe import NULL_OBSERVER, NullObserver, Observer
from tests.support.recording_observer import RecordingObserver

METHODS = {n: f for n, f in vars(Observer).items() if inspect.isfunction(f) and n[0] != "_"}


@pytest.mark.parametrize("observer", [NullObserver, RecordingObserver])
@pytest.mark.parametrize("name", METHODS)
def test_observer_has_every_method_with_the_same_arguments(observer: type, name: str) -> None:
    """Names, order and types of arguments are those of the protocol."""
    expected, actual = (inspect.signature(f) for f in (METHODS[name], getattr(observer, name)))
    assert expected == actual


@pytest.mark.parametrize("observer", [NullObserver, RecordingObserver])
def test_observer_has_nothing_else_that_the_engine_could_call(observer: type) -> None:
    """No public method beside the protocol's, but for what reads a recording."""
    public = {n for n, f in vars(observer).items() if inspect.isfunction(f) and n[0] != "_"}
    assert METHODS.keys() == public - {"of"}


def test_null_observer_returns_nothing_for_any_call() -> None:
    """Each method takes its arguments and does nothing."""
    for name, function in METHODS.items():
        arguments = list(inspect.signature(function).parameters)[1:]
        assert getattr(NULL_OBSERVER, name)(*arguments) is None


def test_recording_observer_keeps_calls_in_order() -> None:
    """What was told comes back by name."""
    observer = RecordingObserver()
    observer.step_begin(1)
    observer.value(2, 1, 0.5)
    observer.step_begin(2)
    assert observer.of("step_begin") == [(1,), (2,)]
    assert observer.calls == [("step_begin", (1,)), ("value", (2, 1, 0.5)), ("step_begin", (2,))]
