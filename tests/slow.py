"""Tests that `make test` leaves to `make slow`, because they judge measured time, which a busy
machine distorts, or take long and rarely find anything that the rest does not.

Each entry is the beginning of a test's id, followed by what `make test` still runs of that kind.
tests/test_lint.py finds entries that name no test.
"""

from __future__ import annotations

import re

#: Contract tests of what is the same with each scheduling: once a worker has a sample, it is collated
#: and sent by the same code. With scheduling="static" they are slow; files on order, errors and
#: random numbers are not listed here. Iterable datasets are loaded statically by both kinds.
SAME_WHEN_STATIC = re.compile(
    r"tests/contract/test_(attributes|collate|compile|constructor|contexts|downstream|fetch|last_words"
    r"|iterable|leaks|memory|pickling|pinning|pinning_ahead|threads|transport|uncollatable)"
    r"\.py::\w+\[(.*-)?minato-static\b"
)
#: Pairs of ranks with 4 or 6 of them; make test runs those with 1, 2, 3 and 8.
MORE_RANKS = re.compile(
    r"tests/test_resume_elastic\.py::test_(kept_global_batch|elastic_resume_loses)\w+\[([1-8]-)?[46][-\]]"
)
SLOW: dict[str, str] = {
    # judged by measured time, so an idle machine is needed
    "tests/observe/test_advice.py":
        "tests/observe/test_verdict.py, with statistics made up; test_verdict_is_given_facts_of_the_run.",
    "tests/observe/test_ranks.py::test_planted_rank_and_samples_come_first":
        "test_held_time_is_the_wait_beyond_the_second.",
    "tests/iterators/test_locality.py::TestGroups":
        "tests/policy/test_simulate_groups.py; TestEachSampleOnce.",
    "tests/iterators/test_locality.py::TestNothingToGain::test_samples_that_have_names":
        "test_negligible_opening_cost_ends_probing.",
    "tests/transport/test_sendable.py::test_splitting_is_learned_from_costs":
        "tests/policy/test_split_collate.py.",
    "tests/attack/test_start_methods.py::test_first_batch":
        "test_start_methods_give_the_same_data.",
    "tests/workers/test_worker_numbers.py::test_pause_of_trainer_keeps_workers":
        "tests/policy/test_autoscale.py.",
    "tests/workers/test_worker_numbers.py::test_one_long_wait_adds_workers":
        "tests/policy/test_autoscale.py.",
    "tests/workers/test_worker_numbers.py::test_waiting_samples_get_more_workers_than_cores":
        "tests/policy/test_autoscale.py.",
    "tests/workers/test_worker_numbers.py::test_a_slow_consumer_gets_fewer_workers":
        "tests/policy/test_autoscale.py.",
    "tests/workers/test_worker_numbers.py::test_computing_samples_get_no_more_workers_than_cores":
        "tests/policy/test_autoscale.py.",
    "tests/workers/test_worker_numbers.py::test_decisions_are_ordered_and_consistent":
        "tests/policy/test_autoscale.py.",
    "tests/contract/test_last_words.py::test_workers_finish_their_exit_handlers[minato-spawn":
        "the same under fork.",
    "tests/contract/test_last_words.py::test_workers_finish_their_exit_handlers[minato-forkserver":
        "the same under fork.",
    "tests/contract/test_last_words.py::test_workers_run_exit_functions_as_multiprocessing_does[minato-spawn":
        "the same under fork.",
    "tests/contract/test_last_words.py::test_workers_run_exit_functions_as_multiprocessing_does[minato-forkserver":
        "the same under fork.",
    "tests/contract/test_last_words.py::test_left_epoch_closes_iterators_in_workers[minato-False-False-spawn":
        "the same under fork.",
    "tests/contract/test_last_words.py::test_left_epoch_closes_iterators_in_workers[minato-False-True-spawn":
        "the same under fork.",
    "tests/contract/test_last_words.py::test_left_epoch_closes_iterators_in_workers[minato-True-False-spawn":
        "the same under fork.",
    "tests/contract/test_last_words.py::test_left_epoch_closes_iterators_in_workers[minato-True-True-spawn":
        "the same under fork.",
    "tests/attack/test_cgroup.py::test_number_of_workers_fits_memory":
        "tests/policy/test_autoscale.py::test_growth_stops_at_memory_limit.",
    "tests/attack/test_memory.py::test_a_closed_loader_gives_its_pages_back":
        "closing_gives_the_pages_back of tests/c/mn_engine.c; this one counts pages of the whole machine.",
    # take long
    "tests/unet3d/test_unet3d_resume.py::test_the_losses_are_those_of_an_uninterrupted_run[pytorch-loader-2 2-11-skip":
        "pytorch-native skips, pytorch resumes by the rest.",
    "tests/ops/test_mapped.py::test_faults_of_others_end_the_program_as_before[faulthandler before":
        "faulthandler after, and the default action.",
    "tests/cache/test_processes.py::test_workers_that_begin_after_a_removal_find_the_values[torch-spawn":
        "the same under fork.",
    "tests/cache/test_processes.py::test_workers_that_begin_after_a_removal_find_the_values[torch-forkserver":
        "the same under fork.",
    "tests/cache/test_processes.py::test_workers_that_begin_after_a_removal_find_the_values[minato-spawn":
        "the same under fork.",
    "tests/cache/test_processes.py::test_workers_make_each_value_once[minato-spawn":
        "the same under fork.",
    "tests/cache/test_processes.py::test_workers_make_each_value_once[torch-none":
        "the same with workers.",
    "tests/cache/test_processes.py::test_workers_of_a_killed_trainer_leave_nothing[torch":
        "the same with minato's loader.",
    "tests/cache/test_processes.py::test_programs_are_one_job_if_their_ranks_differ[tasks]":
        "the same with ranks, and alone.",
    "tests/cache/test_processes.py::test_programs_are_one_job_if_their_ranks_differ[port]":
        "the same with ranks, and alone.",
    "tests/cache/test_processes.py::test_programs_are_one_job_if_their_ranks_differ[step]":
        "the same with ranks, and alone.",
    "tests/cache/test_processes.py::test_programs_are_one_job_if_their_ranks_differ[tasks 0]":
        "the same with ranks, and alone.",
    "tests/test_system.py::test_another_system[win32": "the same on darwin.",
    "tests/test_cli.py::test_closed_output_pipe_exits_without_error[top": "the same with info.",
    "tests/test_benchmarks.py::test_images":
        "test_brief_balance_prints_a_line_a_loader; tests/test_examples.py.",
    "tests/test_memory_budget.py::test_slow_consumer_does_not_fill_memory[whole batches-False":
        "the same retained and static.",
    "tests/test_memory_budget.py::test_slow_consumer_does_not_fill_memory[whole and static-False":
        "the same retained.",
    "tests/test_memory_budget.py::test_slow_consumer_does_not_fill_memory[ready-False":
        "the same retained.",
    "tests/test_memory_budget.py::test_slow_consumer_does_not_fill_memory[more workers-False":
        "other kinds.",
    "tests/workers/test_remote.py::test_batches_are_equal_when_actors_are_killed[300]": "the same with 20 kills.",
    "tests/test_resume_elastic.py::test_elastic_resume_with_killed_workers[2-3":
        "the same from four ranks to one.",
    "tests/test_resume_elastic.py::test_elastic_resume_with_killed_workers[1-4":
        "the same from four ranks to one.",
    "tests/test_resume_elastic.py::test_elastic_resume_with_killed_workers[3-2":
        "the same from four ranks to one.",
    "tests/attack/test_kills.py::test_workers_of_a_killed_zygote_go_on[balanced-spawn":
        "the same under fork.",
    "tests/attack/test_start_methods.py::test_a_packages_thread_makes_each_worker_start_itself":
        "test_a_directly_started_worker_is_replaced.",
    "tests/attack/test_start_methods.py::test_nothing_is_left":
        "tests/housekeeping.py looks for processes and memory after each test under spawn.",
    "tests/attack/test_start_methods.py::test_workers_write_to_private_large_data[spawn":
        "test_large_plain_data_comes_back_the_same.",
    "tests/attack/test_start_methods.py::test_unimportable_program_is_an_error[text0-if __name__ == '__main__':-spawn":
        "the other unimportable program.",
    "tests/attack/test_start_methods.py::test_files_opened_while_loading_are_per_worker[socket-spawn":
        "the same with a file.",
    "tests/attack/test_start_methods.py::test_files_opened_while_loading_are_per_worker[sqlite-spawn":
        "the same with a file.",
    "tests/attack/test_start_methods.py::test_workers_start_processes_by_the_same_method[forkserver":
        "the same under spawn.",
    "tests/attack/test_start_methods.py::test_dataset_threads_run_in_workers[balanced-spawn":
        "the same under forkserver.",
    "tests/attack/test_kills.py::test_killed_trainer_ends_all_processes[StartsThread(64)-spawn":
        "other datasets; the same under fork.",
    "tests/attack/test_kills.py::test_killed_trainer_ends_all_processes[Slow(64, 0.05)-fork":
        "the same with longer samples.",
    "tests/attack/test_processes.py::test_programs_that_a_dataset_starts_can_be_interrupted[spawn-each":
        "the same under fork.",
    "tests/attack/test_processes.py::test_interrupt_of_a_process_that_starts[spawn":
        "the same under fork.",
    "tests/attack/test_processes.py::test_interrupt_and_go_on[static": "the same balanced.",
    "tests/attack/test_namespaces.py::test_a_killed_trainer_takes_workers_along_without_proc[no /proc":
        "the same with another /proc.",
    "tests/attack/test_memory.py::test_very_many_batches_in_flight[static": "the same balanced.",
    "tests/contract/test_contexts.py::test_shared_objects_inside_a_dataset[minato-spawn]":
        "the same under forkserver.",
    "tests/iterators/test_planner.py::test_tensor_in_shared_memory_keeps_torchs_window[spawn-True":
        "the same under fork.",
    "tests/seeding/test_own_seeds.py::test_generator_shared_with_loader_draws_alike_after_a_resume[spawn":
        "the same under fork.",
    "tests/seeding/test_own_seeds.py::test_own_seeds_survive_other_start_methods":
        "test_seeded_generator_draws_alike_in_each_run_and_epoch.",
    "tests/workers/test_processes_in_samples.py::test_daemon_may_load_with_workers[spawn":
        "the same under fork.",
    "tests/workers/test_openmp_threads.py::test_a_fork_of_a_parallel_program_can_load[import minato-":
        "the same with minato imported later.",
    "tests/test_c_primitives.py::test_program_under_sanitizer":
        "test_program runs the same programs; make sanitize adds the sanitizers.",
    "tests/test_benchmarks.py::test_loader":
        "tests of the same loaders and cases; the numbers mean something on an idle machine only.",
    "tests/test_benchmarks.py::test_cache_memory_of_ranks": "test_cache_hits.",
    "tests/test_benchmarks.py::test_balance": "test_brief_balance_prints_a_line_a_loader.",
    "tests/test_benchmarks.py::test_leaks": "tests/contract/test_leaks.py.",
    "tests/test_benchmarks.py::test_startup": "tests/attack/test_start_methods.py.",
    "tests/test_benchmarks.py::test_workers": "tests/workers/test_worker_numbers.py.",
    "tests/test_benchmarks.py::test_volumes": "tests/test_examples.py runs volumes.",
    "tests/test_benchmarks.py::test_threads": "tests/workers/test_thread_pool.py.",
    "tests/test_benchmarks.py::test_many_workers": "tests/workers.",
    "tests/test_benchmarks.py::test_locality": "tests/iterators/test_locality.py.",
    "tests/test_docs.py::test_pictures_are_drawn": "the pictures are files that change rarely.",
    "tests/test_packaging.py::test_code_for_devices_is_optional": "the build with that code.",
    "tests/unet3d/test_unet3d_train.py::test_compare_runs_each_loader_and_draws":
        "tests/unet3d/test_unet3d_compare.py, with runs made up.",
    "tests/unet3d/test_unet3d_train.py::test_compare_with_two_processes_a_run":
        "test_distributed_ranks_share_the_epoch; test_compare_scales_over_processes.",
    "tests/unet3d/test_unet3d_accuracy.py::test_runs_are_saved_and_continued":
        "tests of its table; test_a_failing_run_is_reported.",
    "tests/unet3d/test_unet3d_gpu.py::test_cut_run_continues_despite_failing_loader":
        "the tests of its tables.",
    "tests/unet3d/test_unet3d_loaders.py::test_unbuilt_sources_are_reported":
        "the same message of minato itself.",
    "tests/attack/test_cgroup.py::test_eight_ranks_under_one_limit":
        "test_retained_batches_in_small_cgroup, with one rank.",
    "tests/attack/test_cgroup.py::test_retained_batches_in_small_cgroup[static]":
        "the same with balanced batches.",
    "tests/attack/test_kills.py::test_workers_of_a_killed_zygote_go_on[iterable-":
        "the same static.",
    "tests/attack/test_kills.py::test_workers_of_a_killed_zygote_go_on[balanced-forkserver]":
        "the same under spawn.",
    "tests/attack/test_kills.py::test_workers_of_a_killed_zygote_go_on[static-forkserver]":
        "the same under spawn.",
    "tests/attack/test_kills.py::test_workers_of_a_killed_zygote_go_on[static-spawn]":
        "the same balanced.",
    "tests/attack/test_kills.py::test_killed_trainer_with_stopped_zygote[spawn]":
        "the same under fork.",
    "tests/attack/test_kills.py::test_all_processes_killed_at_once_lose_no_sample[spawn]":
        "the same under fork.",
    "tests/attack/test_start_methods.py::test_nothing_is_left[forkserver]": "the same under spawn.",
    "tests/attack/test_start_methods.py::test_workers_write_to_private_large_data[forkserver]":
        "the same under spawn.",
    "tests/attack/test_start_methods.py::test_start_methods_give_the_same_data[spawn]":
        "the same under forkserver.",
    "tests/attack/test_start_methods.py::test_module_generator_is_per_worker[forkserver-static]":
        "the same under spawn.",
    "tests/analyze/test_programs.py::test_factories_and_their_steps_are_run":
        "tests of studies that begin from a program.",
    "tests/analyze/test_programs.py::test_an_iterable_dataset_is_studied":
        "the study of a map-style dataset.",
    "tests/analyze/test_programs.py::test_a_seeded_program_is_the_same_when_watched":
        "tests/analyze/test_watch.py::test_no_random_number_is_drawn.",
    "tests/analyze/test_programs.py::test_torchs_loader_is_studied_to_its_end":
        "the other studies of torch's loader.",
    "tests/analyze/test_programs.py::test_pause_studies_before_the_program_ends":
        "test_a_kill_while_paused_leaves_nothing.",
    "tests/attack/test_memory.py::test_two_hundred_half_read_loaders": "test_live_persistent_loaders.",
    "tests/test_benchmarks.py::test_cache_directory": "test_cache_hits; tests/cache/test_directory.py.",
    "tests/test_benchmarks.py::test_cache_of_pictures": "test_cache_hits.",
    "tests/test_benchmarks.py::test_cache_of_slow_storage": "test_cache_hits.",
    "tests/test_benchmarks.py::test_prefetch_memory":
        "tests/iterators/test_prefetching.py; tests/test_memory_budget.py.",
    "tests/test_benchmarks.py::test_kills": "tests/attack/test_kills.py.",
    "tests/test_packaging.py::test_wheel_holds_required_files":
        "test_a_wheel_of_python_alone_is_torchs_loader; make installed builds all wheels.",
    "tests/test_housekeeping.py::test_run_without_progress_is_ended":
        "test_xdist_runs_other_tests_after_hang.",
    "tests/test_examples.py::test_two_processes": "tests/integrations/test_ranks.py.",
    "tests/unet3d/test_unet3d_workloads.py::test_compare_runs_":
        "tests/unet3d/test_unet3d_compare.py; the tests of each workload's samples.",
    "tests/unet3d/test_unet3d_compare.py::test_compare_reports_time_to_target": "tests of its table.",
    "tests/unet3d/test_unet3d_compare.py::test_slow_shares_make_a_table": "tests of its table.",
    "tests/unet3d/test_unet3d_resume.py::test_two_ranks_resume_and_evaluate_as_one":
        "test_the_losses_are_those_of_an_uninterrupted_run; test_distributed_ranks_share_the_epoch.",
    "tests/attack/test_kills.py::test_a_stopped_zygote_hides_no_death":
        "test_killed_trainer_with_stopped_zygote; deaths at the same time as that of a killed one.",
    "tests/attack/test_kills.py::test_a_killed_zygote_takes_no_sample_along[zygote-spawn]":
        "the same under fork.",
    "tests/attack/test_kills.py::test_a_killed_zygote_takes_no_sample_along[zygote and worker-spawn]":
        "the same under fork.",
    "tests/attack/test_kills.py::test_random_kills_change_nothing[batches]": "batches in parts.",
    "tests/attack/test_kills.py::test_random_kills_change_nothing[large]": "small memory.",
    "tests/attack/test_kills.py::test_refused_replacement_is_retried[1": "another error number.",
    "tests/attack/test_processes.py::test_programs_that_a_dataset_starts_can_be_interrupted[spawn-forked":
        "each worker started by itself; fork.",
    "tests/attack/test_processes.py::test_programs_that_a_dataset_starts_can_be_interrupted[forkserver":
        "the same under spawn.",
    "tests/attack/test_processes.py::test_interrupt_of_a_process_that_starts[forkserver]":
        "the same under spawn.",
    "tests/attack/test_start_methods.py::test_directly_started_workers_may_die_together":
        "test_a_directly_started_worker_is_replaced.",
    "tests/attack/test_start_methods.py::test_unimportable_program_is_an_error[text0-if __name__ == '__main__':-forkserver":
        "the same under spawn.",
    "tests/attack/test_start_methods.py::test_unimportable_program_is_an_error[text1-SystemExit: 3-spawn":
        "the same under forkserver.",
    "tests/attack/test_start_methods.py::test_folder_made_while_loading_is_per_worker[forkserver]":
        "the same under spawn.",
    "tests/attack/test_start_methods.py::test_module_generator_is_per_worker[spawn-static]":
        "the same balanced.",
    "tests/attack/test_start_methods.py::test_workers_are_replaced[spawn]": "the same under forkserver.",
    "tests/attack/test_start_methods.py::test_tensors_sharing_memory_still_share_in_workers[spawn]":
        "the same under forkserver.",
    "tests/attack/test_start_methods.py::test_datasets_with_multiprocessing_objects[spawn]":
        "the same under forkserver.",
    "tests/attack/test_start_methods.py::test_dataset_threads_run_in_workers[static-": "the same balanced.",
    "tests/attack/test_limits.py::test_loader_works_with_small_address_space[12-8]": "the same with 4 GiB.",
    "tests/attack/test_namespaces.py::test_a_dead_worker_is_replaced_without_proc[another /proc-spawn]":
        "the same under fork.",
    "tests/cache/test_processes.py::test_workers_make_each_value_once[torch-spawn]":
        "minato's loader under spawn, torch's under fork.",
    "tests/cache/test_processes.py::test_a_small_file_system_ends_no_job[64M": "smaller file systems.",
    "tests/cache/test_kills.py::test_killed_processes_cost_no_sample_and_no_byte[directory]":
        "the same in memory; test_killed_writer_leaves_no_wrong_byte.",
    "tests/cache/test_directory.py::test_users_of_one_directory_share_nothing":
        "tests of who owns a cache's file.",
    "tests/cache/test_directory.py::test_the_next_run_makes_nothing[torch]": "the same with minato's loader.",
    "tests/workers/test_environment.py::test_worker_identities_count_up_as_in_torch[spawn]":
        "the same under fork.",
    "tests/workers/test_native.py::test_exit_in_mid_epoch[cycle]": "other ways to exit.",
    "tests/transport/test_collated_elsewhere.py::test_unpicklable_samples_are_collated_by_their_worker[{'multiprocessing_context': 'spawn'}-21]":
        "all samples of the dataset; the same under fork.",
    "tests/iterators/test_on_error_of_workers.py::test_exiting_or_unpicklable_sample_counts_as_failed[static-rows-":
        "rows balanced, batches static.",
    "tests/iterators/test_on_error_of_workers.py::test_exiting_or_unpicklable_sample_counts_as_failed[ready-collate-":
        "collate_fn in whole batches, rows in ready ones.",
    "tests/iterators/test_on_error_of_workers.py::test_exiting_or_unpicklable_sample_counts_as_failed[thread-collate-":
        "collate_fn in processes, rows in threads.",
    "tests/contract/test_differential.py::test_random_sequences_of_calls_match_torch[minato-static]":
        "test_random_loaders_match_torch[minato-static].",
    "tests/ops/test_mapped.py::test_faults_of_others_end_the_program_as_before[faulthandler after]":
        "the file that is read again.",
    "tests/ops/test_mapped.py::test_faults_of_others_end_the_program_as_before[ignored before]":
        "the default action.",
    "tests/integrations/test_ranks.py::test_lightning_resumes_each_ranks_own_stream":
        "test_lightning_resumes_each_rank_exactly; make libraries runs it.",
    "tests/analyze/test_programs.py::test_stop_ends_the_program_after_the_watch":
        "test_an_interrupt_leaves_nothing.",
    "tests/analyze/test_programs.py::test_a_folder_of_files_is_studied[sounds":
        "a folder of volumes; test_sounds_of_all_widths_are_decoded.",
    "tests/analyze/test_programs.py::test_torchrun_studies_local_rank_zero": "studies of one process.",
    "tests/analyze/test_programs.py::test_a_sample_that_hangs_is_named": "studies of samples that end.",
    "tests/analyze/test_programs.py::test_first_line_watches_where_path_is_ignored":
        "test_python_that_ignores_its_path_is_named.",
    "tests/analyze/test_programs.py::test_a_shell_script_is_followed": "studies of a program.",
    "tests/test_c_primitives.py::test_release_build_has_no_test_hooks":
        "make build compiles the same without asserts.",
    "tests/test_docs.py::test_programs_of_a_page[analyze.md]": "other pages; tests/analyze.",
    "tests/test_docs.py::test_programs_of_a_page[cache.md]": "other pages; tests/cache.",
    "tests/test_docs.py::test_programs_of_a_page[monitoring.md]": "other pages; tests/observe.",
    "tests/test_docs.py::test_programs_of_a_page[operators.md]": "other pages; tests/ops.",
    "tests/test_docs.py::test_programs_of_a_page[resume.md]": "other pages; tests/test_resume.py.",
    "tests/test_docs.py::test_programs_of_a_page[troubleshooting.md]": "other pages.",
    "tests/test_docs.py::test_programs_of_a_page[tuning.md]": "other pages.",
    "tests/test_docs.py::test_programs_of_a_page[when.md]": "other pages.",
    "tests/test_examples.py::test_example_runs[cache]": "other examples; tests/cache.",
    "tests/test_examples.py::test_example_runs[photos]": "image_folder.",
    "tests/test_packaging.py::test_installed_beside_torch": "test_a_wheel_of_python_alone_is_torchs_loader.",
    "tests/attack/test_memory.py::test_batches_of_very_many_samples[70000]": "20000 samples.",
    "tests/attack/test_namespaces.py::test_a_dead_worker_is_replaced_without_proc[another /proc-fork]":
        "the same with no /proc.",
    "tests/attack/test_odd_runs.py::test_a_sample_of_a_hundred_thousand_tensors":
        "test_a_sample_of_many_tensors_needs_no_descriptors.",
    "tests/transport/test_collated_elsewhere.py::test_unpicklable_samples_are_collated_by_their_worker[{'multiprocessing_context': 'spawn'}-0":
        "the same under fork.",
    "tests/contract/test_last_words.py::test_workers_with_endless_exit_handlers_are_killed[minato-forkserver":
        "the same under fork.",
    "tests/contract/test_errors.py::test_timeout_names_the_sample_and_shows_its_stack[minato-static":
        "the same balanced.",
    "tests/contract/test_errors.py::test_timeout_never_repeats_work[minato-static": "the same balanced.",
    "tests/contract/test_errors.py::test_exception_that_ends_worker_is_reported[minato-static":
        "the same balanced.",
    "tests/iterators/test_balance.py::test_waiting_takes_no_cpu_time[out of order]": "the same in order.",
    "tests/ops/test_sanitizers.py::test_fuzz_asan": "tests of the same functions; make sanitize.",
    "tests/seeding/test_same_data.py::test_lazy_generator_is_seeded_with_other_options[options1":
        "other options.",
    "tests/analyze/test_programs.py::test_a_program_without_a_batch_is_reported":
        "test_a_program_without_a_loader_exits_three.",
    "tests/analyze/test_programs.py::test_short_epochs_match_programs_own_rate[torch":
        "the same with minato's loader.",
    "tests/analyze/test_memory.py::test_large_dataset_keeper_dies_before_program[program0-":
        "where the copy is ended.",
    "tests/test_benchmarks.py::test_cache_table_shows_met_and_missed_limits":
        "test_cache_table_begins_no_part_late; test_cache_hits.",
    "tests/test_benchmarks.py::test_sizes_are_weighed_where_files_are_listed":
        "tests/iterators/test_file_sizes.py.",
    "tests/test_packaging.py::test_wheel_holds_nothing_else": "make wheels; make installed.",
    "tests/test_packaging.py::test_wheel_holds_every_module":
        "test_a_wheel_of_python_alone_is_torchs_loader.",
    "tests/test_packaging.py::test_wheel_holds_device_code_if_nvcc_exists": "make wheels.",
    "tests/test_packaging.py::test_build_needs_numpy_and_setuptools_only": "make wheels.",
    "tests/test_packaging.py::test_isolated_build_finds_target_torch": "make build, which is not isolated.",
    "tests/test_packaging.py::test_torch_extension_can_be_left_out": "make wheels.",
    "tests/test_packaging.py::test_installed_without_torch": "tests/test_system.py.",
    "tests/test_types.py::test_a_stub_that_disagrees_is_noticed": "test_stub_agrees_with_the_extension.",
    "tests/test_resume_elastic.py::test_torchrun_resumes_three_ranks_on_two":
        "test_elastic_resume_loses_and_doubles_nothing; test_elastic_ranks_are_read_for_each_epoch.",
    "tests/test_examples.py::test_resume_example_continues_after_ctrl_c": "tests/test_resume.py.",
    "tests/test_examples.py::test_an_operator_in_c": "tests/ops/test_user_operator.py.",
    "tests/ops/test_sanitizers.py::test_another_processor": "tests of the same functions; make aarch64.",
    "tests/ops/test_sanitizers.py::test_threads_tsan": "tests of the same functions; make sanitize.",
    "tests/contract/test_exit.py::test_spawned_workers_under_main_guard[minato-static": "the same balanced.",
    "tests/attack/test_kills.py::test_all_processes_killed_at_once_lose_no_sample[forkserver]":
        "the same under fork.",
    "tests/attack/test_kills.py::test_a_killed_zygote_takes_no_sample_along[worker and zygote-spawn]":
        "the same under fork.",
    "tests/attack/test_kills.py::test_replacement_worker_has_its_own_streams[spawn]":
        "the same under fork.",
    "tests/attack/test_odd_runs.py::test_a_clock_that_jumps_by_hours[static-0]": "the same balanced.",
    "tests/seeding/test_init_states.py::test_workers_of_two_seeds_in_one_state[constant-numpy.random-options3]":
        "the same under fork.",
    "tests/seeding/test_init_states.py::test_written_seed_is_noticed_in_first_epoch[written-numpy.random-options3]":
        "the same under fork.",
    "tests/seeding/test_seeding.py::test_equal_keys_draw_equally_in_every_process[spawn]":
        "the same under fork.",
    "tests/seeding/test_seeding.py::test_workers_inherit_probes[spawn]": "the same under fork.",
    "tests/observe/test_top.py::test_key_ends_top_in_a_terminal[ctrl-c]": "the same with q.",
    "tests/analyze/test_environments.py::test_threads_that_share_a_lock_are_named":
        "tests/analyze/test_limits.py.",
    "tests/analyze/test_environments.py::test_ceiling_of_a_queued_step_is_found":
        "tests/analyze/test_limits.py.",
    "tests/analyze/test_memory.py::test_large_dataset_keeper_dies_before_program[program2-":
        "where the copy is ended.",
    "tests/analyze/test_own_files.py::test_a_killed_study_leaves_no_temporary_folder[False]":
        "the same with namespaces.",
    "tests/analyze/test_own_files.py::test_a_program_that_writes_files_keeps_them[a list-True]":
        "a cache.",
    "tests/analyze/test_own_files.py::test_a_program_that_writes_files_keeps_them[a database-True]":
        "a cache.",
    "tests/analyze/test_own_files.py::test_a_program_that_writes_files_keeps_them[a memory map-True]":
        "a cache; the same without namespaces.",
    "tests/analyze/test_programs.py::test_a_dataset_with_a_manager_is_told_so[options1]": "other options.",
    "tests/analyze/test_programs.py::test_a_program_too_short_for_a_pause_is_named":
        "test_an_environment_without_minato_is_studied.",
    "tests/workers/test_signals.py::test_signals_to_job_are_left_to_trainer[spawn]":
        "the same under fork.",
    "tests/workers/test_signals.py::test_signals_to_job_are_left_to_trainer[forkserver]":
        "the same under fork.",
    "tests/iterators/test_planner.py::test_tensor_in_shared_memory_keeps_torchs_window[spawn-False]":
        "the same under fork.",
    "tests/iterators/test_cost_hints.py::test_hint_and_sample_draw_equal_numbers[spawn]":
        "the same under fork.",
    "tests/unet3d/test_unet3d_resume.py::test_the_losses_are_those_of_an_uninterrupted_run[minato-loader-2 1-11-state]":
        "the same with draws of samples; stops in the second epoch with others.",
    "tests/unet3d/test_unet3d_resume.py::test_the_losses_are_those_of_an_uninterrupted_run[minato-static-loader-2 2-11-state]":
        "the same resumed by the rest.",
    "tests/unet3d/test_unet3d_resume.py::test_the_losses_are_those_of_an_uninterrupted_run[minato-native-loader-1 2-11-state]":
        "the same with draws of samples.",
    "tests/unet3d/test_unet3d_resume.py::test_the_losses_are_those_of_an_uninterrupted_run[minato-native-loader-0 0-11-skip]":
        "pytorch-native skips, minato without workers too.",
    "tests/unet3d/test_unet3d_resume.py::test_the_losses_are_those_of_an_uninterrupted_run[pytorch-native-loader-0 0-11-skip]":
        "the same with a worker.",
    "tests/ops/test_dataset.py::test_set_epoch_reaches_workers_that_stay[spawn]":
        "the same under fork.",
}  # fmt: skip


def is_slow(test_id: str) -> bool:
    many = SAME_WHEN_STATIC, MORE_RANKS
    return any(one.match(test_id) for one in many) or test_id.startswith(tuple(SLOW))
