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
            "becomes_another", "dies_of_sigterm", "hooks_exceptions"
        )
    ),
    "harmless/test_broken_recorder.py": ("test_a_recorder_that_cannot_start",),
    "nodes/test_verdicts.py": ("test_the_culprit_on_another_node_is_named[deadlock]",),
    "nodes/test_kubernetes.py": ("test_each_pod_is_a_node",),
    "nodes/test_slurm.py": ("test_a_hang_of_tasks_that_are_ranks",),
    "bandwidth/test_verb.py": ("test_under_torchrun_rank_0_alone_reports",),
    "check_env/test_fleet.py": ("test_two_ranks_make_one_report",),
    "check_env/test_launch.py": ("test_torchrun_on_one_host",),
    "check_env/test_limits.py": (
        "test_a_low_limit_on_open_files", "test_a_broken_torch_is_a_finding[raise ImportError",
    ),
    "check_env/test_network.py": ("test_a_healthy_host",),
    "check_env/test_variables.py": ("test_variables_of_every_class",),
    "check_env/test_gpus.py": (
        "test_a_gpu_that_hangs", "test_check_env_blames_a_lost_gpu",
    ),
    "check_env/test_links.py": ("test_pci_of_this_machine_is_reported",),
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

NIGHT = {
    "nodes/test_basic.py": ("test_a_first_host_that_dies", "test_a_launcher_that_would_start_again"),
    "nodes/test_signals.py": ("test_a_warning_that_ends_torchrun",),
    "nodes/test_verdicts.py": (
        *(f"test_the_culprit_on_another_node_is_named[{kind}]" for kind in (
            "stuck", "mismatch", "stopped", "early-exit", "crash",
        )),
        "test_a_node_that_never_comes[torchrun]", "test_a_first_node_that_never_comes",
        "test_a_ddpdoctor_that_is_killed", "test_healthy_nodes",
    ),
    "check_env/test_fleet.py": (
        "test_a_second_time", "test_two_hosts_alike_under", "test_two_hosts_by_hand", "test_a_slurm_task_alone",
        "test_torchrun_within",
    ),
    "check_env/test_gpus.py": (
        "test_gpus_are_counted", "test_a_count_that_hangs", "test_a_library_without", "test_a_hidden_gpu",
    ),
    "check_env/test_launch.py": ("test_variables_of_a_shell",),
    "check_env/test_launch_slurm.py": (
        "test_steps_as_they_should_be[step1", "test_ranks_made_from", "test_more_ranks_than", "test_one_rank_for_all",
        "test_a_variable_of_one", "test_each_node_looks", "test_a_rendezvous_that", "test_one_cpu_for", "test_a_batch",
        "test_a_torchrun_on_each",
    ),
    "check_env/test_limits.py": (
        "test_few_tasks", "test_a_quota_of_a_group", "test_a_small_shm[64m", "test_a_small_shm[256m",
        "test_a_small_shm_while", "test_a_full_and_a_closed_place", "test_a_short_queue", "test_the_command_that",
        "test_a_limit_on_open_files_that", "test_openmp", "test_a_broken_torch_is_a_finding[import os; os.kill",
        "test_a_host_whose_clock_is_wrong[3", "test_deep",
    ),
    "check_env/test_network.py": (
        "test_a_name_that_means_loopback[variables1", "test_an_interface_that_cannot_carry_data[is down",
        "test_an_interface_that_cannot_carry_data[has no link",
        "test_an_interface_that_cannot_carry_data[has no address-NCCL",
        "test_a_packet_filter_that_keeps_the_others_out[iptables", "test_a_remedy", "test_nccl_takes",
        "test_a_port_with",
        "test_a_name_of_another",
    ),
    "check_env/test_variables.py": (
        "test_torch_itself_stops_at_a_value_that_is_an_error_here[TORCH_GLOO", "test_a_file_in_the_home",
        "test_the_machines",
        "test_torch_itself_stops_at_a_value_that_is_an_error_here[GLOO", "test_ranks_with_one",
        "test_torch_itself_stops_at_a_value_that_is_an_error_here[TORCH_DIST_INIT", "test_a_file_that_is_named",
    ),
    "rendezvous/test_network.py": tuple(f"test_fault[{name}]" for name in (
        "the store's port is reset", "the store's port is prohibited", "another program has the port",
        "what answers is no store", "other ports are dropped both ways", "other ports are prohibited",
        "an interface that is not there", "the grammar of NCCL in Gloo's variable",
    )),
    "rendezvous/test_names.py": (
        "test_two_of_four", "test_a_master_that_resolves", "test_a_master_that_is_a_number", "test_an_endpoint_on",
        "test_a_host_name_that_is_loopback[on the higher", "test_a_host_name_that_is_missing", "test_two_nodes_against",
        "test_a_different_id",
    ),
    "rendezvous/test_meeting.py": (
        "test_in_a_slurm_step", "test_where_both_ports", "test_where_the_first_node", "test_an_endpoint_without",
    ),
    "attach/test_found.py": ("test_a_pid_that", "test_a_folder_that", "test_the_secrets"),
    "attach/test_hung.py": (
        "test_a_job_that_trains", "test_the_worker_of_a_loader", "test_torchs_debug",
        "test_ras_is_asked_where_a_rank_serves_it[old",
        "test_a_dump_is_asked",
    ),
    "attach/test_kubectl.py": (
        "test_a_pod_whose", "test_what_is_asked_is_refused[no pod there", "test_what_is_asked_is_refused[and",
        "test_options_that_mean",
    ),
    "attach/test_launchers.py": ("test_tasks_of_slurm",),
    "attach/test_rights.py": ("test_a_worker_server",),
    "attach/test_slurm.py": (
        "test_folders_that", "test_a_python_that", "test_another_users", "test_a_job_that", "test_what_is_asked",
    ),
    "attach/test_verb.py": ("test_a_stopped_rank", "test_a_rank_that_holds", "test_without_py_spy"),
    "attach/test_wrapped.py": ("test_a_circle", "test_groups_whose", "test_without_its_run"),
    "harmless/test_broken_recorder.py": tuple(
        f"test_a_script_that_never_imports_torch_runs_whatever_fails[{part}" for part in (
            "state", "frames", "wrappers", "errors", "sampler",
        )
    ),
    "harmless/test_command.py": (
        "test_streams_and_status_are_those_of_torchrun[raises",
        "test_a_job_that_removes_the_run_folder_ends_as_it_would[3",
        "test_a_rank_that_becomes", "test_a_job_that_fits_into_its_limits_does_so_under_wrap[-n", "test_ends_of_many",
        "test_code_that_is_made", "test_calls_and_groups",
    ),
    "harmless/test_scripts.py": tuple(f"test_a_script_runs_as_without_the_recorder[{name}" for name in (
        "changes_masks", "changes_root", "deletes_its_folder", "fails_in_its_text", "has_faulthandler", "has_few_files",
        "lists_threads", "uses_up_files",
    )),
    "bandwidth/test_agreement.py": (
        "test_a_rank_with_another_version", "test_a_rank_of_a_launcher", "test_under_torchrun_nonsense",
        "test_a_torch_that_cannot_be_imported_is_reported_once[1", "test_a_rank_that_does_not_come",
    ),
    "bandwidth/test_launchers.py": ("test_one_bench_after",),
    "bandwidth/test_stops.py": (
        "test_a_rank_that_is_killed_leaves_what_was_measured[False", "test_a_first_rank", "test_a_scheduler_that",
    ),
    "bandwidth/test_verb.py": (
        "test_ranks_that_only", "test_one_rank_works", "test_a_demand_that", "test_right_data",
        "test_an_altered_element_is_named_with_rank_index_expected_and_found[bfloat16",
    ),
    "bandwidth/test_watch.py": (
        "test_a_stopped_rank_does", "test_a_stopped_first", "test_a_killed_rank_is_noticed_at_once[1",
        "test_a_rank_that_leaves", "test_a_signal_to_one_rank_interrupts_all[15",

        "test_a_rank_that_came", "test_where_the_store", "test_a_launcher_that",
    ),
    "in_code/test_pytest_plugin.py": ("test_a_test_whose", "test_a_timeout_that", "test_a_test_that_passes"),
    "in_code/test_watch.py": (
        "test_a_rank_that_raises", "test_a_healthy_job_is_silent_and_keeps_its_environment[afterwards",
        "test_under_wrap",
    ),
    "test_launchers.py": (
        "test_a_healthy_job_of", "test_a_shell_scripts_rank_that_fails_is_named[raise",
        "test_a_command_that_is_a_rank_and",
        "test_a_command_gets_signals_and_its_status_is_reported[2", "test_a_job_that_recovers",
        "test_a_rank_that_a_launcher_stops_is_a_victim_and_leaves_its_stack[torchrun",
        "test_ranks_that_cannot_be_seen_are_named_and_the_job_is_not_stopped[words1",
    ),
    "test_plain_install.py": ("test_the_bench_and", "test_other_verbs[check-data", "test_other_verbs[check-c"),
    "test_kept_runs.py": (
        "test_runs_that_cannot", "test_an_action_that", "test_a_healthy_job_acts",
        "test_what_cannot_be_used_is_refused_before_the_start[--exclude",
    ),
    "test_lifecycle.py": (
        "test_a_second_ctrl_c", "test_a_rank_that_prepares_for_long_is_reported_and_the_report_is_withdrawn[sleep",
        "test_streams_directory_arguments_and_status_are_those_of_torchrun[0",
        "test_a_watcher_killed_as_its_job_starts_leaves_nobody[rank",
        "test_a_rank_that_works_past_torchs_own_limit_is_named_by_the_line_of_its_work[late",
        "test_torchruns_own_words",
        "test_torchruns_closing_block_has_the_verdict_and_is_kept_in_a_file[env1", "test_the_words_of_another",
        "test_on_a_disk_that_stays", "test_a_hung_job_that_ignores", "test_ranks_behind",
        "test_a_hang_that_may_resolve", "test_on_hang_report_says_it",
    ),
    "test_log_findings.py": ("test_a_job_without", "test_without_the_options"),
    "test_metrics.py": ("test_what_cannot",),
    "test_demo.py": tuple(f"test_the_demo_finds_its_fault[{fault}" for fault in (
        "killed", "early-exit", "mismatch", "exit-hang", "stopped",
    )),
    "test_example_train.py": ("test_one_process",),
    "test_streams.py": ("test_a_job_runs_where_streams_are_closed[s",),
    "test_status.py": ("test_a_reader_that", "test_after_a_dump"),
    "test_data.py": ("test_ranks_ask_their_loaders_and_one_report_comes_of_it[own",),
    "test_causes.py": (
        "test_a_store_that_nobody_serves_is_named_with_its_address[url", "test_a_port_of_its_own",
        "test_a_network_that_fails_in_mid_job_is_no_ranks_fault[loopback", "test_a_lock_whose_owner",
    ),
}  # fmt: skip
"""Of the other scenarios, those that show what another one of their file shows as well, or a simulated job
(``tests/unit/launch/jobs.txt``): ``-m nightly`` runs them."""
