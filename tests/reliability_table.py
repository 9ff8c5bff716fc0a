"""The table of docs/reliability.md: promise, test and figure, one row each.

A figure comes from docs/results/reliability/NAME.json. A row shows "not measured" until its file is
there.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

BEGIN, END = "<!-- table -->", "<!-- end of table -->"
NOT_MEASURED = "not measured"

Figures = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """One promise.

    Attributes:
        name: short name, such as "R1".
        promise: what holds.
        tests: "file::test" below tests/.
        source: name of the JSON file with the figures; empty for a promise without a figure.
        figure: from the figures to words.
    """

    name: str
    promise: str
    tests: tuple[str, ...] = ()
    source: str = ""
    figure: Callable[[Figures], str] | None = None


def killed(found: Figures) -> str:
    return f"{found['kills']:,} kills of {found['runs']} runs, {found['unloadable']} unloadable"


def resumed(found: Figures) -> str:
    methods = len(found["methods"])
    return f"{found['bit_exact']} of {found['runs']} runs bit-exact, {methods} methods"


def damaged_folders(found: Figures) -> str:
    names = ("run folder", "report of a run folder", "safetensors", "ensemble file")
    return f"{sum(found['readers'][name]['files'] for name in names):,} damaged files"


def executed(found: Figures) -> str:
    return f"{found['ran']} of {found['files']:,} files ran anything"


def refused(found: Figures) -> str:
    kinds = len(found["readers"])
    return (
        f"{found['files']:,} files of {kinds} readers, {found['refused']:,} refused, "
        f"{found['other_errors']} other errors"
    )


def bounded(found: Figures) -> str:
    return f"slowest {found['slowest']:.2g} s, memory + {found['grown']:.0f} MB"


def repeated(found: Figures) -> str:
    threads = "equal" if found["threads_1_and_2_equal"] else "not equal"
    return f"{found['settings']} settings, {found['different']} differ; 1 and 2 threads {threads}"


def level(found: Figures) -> str:
    return (
        f"{found['megabytes_early']:.1f} MB after {found['steps'] // 10:,} steps, "
        f"{found['megabytes_end']:.1f} MB after {found['steps']:,}"
    )


def injected(found: Figures) -> str:
    return f"{found['places']} places, {found['ran']} ran, {found['requests']} requests"


def largest_difference(found: Figures) -> str:
    """processes.json: {"largest_difference": float, "processes": [1, 2, 4], "cases": ...}."""
    *some, last = found["processes"]
    cases = len(next(iter(found["cases"].values())))
    return (
        f"largest difference {found['largest_difference']:.1g} between "
        f"{', '.join(map(str, some))} and {last} processes, {cases} cases in float64"
    )


def traffic(found: Figures) -> str:
    """traffic.json: {"bytes_predicted": int, "bytes_measured": int}."""
    runs = len(found["cases"])
    return (
        f"{found['bytes_predicted']:,} bytes predicted, {found['bytes_measured']:,} measured "
        f"({runs} runs of 5 steps)"
    )


def restarts(found: Figures) -> str:
    """restarts.json: {"picked_up": int, "tried": int, "largest_difference": float}."""
    return (
        f"{found['picked_up']} of {found['tried']} runs picked up after a SIGKILL, "
        f"largest difference {found['largest_difference']:.1g}"
    )


def other_ranks(found: Figures) -> str:
    """ranks.json: {"pairs": [[4, 2], ...], "largest_difference": float}."""
    pairs = ", ".join(f"{before} → {after}" for before, after in found["pairs"])
    return f"{pairs} processes: largest difference {found['largest_difference']:.1g}"


ROWS = (
    Row("R1", "A kill at any moment loses no checkpoint.",
        ("training/test_kill.py::test_killed_runs_end_as_if_nothing_had_happened",
         "core/test_checkpoints.py::test_a_kill_at_every_single_event_loses_nothing"),
        "kills", killed),
    Row("R2", "A resumed run equals an uninterrupted run bit for bit.",
        ("training/test_kill.py::test_killed_runs_end_as_if_nothing_had_happened",
         "training/test_resume.py::test_in_the_middle_of_an_epoch"), "kills", resumed),
    Row("R3", "A run continues on another number of processes.",
        ("training/test_mesh_shards.py::test_a_run_goes_on_with_another_number_of_processes",),
        "ranks", other_ranks),
    Row("R4", "A damaged file is detected, and the checkpoint before is used.",
        ("training/test_fuzz.py::test_a_damaged_folder_gives_an_error_or_the_right_prediction",
         "core/test_checkpoints.py::test_damage_is_never_taken_for_content"),
        "fuzz", damaged_folders),
    Row("R5", "No file runs code.",
        ("data/test_fuzzed_files.py::test_the_watch_sees_what_runs",
         "core/test_weight_files.py::test_a_file_that_would_run_code_does_not"), "fuzz", executed),
    Row("R6", "A bad file gives one documented error.",
        ("data/test_fuzzed_files.py::test_damaged_files_give_content_or_one_documented_error",
         "cli/test_predict_bad_files.py::test_one_sentence_names_the_file"), "fuzz", refused),
    Row("R7", "A small file with a large claim is refused before memory is taken.",
        ("core/test_files.py::test_crafted_tensor_files_are_refused_before_memory_is_taken",
         "data/test_image_folder.py::"
         "test_a_small_file_that_claims_many_pixels_is_refused_before_they_are_unpacked"),
        "fuzz", bounded),
    Row("R8", "A diverged member does not change the others.",
        ("training/test_members_that_die.py::"
         "test_the_others_are_those_of_a_run_in_which_it_was_masked",)),
    Row("R9", "Where memory runs out, members run in chunks.",
        ("engine/test_engine.py::"
         "test_when_memory_runs_out_members_go_in_chunks_with_the_same_result",)),
    Row("R10", "A full disk leaves the last checkpoint.",
        ("core/test_checkpoints.py::test_a_disk_that_fills_at_any_call_leaves_the_last_checkpoint",
         "core/test_checkpoints.py::test_all_is_on_the_disk_before_it_is_named")),
    Row("R11", "A lost or hung process ends the others, and torchrun picks the run up again.",
        ("training/test_lost_processes.py::"
         "test_torchrun_picks_a_run_up_whichever_process_is_killed",
         "training/test_lost_processes.py::test_the_others_end_when_a_process_hangs"),
        "restarts", restarts),
    Row("R12", "A signal saves the step first; a second signal does not wait.",
        ("training/test_kill.py::test_a_polite_signal_saves_the_step_first",
         "training/test_kill.py::test_the_second_signal_does_not_wait")),
    Row("R13", "Two processes cannot train in one folder.",
        ("core/test_lock.py::test_another_process_is_refused_and_a_dead_one_taken_over",)),
    Row("R14", "The same seed gives the same bits on the CPU, with every engine.",
        ("training/test_steady.py::test_a_run_repeated_has_the_same_bits",
         "training/test_steady.py::test_another_process_with_other_hashes_has_the_same_bits"),
        "determinism", repeated),
    Row("R15", "Engines agree in float64.",
        ("training/test_fit.py::test_engines_decide_how_members_run_and_not_what_they_do",)),
    Row("R16", "scikit-learn's checks of estimators pass, all of them.",
        ("integrations/test_sklearn_checks.py::test_check_of_scikit_learn",)),
    Row("R17", "Runs of older versions load and resume.",
        ("training/test_resume.py::test_a_run_older_than_a_setting_has_its_default",)),
    Row("R18", "The core needs torch, numpy and safetensors alone; help loads nothing heavy.",
        ("test_architecture.py::test_the_core_needs_torch_numpy_and_safetensors_alone",
         "cli/test_help.py::test_help_answers_without_loading_anything_heavy")),
    Row("R19", "A long run takes no more memory than a short one.",
        ("training/test_steady.py::test_two_thousand_steps_take_no_memory",
         "core/test_progress.py::test_many_runs_leave_no_file_open"), "memory", level),
    Row("R20", "Exported files give the predictions of Shoal, without Shoal.",
        ("integrations/test_export.py::test_onnx_equals_predict_without_shoal",
         "integrations/test_export.py::test_a_torch_program_equals_predict_without_shoal")),
    Row("Page", "No text of a user or a file runs in a report.",
        ("page/test_injection.py::test_nothing_runs_and_nothing_is_asked_for",),
        "injections", injected),
    Row("Downloads", "Plain HTTP is used only where a SHA-256 is known.",
        ("data/test_download.py::test_plain_http_needs_a_known_sha256",
         "data/test_download.py::test_a_redirection_to_plain_http_is_not_followed")),
    Row("Health", "A run reports divergence, an exploding push, constant members, a collapsed "
        "bandwidth and a stalled loader.",
        ("training/test_health.py::test_a_push_that_explodes",
         "training/test_health.py::test_a_bandwidth_that_collapses",
         "training/test_health.py::test_no_false_alarm_on_digits")),
    Row("Processes", "Several processes follow the trajectory of one process.",
        ("training/test_mesh.py::test_two_processes_train_as_one",
         "training/test_mesh.py::test_four_processes_train_as_one",
         "training/test_mesh.py::test_replicas_train_as_one"),
        "processes", largest_difference),
    Row("Traffic", "The traffic of a step is the predicted traffic.",
        ("training/test_mesh.py::test_the_bytes_of_a_step_are_those_predicted",),
        "traffic", traffic),
)  # fmt: skip


def cells(row, results):
    """Promise, tests and figure of a row, as words."""
    path = results / f"{row.source}.json"
    figure = "–" if row.figure is None else NOT_MEASURED
    if row.figure is not None and path.exists():
        found = json.loads(path.read_text())
        figure = row.figure(found) + (f" ({found['date']})" if "date" in found else "")
    tests = "<br>".join(f"`{test}`" for test in row.tests) or "–"
    return row.name, row.promise, tests, figure


def table(results):
    """The table in Markdown."""
    lines = ["| | promise | test, below `tests/` | figure |", "| --- | --- | --- | --- |"]
    lines += ["| " + " | ".join(cells(row, results)) + " |" for row in ROWS]
    return "\n".join(lines)


def write(page, results):
    """Replace the table of the page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, found, after = rest.partition(END)
    assert found, f"{page} has no place for the table"
    page.write_text(f"{before}{BEGIN}\n{table(results)}\n{END}{after}", encoding="utf-8")
