"""Names of what `planted` registers, for tests that must not register it themselves."""

from __future__ import annotations

OP = "planted_sum"
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
