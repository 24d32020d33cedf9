"""Tests that `make test` leaves to `make slow`, because they take long and rarely find anything
that the rest does not.

Each entry is the beginning of a test's id, followed by what `make test` still runs of that kind.
tests/test_lint.py finds entries that name no test.
"""

from __future__ import annotations

SLOW: dict[str, str] = {
    "tests/test_c_primitives.py::test_program_under_sanitizer":
        "test_program runs the same programs; make sanitize adds the sanitizers.",
    "tests/test_benchmarks.py::test_loader":
        "tests of the same loaders and cases; the numbers mean something on an idle machine only.",
    "tests/test_benchmarks.py::test_balance": "test_brief_balance_prints_a_line_a_loader.",
    "tests/test_benchmarks.py::test_leaks": "tests/contract/test_leaks.py.",
    "tests/test_benchmarks.py::test_startup": "tests/attack/test_start_methods.py.",
    "tests/test_benchmarks.py::test_workers": "tests/workers/test_worker_numbers.py.",
    "tests/test_benchmarks.py::test_volumes": "tests/test_examples.py runs volumes.",
    "tests/test_benchmarks.py::test_threads": "tests/workers/test_thread_workers.py.",
    "tests/test_benchmarks.py::test_many_workers": "tests/workers.",
    "tests/test_benchmarks.py::test_locality": "tests/iterators/test_locality.py.",
    "tests/test_docs.py::test_pictures_are_drawn": "the pictures are files that change rarely.",
    "tests/test_packaging.py::test_code_for_devices_is_optional": "the build with that code.",
    "tests/unet3d/test_unet3d_train.py::test_compare_runs_each_loader_and_draws":
        "test_compare_with_two_processes_a_run.",
    "tests/unet3d/test_unet3d_gpu.py::test_cut_run_continues_despite_failing_loader":
        "the tests of its tables.",
    "tests/unet3d/test_unet3d_loaders.py::test_unbuilt_sources_are_reported":
        "the same message of minato itself.",
    "tests/attack/test_cgroup.py::test_eight_ranks_under_one_limit":
        "test_retained_batches_in_small_cgroup, with one rank.",
    "tests/attack/test_cgroup.py::test_retained_batches_in_small_cgroup[static]":
        "the same with balanced batches.",
    "tests/attack/test_kills.py::test_killed_zygote_and_standby_are_both_replaced[iterable-forkserver]":
        "the same under spawn.",
    "tests/attack/test_kills.py::test_killed_zygote_and_standby_are_both_replaced[balanced-forkserver]":
        "the same under spawn.",
    "tests/attack/test_kills.py::test_killed_zygote_and_standby_are_both_replaced[static-forkserver]":
        "the same under spawn.",
    "tests/attack/test_kills.py::test_killed_trainer_with_stopped_zygote[spawn-":
        "the same under fork.",
    "tests/attack/test_kills.py::test_all_processes_killed_at_once_lose_no_sample[spawn]":
        "the same under fork.",
    "tests/attack/test_start_methods.py::test_nothing_is_left[forkserver]": "the same under spawn.",
    "tests/attack/test_start_methods.py::test_workers_write_to_private_large_data[forkserver]":
        "the same under spawn.",
    "tests/attack/test_start_methods.py::test_start_methods_give_the_same_data[forkserver]":
        "the same under spawn.",
    "tests/attack/test_start_methods.py::test_module_generator_is_per_worker[forkserver-static]":
        "the same under spawn.",
    "tests/analyze/test_programs.py::test_factories_and_their_steps_are_run":
        "tests of studies that begin from a program.",
    "tests/analyze/test_programs.py::test_an_iterable_dataset_is_studied":
        "the study of a map-style dataset.",
    "tests/analyze/test_programs.py::test_a_seeded_program_is_the_same_when_watched[0]":
        "the same with two workers.",
    "tests/analyze/test_programs.py::test_torchs_loader_is_studied_to_its_end":
        "the other studies of torch's loader.",
    "tests/analyze/test_programs.py::test_pause_studies_before_the_program_ends":
        "test_a_kill_while_paused_leaves_nothing.",
    "tests/attack/test_memory.py::test_two_hundred_half_read_loaders": "test_live_persistent_loaders.",
}  # fmt: skip


def is_slow(test_id: str) -> bool:
    return any(test_id.startswith(beginning) for beginning in SLOW)
