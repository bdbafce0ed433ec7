"""Finding runs below the paths people name, and opening one as a Source."""

from __future__ import annotations

import json
import os
import re
import sys
from datetime import timedelta, timezone
from pathlib import Path

import pytest

from runmirror.exceptions import NotALogError
from runmirror.find import Found, ReadOptions, find_runs, is_run, open_run
from runmirror.log.rows import START
from runmirror.starting import start
from tests.logs import STARTED, flat_log, nested_log, train_row, write_rows


def make(*folders: Path) -> None:
    for folder in folders:
        write_rows(folder / "metrics.jsonl", [train_row(0)])


def names(*paths: str | Path, depth: int = 8) -> dict[str, str]:
    """name -> path of every run found."""
    found = find_runs(paths, depth)
    assert len({one.name for one in found}) == len(found)
    return {one.name: one.path for one in found}


def test_a_run_that_is_named_itself(tmp_path: Path) -> None:
    """Called by its folder; a slash at the end changes nothing."""
    make(tmp_path / "runs/seed0")
    path = str(tmp_path / "runs/seed0")
    assert names(path) == names(path + "/") == {"seed0": path}


def test_a_relative_path_and_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found with its absolute path, by the name of its folder also as "."."""
    make(tmp_path / "runs/seed0")
    monkeypatch.chdir(tmp_path / "runs/seed0")
    assert names(".") == names("../seed0") == {"seed0": str(tmp_path / "runs/seed0")}


def test_a_folder_is_searched_in_depth(tmp_path: Path) -> None:
    """Named relative to it with /, sorted; a run in the folder of a run counts too."""
    make(tmp_path / "b/seed1", tmp_path / "b/seed0", tmp_path / "a", tmp_path / "a/inner", tmp_path / "c/d/e/f")
    found = find_runs([tmp_path])
    assert [one.name for one in found] == ["a", "a/inner", "b/seed0", "b/seed1", "c/d/e/f"]
    assert found[2].path == str(tmp_path / "b/seed0")


def test_the_search_ends_at_a_depth(tmp_path: Path) -> None:
    """Two folders down, with a depth of two."""
    make(tmp_path / "a/b", tmp_path / "a/c/d")
    assert list(names(tmp_path, depth=2)) == ["a/b"]
    assert list(names(tmp_path, depth=3)) == ["a/b", "a/c/d"]


def test_hidden_and_iteration_folders_are_left_out(tmp_path: Path) -> None:
    """Whatever lies in them; a hidden folder that is named itself is not."""
    make(tmp_path / ".hidden/run", tmp_path / "run/.runmirror/x", tmp_path / "run/iteration_000001", tmp_path / "run")
    assert list(names(tmp_path)) == ["run"]
    assert list(names(tmp_path / ".hidden")) == ["run"]


def test_a_run_of_ours_without_rows_is_one(tmp_path: Path) -> None:
    """.runmirror/run.json is enough; a folder with config alone is none."""
    (tmp_path / "ours/.runmirror").mkdir(parents=True)
    (tmp_path / "ours/.runmirror/run.json").write_text("{}")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text("{}")
    (tmp_path / "folder/metrics.jsonl").mkdir(parents=True)
    assert list(names(tmp_path)) == ["ours"]
    assert [is_run(str(tmp_path / name)) for name in ("ours", "other", "folder")] == [True, False, False]


def test_a_loop_of_links_ends(tmp_path: Path) -> None:
    """Each run once; a link to a run elsewhere is found under the link's name; a link to nothing is passed over."""
    make(tmp_path / "runs/a", tmp_path / "elsewhere/b")
    (tmp_path / "runs/a/up").symlink_to(tmp_path / "runs")
    (tmp_path / "runs/self").symlink_to(tmp_path / "runs/self")
    (tmp_path / "runs/dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "runs/link").symlink_to(tmp_path / "elsewhere/b")
    (tmp_path / "runs/again").symlink_to(tmp_path / "elsewhere/b")
    assert list(names(tmp_path / "runs")) == ["a", "again"]


def test_a_run_named_twice_is_found_once(tmp_path: Path) -> None:
    """By the same path, by a link, by its parent, by a glob and by its metrics file: the first name is kept."""
    make(tmp_path / "runs/a", tmp_path / "runs/b")
    (tmp_path / "link").symlink_to(tmp_path / "runs/a")
    run = tmp_path / "runs/a"
    assert names(run, run, tmp_path / "link", run / "metrics.jsonl") == {"a": str(run)}
    assert list(names(run, tmp_path / "runs", f"{tmp_path}/ru*/a")) == ["a", "b"]


def test_a_glob_names_runs_by_its_fixed_part(tmp_path: Path) -> None:
    """Relative to what comes before the first wildcard, for folders, runs and metrics files; ** too."""
    make(tmp_path / "exp1/seed0", tmp_path / "exp2/seed0", tmp_path / "other/seed0")
    assert list(names(f"{tmp_path}/exp*")) == ["exp1/seed0", "exp2/seed0"]
    assert list(names(f"{tmp_path}/exp*/seed0")) == ["exp1/seed0", "exp2/seed0"]
    assert list(names(f"{tmp_path}/*/seed0/metrics.jsonl")) == ["exp1/seed0", "exp2/seed0", "other/seed0"]
    assert list(names(f"{tmp_path}/**")) == ["exp1/seed0", "exp2/seed0", "other/seed0"]


def test_a_glob_that_matches_its_own_fixed_part(tmp_path: Path) -> None:
    """The run is called by its folder, never "."."""
    make(tmp_path / "run")
    assert names(f"{tmp_path}/run/**") == {"run": str(tmp_path / "run")}


def test_a_folder_whose_name_looks_like_a_glob(tmp_path: Path) -> None:
    """Taken for itself when it exists."""
    make(tmp_path / "lr[1e-4]*/seed?")
    assert list(names(tmp_path / "lr[1e-4]*")) == ["seed?"]


def test_a_metrics_file(tmp_path: Path) -> None:
    """metrics.jsonl is its folder's run; another one is a run of its own, called by its stem."""
    make(tmp_path / "run")
    write_rows(tmp_path / "run/sweep.v2.jsonl", [train_row(0)])
    assert names(tmp_path / "run/metrics.jsonl") == {"run": str(tmp_path / "run")}
    assert names(tmp_path / "run/sweep.v2.jsonl") == {"sweep.v2": str(tmp_path / "run/sweep.v2.jsonl")}


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    """By the way to them below their common folder, whether they were named themselves or found below paths."""
    make(tmp_path / "exp1/seed0", tmp_path / "exp2/seed0", tmp_path / "exp2/seed1")
    wanted = ["exp1/seed0", "exp2/seed0"]
    assert list(names(tmp_path / "exp1/seed0", tmp_path / "exp2/seed0")) == wanted
    assert list(names(tmp_path / "exp1", tmp_path / "exp2")) == [*wanted, "seed1"]
    assert list(names(tmp_path / "exp1/seed0", tmp_path / "exp2")) == [*wanted, "seed1"]


def test_names_that_are_told_apart_are_no_other_runs_name(tmp_path: Path) -> None:
    """All by the way below the common folder, when a longer name is taken."""
    make(tmp_path / "x/a/run", tmp_path / "x/b/run", tmp_path / "y/a/run")
    found = names(tmp_path / "x/a", tmp_path / "x/b", tmp_path / "y")
    assert found == {name: str(tmp_path / name) for name in ("x/a/run", "x/b/run", "y/a/run")}


def test_files_of_one_stem_are_told_apart(tmp_path: Path) -> None:
    """By their folders; a file beside a folder of its name keeps its ending."""
    for folder in ("a", "b"):
        write_rows(tmp_path / folder / "log.jsonl", [train_row(0)])
    assert list(names(tmp_path / "a/log.jsonl", tmp_path / "b/log.jsonl")) == ["a/log", "b/log"]
    make(tmp_path / "a/log")
    assert list(names(tmp_path / "a/log.jsonl", tmp_path / "a/log")) == ["log.jsonl", "log"]


@pytest.mark.parametrize("name", ["with space", "ünï/日本語", "a%20b", "quote'\"", "-x", "semi;colon & more"])
def test_names_of_any_kind(tmp_path: Path, name: str) -> None:
    """As a path and as a file:// URI."""
    make(tmp_path / name)
    assert names(tmp_path / name) == {Path(name).name: str(tmp_path / name)}
    assert names((tmp_path / name).as_uri()) == {Path(name).name: str(tmp_path / name)}
    assert list(names(tmp_path)) == [name]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_a_name_that_is_no_utf8(tmp_path: Path) -> None:
    """Text that can be encoded, and a path that leads to the run."""
    folder = tmp_path / os.fsdecode(b"run-\xff")
    make(folder)
    (found,) = find_runs([tmp_path])
    assert found == Found(str(folder), "run-\ufffd")
    assert open_run(found)[0].info().name == "run-\ufffd"


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("missing", "missing does not exist"),
        ("empty", "empty holds no run"),
        ("missing*", r"missing\* holds no run"),
        ("notes.txt", "notes.txt holds no run"),
        ("dangling", "dangling holds no run"),
    ],
)
def test_a_path_without_a_run_is_an_error(tmp_path: Path, path: str, what: str) -> None:
    """It names the path and says what a run is, even when another path had one."""
    make(tmp_path / "run")
    (tmp_path / "empty/config").mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(NotALogError, match=rf"{what}: a run is a folder with metrics.jsonl"):
        find_runs([tmp_path / "run", tmp_path / path])


def test_an_empty_folder_beside_a_run_of_a_longer_name_is_an_error(tmp_path: Path) -> None:
    """ "run" holds nothing, though "run-2" was found."""
    make(tmp_path / "run-2")
    (tmp_path / "run").mkdir()
    with pytest.raises(NotALogError, match="holds no run"):
        find_runs([tmp_path / "run-2", tmp_path / "run"])


@pytest.mark.parametrize("uri", ["gs://", "nosuch://bucket/run", "file://runs/7", "gs://buck*t/run"])
def test_uris_that_cant_be_read_are_named(uri: str) -> None:
    """NotALogError with the URI: no bucket, no such scheme, a host by mistake, a glob for a bucket."""
    with pytest.raises(NotALogError, match=re.escape(uri)):
        find_runs([uri])


def test_no_paths_no_runs() -> None:
    """[]."""
    assert find_runs([]) == []


# -- opening


def test_an_opened_run_is_read(tmp_path: Path) -> None:
    """Under the name it was found by, with its state at home and nothing written into it."""
    flat_log(tmp_path / "runs/a")
    before = sorted(path.name for path in (tmp_path / "runs/a").iterdir())
    (found,) = find_runs([tmp_path / "runs"])
    source, folder = open_run(found)
    assert source.info().name == "a"
    assert [row.step for row in source.rows(START)] == list(range(12))
    assert folder == tmp_path / "home/runs" / source.info().run_id
    assert (folder / "lines.bin").exists()
    assert sorted(path.name for path in (tmp_path / "runs/a").iterdir()) == before


def test_an_own_run_keeps_its_state_in_itself(tmp_path: Path) -> None:
    """.runmirror/mirror."""
    make(tmp_path / "run")
    (tmp_path / "run/.runmirror").mkdir()
    record = {"run_id": "r" * 32, "url": (tmp_path / "run").as_uri(), "created": 1.0}
    (tmp_path / "run/.runmirror/run.json").write_text(json.dumps(record))
    source, folder = open_run(find_runs([tmp_path / "run"])[0])
    assert (source.info().run_id, folder) == ("r" * 32, tmp_path / "run/.runmirror/mirror")


def test_options_reach_the_reader(tmp_path: Path) -> None:
    """Step key, zone, status and place of the state."""
    folder = nested_log(tmp_path / "run")
    (found,) = find_runs([folder])
    hours = timezone(timedelta(hours=1))
    plain, _ = open_run(found)
    shifted, _ = open_run(found, ReadOptions(zone=hours, state_in_log=True))
    assert next(shifted.rows(START)).time == next(plain.rows(START)).time - 3600
    assert (folder / ".runmirror/mirror").is_dir()
    write_rows(tmp_path / "own/metrics.jsonl", [{"step": 0, "env/steps": 50}])
    (found,) = find_runs([tmp_path / "own"])
    source, _ = open_run(found, ReadOptions(step_key="env/steps", status_unknown="finished"))
    assert [row.step for row in source.rows(START)] == [50]
    assert source.info().status == "finished"


def test_logs_in_one_folder_do_not_share_an_index(tmp_path: Path) -> None:
    """With the state in the log_path: each keeps its own ordinals, read in turns."""
    rows = {name: [train_row(step, len(name)) for step in range(3)] for name in ("metrics", "b", "cc")}
    for name, data in rows.items():
        write_rows(tmp_path / f"{name}.jsonl", data)
    paths = [tmp_path, tmp_path / "b.jsonl", tmp_path / "cc.jsonl"]
    for _ in range(2):
        for found in find_runs(paths):
            source, _ = open_run(found, ReadOptions(state_in_log=True))
            assert [row.ordinal for row in source.rows(START)] == [0, 1, 2]
            assert [row.time for row in source.rows(START)][-1] == STARTED


def test_archives_are_known_by_content_when_asked(tmp_path: Path) -> None:
    """The same id at another place; by place it is another run."""
    ids = {}
    for by_content in (True, False):
        for place in ("here", "there"):
            flat_log(tmp_path / place)
            source, _ = open_run(find_runs([tmp_path / place])[0], ReadOptions(by_content=by_content))
            ids[by_content, place] = source.info().run_id
    assert ids[True, "here"] == ids[True, "there"]
    assert len(set(ids.values())) == 3


def test_a_run_that_is_gone(tmp_path: Path) -> None:
    """NotALogError that names it."""
    with pytest.raises(NotALogError, match=r"nowhere.* is gone"):
        open_run(Found(str(tmp_path / "nowhere"), "nowhere"))


def test_a_log_inside_another_frameworks_run_counts_instead(tmp_path: Path) -> None:
    """Of a Trainer's folder, and of one of tinker-cookbook, the logs that an integration wrote in it; each run once."""
    runs = tmp_path / "runs"
    flat_log(runs / "tinker")
    for log in ("tinker/runmirror", "tinker/runmirror-2", "tinker/runmirror-10"):
        with start(runs / log, code=False) as run:
            run.log_metrics({"a": 1})
    (runs / "tinker" / "runmirror-notes").mkdir()
    flat_log(runs / "plain")
    assert [one.name for one in find_runs([runs])] == ["plain", "tinker", "tinker-2", "tinker-10"]
    assert [one.name for one in find_runs([runs / "tinker"])] == ["tinker", "tinker-2", "tinker-10"]
    assert {os.path.basename(one.path) for one in find_runs([runs / "tinker"])} == {
        "runmirror",
        "runmirror-2",
        "runmirror-10",
    }


def test_a_run_that_its_writer_named(tmp_path: Path) -> None:
    """Named itself it has that name; found in a folder, its place there."""
    start(tmp_path / "runs" / "log", code=False, name="mine").finish()
    assert find_runs([tmp_path / "runs" / "log"]) == [Found(str(tmp_path / "runs" / "log"), "mine")]
    assert find_runs([tmp_path / "runs"]) == [Found(str(tmp_path / "runs" / "log"), "log")]
