"""A gang that answers from a recording: `python -m tunedcomm.tuner.replay_gang SUPERVISOR_PID SETTINGS`.

One process, no group, no device, no kernel: it says what a gang on the recorded machine would have said, so that
supervisor, coordinator, watchdog and database run as they do on GPUs. What was recorded as crashed or hung ends it, as
it ended the gang that was recorded.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path

from tunedcomm.tuner.commands import LOST, Command
from tunedcomm.tuner.gang.protocol import GangEnd
from tunedcomm.tuner.job import EXIT_UNUSABLE, Settings, candidate_to_dict
from tunedcomm.tuner.processes import die_with_parent
from tunedcomm.tuner.recording import read_recording
from tunedcomm.tuner.replay import Replay

__all__ = ["main"]


def _work(settings: Settings, replay: Replay, channel: GangEnd) -> str:
    while True:
        command = Command.from_dict(channel.receive())
        if command.kind == "end":
            return command.reason
        if command.kind == "wait":
            continue
        assert command.candidate is not None
        for event in ("work", "trial", "run"):
            channel.report(event, {"candidate": candidate_to_dict(command.candidate)})
        time.sleep(settings.replay_trial_s)
        outcome = replay.answer(command, settings)
        channel.report("result", {"outcome": outcome.to_dict()})
        if outcome.status in LOST:
            return "unusable"


def main(supervisor: int, path: Path) -> int:
    """Answer until the supervisor says that it is enough."""
    die_with_parent(supervisor)
    settings = Settings.load(path)
    assert settings.replay is not None
    assert settings.replay_limits is not None
    replay = Replay(read_recording(Path(settings.replay)))
    channel = GangEnd(path.parent)
    channel.report("ready", {"environment": replay.environment.to_dict(), "limits": asdict(settings.replay_limits)})
    reason = _work(settings, replay, channel)
    channel.report("end", {"reason": reason})
    return EXIT_UNUSABLE if reason == "unusable" else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2])))
