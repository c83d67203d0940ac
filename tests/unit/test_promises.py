"""Every sentence of the promises in docs/concepts.md has its tests; `python tests/unit/test_promises.py` lists them.

pytest $(python tests/unit/test_promises.py)
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# The beginning of each sentence, in the order of the page, to the tests that hold it, after `tests/`.
TESTS: dict[str, tuple[str, ...]] = {
    # 1. Never wrong
    "Dispatch uses a candidate only if it passed": (
        "unit/test_db_layers.py::test_only_ok_rows_of_this_hardware_and_world_size",
        "unit/test_db_layers.py::test_a_candidate_that_failed_later_is_dropped_from_every_layer",
        "unit/test_selection_select.py::test_candidates_that_failed_in_the_family_are_not_interpolated",
        "unit/test_selection_select.py::test_an_empty_snapshot_gives_the_library",
        "multirank/test_tuner_faults.py::test_bad_variant_is_recorded_once",
        "multirank/test_checks.py::test_it_raises_on_every_rank_and_the_library_takes_over",
    ),
    'Where `numerics="ordered"` excludes the library': ("multirank/test_numerics.py::test_a_calls_own_policy_wins",),
    "What is borrowed from other hardware": (
        "unit/test_selection_borrow.py::test_siblings_serve_unasked_and_others_if_named",
        "unit/test_selection_borrow.py::test_checks_decide_what_is_borrowed",
        "multirank/test_first_use.py::test_each_problem_is_checked_once",
        "multirank/test_first_use.py::test_wrong_results_are_found_before_the_first_call[not_by_7]",
    ),
    "A pin runs its candidate unless": (
        "unit/test_db_diff.py::test_a_pin_of_what_was_never_measured_counts",
        "unit/test_selection_select.py::test_a_pin_comes_before_measurements_but_not_before_policy_and_feasibility",
        "unit/test_selection_select.py::test_forced_overrides_everything_but_feasibility",
    ),
    # 2. No hang by disagreement
    "Rank 0 reads the databases once": (
        "multirank/test_agreement.py::test_only_rank_0_reads",
        "multirank/test_agreement.py::test_databases[each rank another]",
        "multirank/test_agreement.py::test_what_differs_is_named[a_snapshot]",
    ),
    "After that a choice depends on": (
        "unit/test_selection_select.py::test_decisions_are_pure_and_do_not_depend_on_row_order",
        "unit/test_selection_select.py::test_importing_selection_needs_neither_torch_nor_a_database",
        "multirank/test_fast_calls.py::test_selection_does_not_communicate",
    ),
    # 3. Not slower than the library
    ", beyond noise, at a tuned problem": (
        "unit/test_selection_select.py::test_a_challenger_must_beat_the_library_by_more_than_the_noise",
    ),
    "The library is always measured": (
        "unit/test_tuner_measure.py::test_rounds_change_the_order_of_contenders_behind_a_barrier",
        "unit/test_selection_select.py::test_without_a_measurement_of_the_library_nothing_beats_it",
        "unit/test_selection_select.py::test_noise_is_half_the_spread_over_the_root_of_the_samples_within_bounds",
    ),
    "Runs are compared by their ratio": (
        "unit/test_selection_select.py::test_runs_are_compared_by_their_ratio_to_the_library",
        "unit/test_selection_select.py::test_a_ratio_to_a_disturbed_library_wins_nothing",
        "unit/test_selection_select.py::test_without_the_librarys_time_or_with_a_disturbed_one_the_latency_counts",
        "unit/test_selection_select.py::"
        "test_the_librarys_time_counts_in_full_in_graphs_and_with_its_root_in_eager_calls",
        "unit/test_selection_select.py::test_what_is_no_faster_than_the_library_beside_it_is_not_chosen",
    ),
    # 4. Same bits
    "Each variant has a numerics class": (
        "unit/test_spec.py::test_a_variant_of_no_numerics_class_is_refused",
        "multirank/test_variants.py::test_ordered_variants_give_the_same_bits",
        "multirank/test_dispatch.py::test_same_bits_on_every_rank",
        "unit/test_cli_db.py::test_unordered_variant_is_said_to_serve_few",
        "unit/test_selection_select.py::test_numerics_policy",
        "multirank/test_dispatch.py::test_numerics_policies",
    ),
    "Under `ordered` a part of a batch": (
        "multirank/test_slices.py::test_slices",
        "gpu/test_stress_gpu.py::test_slices_have_the_bits_of_the_whole",
        "multirank/test_numerics.py::test_a_block_fused",
    ),
    # 5. Graphs and streams
    "Every variant can be captured": (
        "gpu/test_bodies_gpu.py::test_body",
        "gpu/test_stress_gpu.py::test_nothing_is_wrong_and_nothing_hangs",
    ),
    "A captured or repeated call tunes nothing": (
        "multirank/test_fast_calls.py::test_a_repeated_call_does_nothing_but_launch",
        "multirank/test_fast_calls.py::test_the_second_call_is_fast",
    ),
    # 6. Says why
    "`explain` names the layer": (
        "unit/test_cli_explain.py::test_explain_says_on_what_evidence",
        "unit/test_cli_explain.py::test_explain_says_why_others_were_passed_over",
        "unit/test_cli_explain.py::test_explain_says_what_the_same_bits_cost",
        "unit/test_selection_select.py::test_the_fastest_challenger_wins_and_says_by_how_much",
    ),
    # 7. A lost peer is an error
    "Every wait is bounded": (
        "unit/test_shipped.py::test_a_spinning_variant_is_not_chosen_however_fast_it_was",
        "multirank/test_lost_peer.py::test_a_peer_that_is_killed",
    ),
    "When it expires": (
        "multirank/test_lost_peer.py::test_a_peer_that_never_calls",
        "multirank/test_lost_peer.py::test_a_peer_that_is_killed",
    ),
    "An exception in the midst of a call": ("multirank/test_interrupted.py::test_an_exception_anywhere_in_a_call",),
    "Either way the group refuses": ("multirank/test_interrupted.py::test_random_programs",),
    # 8. Any input
    "Any size from zero, any stride": (
        "multirank/test_bad_input.py::test_zero_elements",
        "multirank/test_bad_input.py::test_non_dense_strides",
        "multirank/test_bad_input.py::test_group_of_others",
        "multirank/test_dispatch.py::test_any_strides",
        "multirank/test_variants.py::test_sizes",
        "multirank/test_groups.py::test_overlapping_groups",
    ),
}
NAMED = [test for tests in TESTS.values() for test in tests]


def promises() -> list[str]:
    """The sentences under "Promises", without the numbers and the bold words that they begin with."""
    page = (ROOT / "docs" / "concepts.md").read_text()
    section = page.split("\n## Promises\n")[1].split("\n## ")[0]
    items = re.split(r"^\d+\. ", section, flags=re.MULTILINE)[1:]
    texts = [re.sub(r"^\*\*.*?\*\*", "", " ".join(item.split())).strip() for item in items]
    return [sentence for text in texts for sentence in re.split(r"(?<=\.) (?=[A-Z`])", text)]


def test_every_sentence_has_its_tests() -> None:
    sentences = promises()
    unknown = [text for text in sentences if not any(text.startswith(begin) for begin in TESTS)]
    assert unknown == [], "name the tests that hold these"
    assert [next(begin for begin in TESTS if text.startswith(begin)) for text in sentences] == list(TESTS)


@pytest.mark.parametrize("test", sorted(set(NAMED)))
def test_it_is_there(test: str) -> None:
    path, _, name = test.partition("::")
    function, _, case = name.rstrip("]").partition("[")
    tree = ast.parse((ROOT / "tests" / path).read_text())
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert function in functions
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert not case or case in texts | functions


if __name__ == "__main__":
    print("\n".join(f"tests/{test}" for test in dict.fromkeys(NAMED)))
