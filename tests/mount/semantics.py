"""docs/semantics.md as data: its tables, and which tests check the rows that test_semantics.py does not."""

from __future__ import annotations

import re

from tests.documents import read

PAGE = read("docs/semantics.md")


def table(heading: str) -> dict[str, list[str]]:
    """The first table below *heading*: first cell to the other cells. Rows of one name get numbers (``EIO 2``)."""
    section = re.split(r"^#+ ", PAGE.partition(f"# {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    found: dict[str, list[str]] = {}
    for line in lines:
        name, *cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        n = sum(key.partition(" #")[0] == name for key in found)
        found[f"{name} #{n + 1}" if n else name] = [cell.strip("| ") for cell in cells]
    assert found, heading
    return found


def code(cell: str) -> str:
    """The text between a cell's first backticks."""
    return cell.split("`")[1]


ELSEWHERE: dict[str, dict[str, str]] = {
    "Statistics": {
        **dict.fromkeys(("`uptime_s`", "`memory`", "`threads`"), "test_stats.test_the_page_names_every_field"),
        **dict.fromkeys(
            ("`requests`", "`read_sizes`", "`replied_bytes`", "`source_bytes`", "`read_amplification`", "`read_s`"),
            "test_stats.test_reads_are_counted_exactly",
        ),
        "`errors`": "test_stats.test_errors_are_counted_by_name",
        "`cache`": "test_stats.test_the_cache_tells_what_it_did",
    },
    "Attributes": {"inode number": "test_attributes.test_inode_numbers_differ_and_outlive_the_mount"},
    "System calls": {"every change": "test_read_only.test_changes_are_refused"},
    "When the source changes": {
        "the source is deleted": "test_checkpoints.test_a_relative_source_and_a_deleted_one",
        "another file is renamed over it": "test_faults.test_a_source_replaced_by_rename_keeps_the_old_bytes",
        "it is cut short": "test_faults.test_a_source_cut_short_fails_only_what_is_missing",
        "it is written to in place": ("test_faults.test_a_source_written_to_in_place_is_read_no_more"),
    },
    "Errors": {
        "`EIO`": "test_faults.test_a_damaged_chunk_fails_one_tensor",
        "`EIO` #2": "test_faults.test_a_source_cut_short_fails_only_what_is_missing",
        "`EIO` #3": "test_faults.test_a_source_written_to_in_place_is_read_no_more",
        "`EIO` #4": "test_errors.test_a_mistake_is_logged_with_its_traceback",
        "`EACCES`": "test_semantics.test_another_user_is_refused",
        "`ENOTCONN`": "test_life.test_a_killed_daemon_hangs_nobody",
        "`ECONNABORTED` or `ENOTCONN`": "test_semantics.test_a_read_under_way_when_the_daemon_is_killed",
    },
    "Beginning and end": {
        "`ckptfs mount` returns": "test_life.test_mounting_returns_when_the_mount_answers",
        "`SIGINT` or `SIGTERM` to the daemon": "test_life.test_signals_unmount_in_the_foreground",
        "`SIGHUP` to the daemon": "test_life.test_sighup_opens_the_log_again",
        "`SIGUSR1` to the daemon": "test_stats.test_a_signal_logs_them_or_does_nothing",
        "a signal while a file is open": "test_life.test_a_signal_ends_the_daemon_while_a_file_is_open",
        "a signal while a read waits": "test_life.test_a_signal_ends_the_daemon_while_a_read_waits",
        "`ckptfs umount`": "test_life.test_unmounting_waits_for_the_end",
        "`ckptfs umount` of a mount in use": "test_life.test_a_busy_mount_names_who_uses_it",
        "`ckptfs umount --lazy`": "test_life.test_a_busy_mount_names_who_uses_it",
        "the daemon is killed": "test_faults.test_a_killed_daemon_ends_all_its_readers",
        "a second `ckptfs mount` there": "test_life.test_mounting_twice_is_refused",
        "two `ckptfs mount` of one folder at once": "test_state.test_one_of_two_mounts_at_once_wins",
        "no state folder can be written": "test_state.test_without_a_state_folder",
        "a mount point with something in it": "test_semantics.test_a_mount_point_with_something_in_it",
    },
    "Security": {
        "a pickled object (Cerebras)": "test_semantics.test_a_pickled_object_is_shown_as_refused",
        "a pickle that names anything but tensors and plain types (torch)": (
            "test_semantics.test_a_foreign_torch_pickle_is_refused"
        ),
        "data in a file outside of the checkpoint's folder": (
            "test_semantics.test_a_link_out_of_the_folder_is_not_followed"
        ),
        "a key with `..` or `/`": "test_semantics.test_names",
        "control characters in a name": "test_semantics.test_control_characters_are_escaped",
    },
    "Which bytes equal which": {
        "renamed, reordered, split, concatenated or transposed": "test_recorded.test_to_hugging_face",
        "scaled (muP)": "test_recorded.test_to_hugging_face",
        "with a constant added (Gemma's norms, 1)": "test_recorded.test_to_hugging_face",
        "a mask, ALiBi's slopes, rotary frequencies": "test_recorded.test_to_hugging_face",
        "with a LoRA adapter": "test_lora.test_folded_weights_are_the_recorded_ones",
        "of a checkpoint with sideband sparsity": "test_recorded.test_to_hugging_face",
        "a head for a headless checkpoint": "test_semantics.test_made_heads_are_the_documented_stream",
    },
}
"""Heading to first cell to ``module.test`` in this folder."""
