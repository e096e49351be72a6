"""Which scenarios the README's test command runs: at least one for each verb, launcher, way in and hook of torch.

A kind of finding is held by the tables of ``tests/rules`` and ``tests/unit``. All other scenarios are marked ``full``,
and so is each that goes by speed. ``tests/contract/test_rule_recipe.py`` holds that nothing is left out.
"""

FIRST = {
    "test_verdicts.py": (
        "test_the_table_covers_each_kind",
        *(f"test_the_fault_is_found[{job}]" for job in (
            "stuck_lock-OFF", "crash_backward-DETAIL", "killed_sigkill-OFF",
            "mismatch_operation-DETAIL",
        )),
    ),
    "test_healthy.py": ("test_a_healthy_job_stays_without_verdict[clean_groups-DETAIL]",),
    "test_disagreement.py": ("test_the_ranks_that_disagree_are_found[model_frozen]",),
    "test_consistency.py": ("test_gradients_that_are_not_synchronized", "test_a_sample_that_holds_nan"),
    "test_data.py": (
        "test_each_way_to_share_out_badly_is_found_at_its_line",
        "test_ranks_ask_their_loaders_and_one_report_comes_of_it[torchrun",
    ),
    "test_check_consistency.py": ("test_a_healthy_model_is_one_model",),
    "test_parallel.py": ("test_the_fault_is_found[fsdp2",),
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
        "test_streams_directory_arguments_and_status_are_those_of_torchrun[5]",
        "test_a_folder_with_a_planted_link", "test_a_foreign_and_a_damaged_folder",
    ),
    "test_tune.py": ("test_ctrl_c",),
    "test_status.py": ("test_who_waits_for_whom",),
    "test_streams.py": ("test_a_job_runs_where_streams_are_closed[all", "test_a_verb_ends"),
    "test_kept_runs.py": ("test_restarts_and_requeued_runs_are_one_history",),
    "attach/test_verb.py": ("test_the_rank_that_the_others_wait_for",),
    "attach/test_kubectl.py": ("test_all_pods_are_judged_together",),
    "in_code/test_watch.py": ("test_a_hung_rank", "test_a_healthy_job_is_silent_and_keeps_its_environment[none]"),
    "in_code/test_pytest_plugin.py": ("test_without_the_option",),
    "attach/test_found.py": ("test_a_process_that_is_no_rank",),
    "harmless/test_scripts.py": tuple(
        f"test_a_script_runs_as_without_the_recorder[{name}]" for name in (
            "becomes_another", "closes_all_files", "dies_of_sigterm", "forks", "handles_signals", "hooks_exceptions",
        )
    ),
    "harmless/test_broken_recorder.py": (
        "test_a_script_that_never_imports_torch_runs_whatever_fails[start]", "test_a_recorder_that_cannot_start",
    ),
    "nodes/test_basic.py": ("test_two_healthy_hosts",),
    "nodes/test_verdicts.py": ("test_the_culprit_on_another_node_is_named[deadlock]",),
    "nodes/test_kubernetes.py": ("test_each_pod_is_a_node",),
    "nodes/test_slurm.py": ("test_a_hang_of_tasks_that_are_ranks",),
    "nodes/test_signals.py": ("test_two_processes_become_the_ranks",),
    "bandwidth/test_verb.py": ("test_under_torchrun_rank_0_alone_reports",),
    "bandwidth/test_stops.py": ("test_a_rank_that_is_killed_leaves_what_was_measured[False]",),
    "bandwidth/test_watch.py": ("test_an_exception",),
    "check_env/test_fleet.py": ("test_two_ranks_make_one_report", "test_a_slurm_step_with_a_master_that_is_wrong"),
    "check_env/test_launch.py": ("test_a_plain_shell", "test_torchrun_on_one_host"),
    "check_env/test_limits.py": (
        "test_a_low_limit_on_open_files", "test_a_broken_torch_is_a_finding[raise ImportError",
    ),
    "check_env/test_network.py": ("test_a_healthy_host", "test_two_hosts_that_differ"),
    "check_env/test_variables.py": ("test_variables_of_every_class",),
    "check_env/test_gpus.py": (
        "test_a_gpu_that_hangs", "test_check_env_blames_a_lost_gpu", "test_gpus_are_counted[lost",
        "test_a_process_that_the_kernel_does_not_wake", "test_a_line_of_the_real_log",
    ),
    "check_env/test_links.py": ("test_pci_of_this_machine_is_reported",),
    "rendezvous/test_network.py": ("test_fault[other ports are prohibited]",),
    "rendezvous/test_meeting.py": ("test_under_torchrun_one_report_for_all_ranks",),
}  # fmt: skip
