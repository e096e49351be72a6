"""Which scenarios the README's test command runs: at least one for each kind, verb and launcher.

All others are marked ``full``. ``tests/contract/test_first_scenarios.py`` holds that nothing is left out.
"""

ALL = ("",)
FIRST = {
    "test_verdicts.py": (
        "test_the_table_covers_each_kind",
        *(f"test_the_fault_is_found[{job}]" for job in (
            "stuck_lock-OFF", "stuck_loader_worker-OFF", "early_exit_return-OFF",
            "crash_backward-DETAIL", "killed_sigkill-OFF", "stopped_signal-OFF", "missing_world-OFF",
            "exit_hang_thread-DETAIL", "mismatch_shape-OFF", "mismatch_operation-DETAIL",
        )),
    ),
    "test_healthy.py": tuple(
        f"test_a_healthy_job_stays_without_verdict[{job}]" for job in (
            "clean_plain-OFF", "clean_groups-DETAIL", "clean_accelerate-OFF",
        )
    ),
    "test_disagreement.py": (
        "test_the_ranks_that_disagree_are_found[mismatch_lone]", "test_the_ranks_that_disagree_are_found[model_frozen]",
    ),
    "test_straggler.py": ("test_the_slow_rank_is_named_with_its_phase_and_line[straggler_before]",),
    "test_causes.py": ("test_a_network_that_fails_in_mid_job_is_no_ranks_fault[loopback down]",),
    "test_unused.py": ("test_gradients_that_one_rank_leaves_out",),
    "test_local_gradients.py": ("test_a_sample_that_holds_nan",),
    "test_consistency.py": (
        "test_gradients_that_are_not_synchronized", "test_what_no_rank_does_unlike_the_others",
        "test_models_that_nobody_wrapped",
    ),
    "test_data.py": (
        "test_each_way_to_share_out_badly_is_found_at_its_line", "test_no_way_to_share_out_well_gives_an_alarm",
    ),
    "test_check_data.py": ALL,
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
        "test_streams_directory_arguments_and_status_are_those_of_torchrun[5]", "test_secrets_stay_out_of_the_folder",
        "test_a_folder_with_a_planted_link", "test_a_foreign_and_a_damaged_folder",
        "test_an_abort_at_exit_is_no_failure_of_training",
    ),
    "test_tune.py": (
        "test_the_setting_that_shortens_the_step", "test_steps_that_differ",
        "test_ctrl_c",
    ),
    "test_status.py": (
        "test_a_job_that_trains", "test_who_waits_for_whom",
    ),
    "test_streams.py": (
        "test_a_job_runs_where_streams_are_closed[all", "test_a_verb_ends",
    ),
    "test_metrics.py": ("test_a_job_that_trains",),
    "test_plain_install.py": (
        "test_nothing_of_the_extras_is_there", "test_the_extra_of_the_server", "test_other_verbs[check-env",
        "test_other_verbs[check-data", "test_other_verbs[explain",
    ),
    "test_example_train.py": ("test_one_process",),
    "test_history.py": ALL,
    "test_demo.py": ("test_the_demo_finds_its_fault[input-bound]",),
    "speed/test_findings.py": (
        *(f"test_the_fault_is_found_with_its_ranks_and_line[{job}]" for job in (
            "accumulation every_part", "buckets one_for_each_tensor",
            "buffers mask", "by_hand one_by_one", "communication table",
            "data_parallel trains", "each_step gathers", "gc_pauses collects", "imbalance lengths",
            "input_bound behind", "periodic_stall epochs", "rank_zero logs", "threads of_a_large_machine",
        )),
        "test_a_healthy_job_that_looks_alike_is_left_alone[quiet small]",
        "test_a_healthy_job_that_looks_alike_is_left_alone[input_bound hidden]",
    ),
    "speed/test_unused.py": ("test_find_unused_parameters_without_any[never",),
    "attach/test_verb.py": (
        "test_the_rank_that_the_others_wait_for", "test_a_job_that_moves",
    ),
    "attach/test_hung.py": ("test_a_hung_job_of_torchrun",),
    "attach/test_slurm.py": ("test_all_nodes_are_judged_together",),
    "attach/test_kubectl.py": ("test_all_pods_are_judged_together",),
    "attach/test_wrapped.py": ("test_the_rank_at_fault",),
    "in_code/test_watch.py": (
        "test_a_hung_rank", "test_a_rank_that_raises", "test_a_healthy_job_is_silent_and_keeps_its_environment[none]",
    ),
    "in_code/test_callbacks.py": ("test_accelerates_log_gets_the_verdict_of_a_slow_training[slow",),
    "in_code/test_pytest_plugin.py": ("test_without_the_option",),
    "attach/test_rights.py": ("test_without_the_right_to_trace",),
    "attach/test_found.py": ("test_of_several_jobs", "test_a_process_that_is_no_rank"),
    "harmless/test_scripts.py": ALL,
    "harmless/test_broken_recorder.py": (
        "test_a_script_that_never_imports_torch_runs_whatever_fails[start]", "test_a_recorder_that_cannot_start",
    ),
    "harmless/test_bounds.py": ("test_ends_of_many_children",),
    "harmless/test_command.py": ("test_isolated_pythons_run",),
    "nodes/test_basic.py": ("test_two_healthy_hosts",),
    "nodes/test_verdicts.py": ("test_the_culprit_on_another_node_is_named[deadlock]",),
    "nodes/test_kubernetes.py": (
        "test_each_pod_is_a_node", "test_the_pods_commands_run_as_one_job[kubernetes-pytorchjob.yaml]",
    ),
    "nodes/test_slurm.py": ("test_a_hang_of_tasks_that_are_ranks",),
    "nodes/test_signals.py": ("test_two_processes_become_the_ranks",),
    "bandwidth/test_verb.py": ("test_under_torchrun_rank_0_alone_reports",),
    "bandwidth/test_localize.py": (
        "test_three_hosts_that_are_well", "test_a_rank_that_comes_late_to_every_call",
        "test_of_two_ranks_it_cannot_be_determined_which_is_slow",
    ),
    "bandwidth/test_stops.py": (
        "test_a_rank_that_never_calls", "test_a_rank_that_is_killed_leaves_what_was_measured[False]",
        "test_an_exception_is_the_verdict",
    ),
    "bandwidth/test_wrong.py": (
        "test_an_altered_element_is_named_with_rank_index_expected_and_found[float32]",
        "test_right_data_are_no_finding",
    ),
    "bandwidth/test_agreement.py": ("test_a_rank_with_other_settings", "test_a_rank_with_another_version"),
    "bandwidth/test_reasons.py": ("test_a_machine_as_it_should_be", "test_a_variable_left_set"),
    "bandwidth/test_watch.py": (
        "test_healthy_ranks", "test_a_killed_rank", "test_a_rank_that_leaves", "test_an_exception",
        "test_a_rank_that_asks",
    ),
    "check_env/test_fleet.py": (
        "test_two_ranks_make_one_report", "test_two_hosts_by_hand",
        "test_a_rank_that_is_interrupted", "test_a_slurm_step",
    ),
    "check_env/test_launch.py": ("test_a_plain_shell", "test_variables_of_a_shell", "test_torchrun_on_one_host"),
    "check_env/test_launch_slurm.py": (
        "test_steps_as_they_should_be", "test_each_node_looks", "test_two_rendezvous", "test_a_variable_of_one_node",
        "test_more_ranks_than_tasks", "test_one_cpu_for_a_task",
    ),
    "check_env/test_limits.py": ALL,
    "check_env/test_network.py": ALL,
    "check_env/test_variables.py": ALL,
    "check_env/test_gpus.py": ALL,
    "check_env/test_links.py": ALL,
    "rendezvous/test_network.py": (
        *(f"test_fault[{fault}]" for fault in (
            "the store's port is reset",
            "other ports are prohibited", "large packets vanish", "packets are lost", "an interface that is not there",
            "the grammar of NCCL in Gloo's variable",
        )),
        "test_nobody_listens_at_the_store",
    ),
    "rendezvous/test_meeting.py": (
        "test_under_torchrun_one_report_for_all_ranks",
        "test_where_the_own_port_is_closed_the_nodes_meet_by_the_store",
    ),
    "rendezvous/test_names.py": (
        "test_four_hosts_that_are_well",
        "test_a_host_name_that_is_loopback[on the lower address]",
        "test_a_clock_that_is_behind",
    ),
}  # fmt: skip
