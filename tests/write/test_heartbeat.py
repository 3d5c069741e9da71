"""A heartbeat calls its function until it is stopped, and asks how long each pause is."""

from __future__ import annotations

import threading

import pytest

from kvformat.write.heartbeat import Heartbeat


@pytest.mark.parametrize("asked", [False, True])
def test_it_beats_until_it_is_stopped(asked):
    pauses, beats, done = [], [], threading.Event()

    def pause_s():
        pauses.append(0.0)
        return 0.0

    def beat():
        beats.append(None)
        if len(beats) == 3:
            done.set()

    heart = Heartbeat(beat, every_s=pause_s if asked else 0.0)
    heart.start()
    assert done.wait(60)
    heart.stop()
    heart.stop()
    assert len(pauses) == ((len(beats) + 1) if asked else 0)  # the last pause is cut short
    assert not heart._thread.is_alive()
