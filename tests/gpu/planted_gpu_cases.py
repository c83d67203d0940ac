"""Names of what `planted_gpu` registers, for tests that must not register it themselves."""

from __future__ import annotations

SHAPE = (4096,)
# Name to the status that a sweep has to record.
BAD = {
    "compiles_for_ever": "hung",
    "device_spins_on_one_rank": "hung",
    "host_sleeps_on_one_rank": "hung",
    "launch_missing_on_one_rank": "hung",
    "leaks": "incorrect",
    "nan_on_odd_sizes": "incorrect",
    "raises_on_one_rank": "crashed",
    "segfaults_on_one_rank": "crashed",
    "stale_in_graphs": "incorrect",
    "sticky_cuda_error": "crashed",
    "turns_wrong_late": "incorrect",
    "writes_behind_its_output": "incorrect",
    "wrong_by_one_element": "incorrect",
    "wrong_second_launch": "incorrect",
}
