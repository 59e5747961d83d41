import signal

import pytest

from atoll.cli.process import Stopped, signals_as_interrupts, start_forking


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_stops_the_block(name):
    number = getattr(signal, name)
    before = signal.signal(number, signal.SIG_DFL)  # a background job of a shell ignores some of them
    try:
        with pytest.raises(Stopped, match=name) as stopped, signals_as_interrupts():
            signal.raise_signal(number)
        assert stopped.value.exit_code == 128 + number
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_an_ignored_signal_stays_ignored():
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_as_interrupts():
            signal.raise_signal(signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("settings", "starts"),
    [
        ([], False),
        (["engine.workers=1"], False),
        (["engine.stack=4"], False),
        (["engine.workers=0"], True),
        (["engine.decoders=2"], True),
        (['engine.devices="auto"'], True),
    ],
)
def test_only_runs_with_more_processes_start_one(settings, starts, monkeypatch):
    started = []
    monkeypatch.setattr("atoll.core.processes.process_context", lambda: started.append(True))
    start_forking("board-short", settings)
    assert bool(started) == starts
