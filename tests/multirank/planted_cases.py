"""Names of what `planted` registers, for tests that must not register it themselves."""

from __future__ import annotations

OP = "planted_sum"
# An op of its own whose library is slow, with variants that look right, in `planted_late`.
LATE_OP = "planted_late_sum"
# Elements of a problem whose library crashes in a process that `damages` has run in, and of one whose library always
# crashes.
NEXT, NEVER = 128, 256
GOOD = ("good(delay_ms=100)", "good(delay_ms=20)", "good(delay_ms=40)")
# Elements of a problem for which a rank has no memory, and of one for whose check it has none; nobody else asks for
# these shapes.
TOO_LARGE, TOO_LARGE_TO_CHECK = 5120, 6144
# Variant to the status under which it must end.
BAD: dict[str, str] = {
    "wrong_by_one_element": "incorrect",
    "wrong_second_launch": "incorrect",
    "nan_on_odd_sizes": "incorrect",
    "other_bits": "incorrect",
    "leaves_packets": "incorrect",
    "bind_fails_on_one_rank": "compile_error",
    "bind_takes_for_ever": "hung",
    "raises_on_one_rank": "crashed",
    "segfaults": "crashed",
    "deadlocks": "hung",
    "peer_times_out": "hung",
}

# Those of `LATE_OP`, with a pattern that the sentence matches.
LATE_BAD: dict[str, str] = {
    "turns_wrong_late": "after [0-9]+ launches that were timed: wrong at launch 1",
    "writes_behind_its_output": r"out of bounds: 16 bytes behind output 0 of shape \(64,\), up to 32 bytes away",
    "writes_before_its_input": r"out of bounds: 8 bytes before input 0 of shape \(64,\), up to 8 bytes away",
    "leaks": "leaks memory: 20 launches took [0-9]+ MiB",
}
