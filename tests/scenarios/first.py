"""Which scenarios the README's test command runs: at least one for each verb, launcher, way in and hook of torch.

A kind of finding is held by the tables of ``tests/rules`` and ``tests/unit``. All other scenarios are marked ``full``,
and so is each that goes by speed. ``tests/contract/test_rule_recipe.py`` holds that nothing is left out.
"""

FIRST = {
    "test_verdicts.py": (
        "test_the_table_covers_each_kind",
        *(f"test_the_fault_is_found[{job}]" for job in (
            "stuck_lock-OFF", "crash_backward-DETAIL", "killed_sigkill-OFF",
        )),
    ),
    "test_healthy.py": ("test_a_healthy_job_stays_without_verdict[clean_groups-DETAIL]",),
    "test_hooks.py": ("test_every_hook_is_found",),
    "test_data.py": ("test_ranks_ask_their_loaders_and_one_report_comes_of_it[torchrun",),
    "test_check_consistency.py": ("test_a_healthy_model_is_one_model",),
    "test_launchers.py": (
        "test_a_hung_shell_script_is_stopped_with_all_its_ranks",
        "test_a_rank_that_a_launcher_stops_is_a_victim_and_leaves_its_stack[accelerate",
        "test_a_rank_that_a_launcher_stops_is_a_victim_and_leaves_its_stack[mpirun",
        "test_a_command_that_is_a_rank_itself", "test_a_command_that_spawns_its_ranks",
        "test_a_command_line_that_cannot_run_starts_nothing", "test_each_attempt_has_a_section_of_its_own",
    ),
    "test_lifecycle.py": (
        "test_ctrl_c_ends_the_ranks_and_leaves_a_report", "test_a_killed_watcher_leaves_no_rank",
        "test_sigterm_of_a_scheduler",
        "test_streams_directory_arguments_and_status_are_those_of_torchrun",
        "test_a_folder_with_a_planted_link", "test_a_foreign_and_a_damaged_folder",
        "test_a_job_runs_where_streams_are_closed", "test_a_verb_ends",
    ),
    "test_tune.py": ("test_ctrl_c",),
    "test_status.py": ("test_who_waits_for_whom",),
    "test_kept_runs.py": ("test_restarts_and_requeued_runs_are_one_history",),
    "attach/test_verb.py": ("test_the_rank_that_the_others_wait_for",),
    "attach/test_kubectl.py": ("test_all_pods_are_judged_together",),
    "in_code/test_watch.py": ("test_a_hung_rank", "test_a_healthy_job_is_silent_and_keeps_its_environment[none]"),
    "in_code/test_pytest_plugin.py": ("test_without_the_option",),
    "attach/test_found.py": ("test_a_process_that_is_no_rank",),
    "harmless/test_broken_recorder.py": (
        "test_a_recorder_that_cannot_start",
        *(f"test_a_script_runs_as_without_the_recorder[{name}]" for name in (
            "becomes_another", "dies_of_sigterm", "hooks_exceptions",
        )),
    ),
    "nodes/test_verdicts.py": ("test_the_culprit_on_another_node_is_named[deadlock]",),
    "nodes/test_kubernetes.py": ("test_each_pod_is_a_node",),
    "nodes/test_slurm.py": ("test_a_hang_of_tasks_that_are_ranks",),
    "bandwidth/test_verb.py": ("test_under_torchrun_rank_0_alone_reports",),
    "check_env/test_fleet.py": ("test_two_ranks_make_one_report",),
    "check_env/test_limits.py": (
        "test_a_low_limit_on_open_files", "test_a_broken_torch_is_a_finding[raise ImportError",
    ),
    "check_env/test_network.py": ("test_a_healthy_host",),
    "check_env/test_variables.py": (
        "test_variables_of_every_class", "test_torchrun_on_one_host", "test_pci_of_this_machine_is_reported",
    ),
    "check_env/test_gpus.py": (
        "test_a_gpu_that_hangs", "test_check_env_blames_a_lost_gpu",
    ),
    "rendezvous/test_meeting.py": ("test_under_torchrun_one_report_for_all_ranks",),
}  # fmt: skip

SECOND = {
    "test_verdicts.py": (
        *(f"test_the_fault_is_found[{job}" for job in (
            "stuck_gil", "stuck_loader_worker", "stuck_evaluation", "exit_hang_child", "stuck_everywhere",
            "early_exit_hard", "early_exit_before_init",
            "crash_loader_worker", "crash_before_init", "killed_segv", "stopped_signal", "stopped_debugger",
            "missing_duplicate", "exit_hang_atexit", "mismatch_operation-OFF", "mismatch_shape",
        )),
        "test_a_rank_that_its_own_watchdog", "test_the_world_that_a_script",
    ),
    "test_healthy.py": tuple(f"test_a_healthy_job_stays_without_verdict[{job}" for job in (
        "clean_point_to_point", "clean_join", "clean_compile", "clean_accelerate",
        "clean_lightning",
        "clean_transformers",
    )),
    "test_disagreement.py": (
        "test_the_ranks_that_disagree_are_found[deadlock_groups",
        "test_ranks_that_may_differ_are_left_alone[clean_skips",
    ),
    "test_parallel.py": (
        "test_the_fault_is_found[pipeline-stuck", "test_the_fault_is_found[hybrid-stuck",
        "test_healthy_jobs_stay_without_verdict[DETAIL",
    ),
    "test_consistency.py": (
        "test_gradients_that_are_not_synchronized", "test_the_same_done_right",
        "test_a_buffer_without_the_common_value_is_found[fsdp2-empty",
        "test_gradients_that_do_no_harm",
    ),
    "test_causes.py": ("test_the_holder_of_a_file_lock", "test_a_child_that_died", "test_a_limit_of_addresses"),
    "test_data.py": ("test_each_way_to_share_out_badly",),
}  # fmt: skip
"""Of the scenarios whose runs are kept, those of which ``.ci/run`` starts the jobs too."""
