"""Tests of which `make test` runs some cases only, or none; `make test-long` runs the others.

Each of them takes many seconds, and its neighbours would notice most of what it would. The cases that stay are spread evenly.
"""

from __future__ import annotations

from collections import defaultdict

import pytest

CASES_IN_EVERY_RUN = {
    "activations/test_saved_tensors.py::test_training_is_the_same_bit_for_bit": 2,
    "checkpoint/test_arena_checkpoint.py::test_a_program_that_ends_without_closing_leaves_what_it_saved": 1,
    "checkpoint/test_arena_checkpoint.py::test_an_older_checkpoint_goes_only_after_the_new_one_was_read_back": 1,
    "checkpoint/test_arena_checkpoint.py::test_moments_are_converted_where_they_are_kept_in_another_dtype": 2,
    "checkpoint/test_arena_checkpoint.py::test_ranks_that_end_without_closing_leave_what_they_saved_or_say_so": 1,
    "checkpoint/test_arena_checkpoint.py::test_what_was_saved_in_the_middle_of_training_is_what_goes_on": 3,
    "checkpoint/test_commits.py::test_a_run_whose_files_were_taken_away_is_refused_at_once_and_can_be_saved": 1,
    "checkpoint/test_commits.py::test_another_config_or_model_is_refused_in_words": 2,
    "checkpoint/test_commits.py::test_broken_off_and_gone_on_with_equals_never_broken_off": 5,
    "checkpoint/test_commits.py::test_what_is_changed_after_a_step_is_resumed_with": 1,
    "checkpoint/test_dcp.py::test_a_damaged_checkpoint_is_told_in_words": 5,
    "checkpoint/test_dcp.py::test_saving_and_loading_hold_a_few_tensors_at_a_time": 0,
    "checkpoint/test_deepspeed_import.py::test_training_goes_on_from_it": 2,
    "checkpoint/test_export.py::test_ctrl_c_leaves_nothing": 0,
    "cli/test_bench_step.py::test_the_table_is_measured_one_process_at_a_time_and_goes_on_where_it_was": 0,
    "cli/test_ckpt.py::test_memory_is_bounded_by_one_tensor": 0,
    "cli/test_doctor.py::test_a_signal_ends_it_and_leaves_nothing": 3,
    "cli/test_launch_hosts.py::test_hosts_with_different_slots_are_one_group_of_ranks": 0,
    "cli/test_plan.py::test_the_config_that_is_written_loads_and_says_what_was_chosen": 3,
    "cli/test_plan.py::test_where_nothing_fits_what_is_named_does": 3,
    "cli/test_program.py::test_an_error_is_one_line_wherever_stdout_goes": 1,
    "cli/test_step.py::test_a_traced_step_comes_as_events_figures_and_a_picture": 0,
    "cli/test_step.py::test_each_optimizer_is_stepped_beside_torch_s": 1,
    "cli/test_step.py::test_how_a_model_is_stepped_is_asked_for": 1,
    "cli/test_sweep.py::test_ended_early_it_leaves_nothing_and_tells_what_it_found": 1,
    "csrc/test_binding.py::test_ctrl_c_gets_through_a_wait": 3,
    "device/test_training.py::test_training_on_a_late_device_equals_memory": 3,
    "examples/test_cifar.py::test_it_learns": 1,
    "examples/test_cifar.py::test_it_learns_in_fp16": 0,
    "examples/test_does_not_fit.py::test_steps_within_a_limit_and_the_same_in_memory": 0,
    "examples/test_train_lm.py::test_a_kill_leaves_no_swap_file_and_the_next_run_cleans_up": 0,
    "examples/test_train_lm.py::test_a_save_that_fails_does_not_lose_the_summary": 0,
    "examples/test_train_lm.py::test_a_signal_in_the_middle_leaves_nothing_behind": 1,
    "examples/test_train_lm.py::test_configs_that_are_no_configs_are_told_in_a_line": 1,
    "examples/test_train_lm.py::test_going_on_from_a_checkpoint": 0,
    "examples/test_train_lm.py::test_killed_and_gone_on_with": 0,
    "examples/test_train_lm.py::test_two_ranks": 0,
    "examples/test_train_lm.py::test_without_plain_pytorch_the_drive_alone_is_the_lower_bound": 0,
    "examples/test_train_lm.py::test_wrong_inputs_are_told_in_a_line": 5,
    "faults/test_real_faults.py::test_a_signal_ends_a_training_and_gives_the_space_back": 1,
    "faults/test_real_faults.py::test_no_memory_may_be_locked": 0,
    "fsdp2/test_live_parameters.py::test_the_bound_holds_and_no_bit_changes": 6,
    "fsdp2/test_routes.py::test_all_ranks_say_which_group_which_rank_came_to": 1,
    "parity/test_parity.py::test_a_checkpoint_of_two_ranks_goes_on_at_one_and_three": 0,
    "parity/test_parity.py::test_a_step_moves_the_fewest_bytes_that_its_cache_allows": 6,
    "parity/test_parity.py::test_nvme_equals_memory": 46,
    "parity/test_parity.py::test_nvme_equals_memory_with_each_backend": 3,
    "parity/test_parity.py::test_own_loop_equals_stock_fsdp2_and_adamw": 3,
    "parity/test_parity.py::test_steps_of_two_ranks_move_the_fewest_bytes_that_their_caches_allow": 0,
    "ranks/test_peers.py::test_a_close_needs_no_rank_that_has_closed": 1,
    "ranks/test_peers.py::test_a_transfer_that_fails_on_one_rank_ends_the_pass_on_both": 2,
    "runtime/test_caught_exceptions.py::test_a_failed_forward_is_as_if_it_had_never_been": 5,
    "runtime/test_drives.py::test_training_over_two_drives_equals_memory": 2,
    "runtime/test_frozen_weights.py::test_a_step_reads_the_frozen_weights_at_most_twice": 2,
    "runtime/test_frozen_weights.py::test_it_trains_as_in_memory": 6,
    "runtime/test_optimizers.py::test_a_checkpoint_of_any_optimizer_goes_on": 5,
    "runtime/test_optimizers.py::test_a_made_optimizer_is_paged": 5,
    "runtime/test_several_ranks.py::test_an_engine_after_an_engine_in_one_process": 0,
    "runtime/test_several_ranks.py::test_groups_prefetched_far_ahead_need_no_more_of_the_pool": 0,
    "runtime/test_several_ranks.py::test_moments_in_8_bits_are_loaded_over_whatever_was_there": 0,
    "runtime/test_stages.py::test_meshes_of_four_ranks_equal_fsdp2_on_the_same_mesh": 0,
    "runtime/test_train_batch.py::test_a_step_moves_as_many_bytes_for_any_number_of_micro_batches": 2,
    "runtime/test_train_batch.py::test_a_step_that_an_exception_ended_is_taken_again": 4,
    "runtime/test_train_batch.py::test_both_schedules_give_the_same_bits": 8,
    "runtime/test_train_batch.py::test_what_cannot_take_turns_goes_one_after_the_other": 4,
    "swap/test_phases.py::test_an_evaluation_does_not_disturb_the_order_of_training": 2,
    "swap/test_speculation.py::test_a_transfer_that_fails_leaves_the_step_before_or_refuses": 6,
    "swap/test_speculation.py::test_what_stays_is_the_step_befores_until_the_step_accepts_it": 6,
    "swap/test_speculation.py::test_whatever_the_step_does_the_numbers_are_those_of_memory": 10,
    "swap/test_thread_cost.py::test_calls_grow_with_groups_and_with_sub_groups": 2,
    "test_named_commands.py::test_it_works[torchrun": 0,
    "test_torch_versions.py::test_an_older_torch_ends_the_import_in_one_sentence": 1,
    "test_wheels.py::test_instructions_that_another_cpu_may_lack_are_refused": 1,
}
"""By test, without `tests/`: the number of its cases that `make test` runs."""


def thin_out(items: list[pytest.Item]) -> None:
    """Mark as `long` all cases of the tests above but so many."""
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not item.get_closest_marker("long"):
            path, _, name = item.nodeid.removeprefix("tests/").partition("::")
            function, _, case = name.partition("[")
            cases[f"{path}::{function}"].append(item)
            cases[f"{path}::{function}[{case.split(' ')[0]}"].append(item)
    for test, count in CASES_IN_EVERY_RUN.items():
        found = cases.get(test, [])
        often = {place * len(found) // count for place in range(count)} if count else set()
        for number, item in enumerate(found):
            if number not in often:
                item.add_marker(pytest.mark.long)
