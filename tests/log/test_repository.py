"""code.diff of real repositories, in every state a repository can be in."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runmirror.log import repository
from runmirror.log.repository import code_diff, parse_code_header


def git(folder: Path, *arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    settings = ("user.name=someone", "user.email=someone@host.example", "protocol.file.allow=always")
    command = ["git", *(part for setting in settings for part in ("-c", setting)), *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A repository on branch "main" with one commit of train.py and sub/data.txt."""
    folder = tmp_path / "secret-customer"
    (folder / "sub").mkdir(parents=True)
    git(folder, "init", "-q", "-b", "main")
    (folder / "train.py").write_text("lr = 1\n")
    (folder / "sub" / "data.txt").write_text("x\n")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def test_clean(repo: Path) -> None:
    """Commit, branch and "dirty: no", and no diff, for a clean repository."""
    commit = git(repo, "rev-parse", "HEAD")
    assert code_diff(repo) == f"commit: {commit}\nbranch: main\ndirty: no\n"
    assert parse_code_header(code_diff(repo)) == {"commit": commit, "branch": "main", "dirty": False}


def test_staged_and_unstaged(repo: Path) -> None:
    """Both changes, from the whole repository with paths below its root, also when asked in a subfolder."""
    (repo / "train.py").write_text("lr = 2\n")
    git(repo, "add", "train.py")
    (repo / "sub" / "data.txt").write_text("y\n")
    text = code_diff(repo / "sub")
    header, _, diff = text.partition("\n\n")
    assert parse_code_header(text)["dirty"] is True
    assert len(header.splitlines()) == 3
    assert diff.startswith("diff --git a/sub/data.txt b/sub/data.txt\n")
    assert "-x\n+y\n" in diff
    assert "-lr = 1\n+lr = 2\n" in diff
    git(repo, "stash")
    subprocess.run(["git", "apply", "-"], cwd=repo, input=text.encode(), check=True)
    assert (repo / "train.py").read_text() == "lr = 2\n"


def test_untracked(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names only, as they are written, capped with a note; ignored files are left out; "dirty: no"."""
    (repo / ".gitignore").write_text("*.log\n")
    git(repo, "add", ".")
    git(repo, "commit", "-q", "-m", "second")
    (repo / "x.log").write_text("")
    for name in ("sub/größe.py", "new\nline", "with space"):
        (repo / name).write_text("password in here")
    text = code_diff(repo)
    assert text.splitlines()[2:] == [
        "dirty: no",
        "untracked: new?line",
        "untracked: sub/größe.py",
        "untracked: with space",
    ]
    monkeypatch.setattr(repository, "MAX_UNTRACKED", 1)
    assert code_diff(repo).splitlines()[3:] == ["untracked: new?line", "note: 2 more untracked files"]


def test_private(repo: Path) -> None:
    """No absolute path, remote, host, author; secrets of the diff masked."""
    git(repo, "remote", "add", "origin", "https://me:pw@git.example/x")
    (repo / "train.py").write_text('lr = 2\nAPI_KEY = "abcdef123456"\nurl = "https://u:p@h/x"\n')
    text = code_diff(repo)
    for leak in (str(repo), "secret-customer", "git.example", "someone", "abcdef123456", "u:p"):
        assert leak not in text
    assert '+API_KEY = "***"\n+url = "https://***@h/x"\n' in text


def test_no_commit_yet(repo: Path, tmp_path: Path) -> None:
    """Commit none, and everything staged as added."""
    folder = tmp_path / "new"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "dev")
    assert code_diff(folder) == "commit: none\nbranch: dev\ndirty: no\n"
    (folder / "a.py").write_text("a\n")
    git(folder, "add", ".")
    text = code_diff(folder)
    assert text.startswith("commit: none\nbranch: dev\ndirty: yes\n\ndiff --git a/a.py b/a.py\nnew file")
    assert parse_code_header(text) == {"branch": "dev", "dirty": True}


def test_detached_worktree_and_submodule(repo: Path, tmp_path: Path) -> None:
    """The repository that the folder is in: a worktree's own HEAD, a submodule's own commit."""
    commit = git(repo, "rev-parse", "HEAD")
    git(repo, "worktree", "add", "-q", "--detach", str(tmp_path / "tree"))
    (tmp_path / "tree" / "train.py").write_text("lr = 3\n")
    text = code_diff(tmp_path / "tree")
    assert text.startswith(f"commit: {commit}\nbranch: none\ndirty: yes\n")
    assert "+lr = 3" in text
    outer = tmp_path / "outer"
    outer.mkdir()
    git(outer, "init", "-q", "-b", "main")
    git(outer, "submodule", "--quiet", "add", "../secret-customer", "lib")
    (outer / "lib" / "train.py").write_text("lr = 4\n")
    assert parse_code_header(code_diff(outer / "lib"))["commit"] == commit
    assert "+lr = 4" in code_diff(outer / "lib")
    assert str(tmp_path) not in code_diff(outer)


def test_binary_and_other_encodings(repo: Path) -> None:
    """One line for a binary file, U+FFFD for bytes that aren't UTF-8."""
    (repo / "image.bin").write_bytes(b"\0\1")
    (repo / "train.py").write_bytes(b"name = 'gr\xfc\xdfe'\n")
    git(repo, "add", ".")
    text = code_diff(repo)
    assert "Binary files /dev/null and b/image.bin differ\n" in text
    assert "+name = 'gr\ufffd\ufffde'\n" in text


def test_huge(repo: Path) -> None:
    """Whole lines up to the limit, and a note in the header."""
    (repo / "train.py").write_text("".join(f"x{i} = {i}\n" for i in range(200_000)))
    text = code_diff(repo, limit=50_000)
    header, _, diff = text.partition("\n\n")
    assert header.endswith("note: the diff is longer than 50000 bytes and was cut")
    assert 49_000 < len(diff) <= 50_000
    assert diff.endswith("\n")


def test_configuration_of_the_user(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same text whatever the user configured: colours, prefixes, pagers, other diff programs, GIT_DIR."""
    (repo / "train.py").write_text("lr = 2\n")
    (repo / "sub" / "é.txt").write_text("")
    git(repo, "add", ".")
    plain = code_diff(repo / "sub")
    trap = tmp_path / "trap"
    trap.write_text("#!/bin/sh\necho trapped; touch trapped\n")
    trap.chmod(0o755)
    for setting in (
        "color.ui=always color.diff=always diff.noprefix=true diff.mnemonicPrefix=true core.quotepath=true diff.relative=true "
        f"diff.external={trap} core.pager={trap} core.fsmonitor={trap} diff.context=0 diff.interHunkContext=9 "
        f"diff.algorithm=patience status.relativePaths=true diff.d.textconv={trap} diff.d.command={trap}"
    ).split():
        git(repo, "config", *setting.split("=", 1))
    (repo / ".git" / "info").mkdir(exist_ok=True)
    (repo / ".git" / "info" / "attributes").write_text("*.py diff=d\n")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", str(trap))
    monkeypatch.setenv("GIT_DIFF_OPTS", "--unified=0")
    monkeypatch.setenv("GIT_PAGER", str(trap))
    assert code_diff(repo / "sub") == plain
    assert "trapped" not in plain
    assert not list(tmp_path.rglob("trapped"))


def test_index_is_left_alone(repo: Path) -> None:
    """The repository's index as it was, and no word of files that were only touched."""
    before = (repo / ".git" / "index").read_bytes()
    os.utime(repo / "train.py", (1, 1))
    assert "dirty: no" in code_diff(repo)
    (repo / "sub" / "data.txt").write_text("y\n")
    assert "train.py" not in code_diff(repo)
    assert (repo / ".git" / "index").read_bytes() == before


class TestNoDiff:
    """One line that says why, and no exception."""

    def test_outside(self, tmp_path: Path) -> None:
        """A note outside a repository, and in a bare one."""
        assert code_diff(tmp_path) == "note: not in a git repository\n"
        assert parse_code_header(code_diff(tmp_path)) == {}
        git(tmp_path, "init", "-q", "--bare", "bare.git")
        assert code_diff(tmp_path / "bare.git") == "note: not in a git repository\n"

    def test_no_folder(self, tmp_path: Path) -> None:
        """A note for a folder that doesn't exist."""
        assert code_diff(tmp_path / "gone") == "note: the folder of the code doesn't exist\n"

    def test_no_working_directory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A note when the working directory was deleted."""
        (tmp_path / "gone").mkdir()
        monkeypatch.chdir(tmp_path / "gone")
        (tmp_path / "gone").rmdir()
        monkeypatch.setattr(sys.modules["__main__"], "__file__", None, raising=False)
        assert code_diff() == "note: the code could not be read (FileNotFoundError)\n"

    def test_no_git(self, repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A note without git."""
        monkeypatch.setenv("PATH", str(repo))
        assert code_diff(repo) == "note: git is not installed\n"

    def test_git_that_hangs(self, repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The header and a note at the deadline when git, or what it started, doesn't end."""
        (repo / "train.py").write_text("lr = 2\n")
        (repo / ".git" / "info").mkdir(exist_ok=True)
        (repo / ".git" / "info" / "attributes").write_text("*.py filter=slow\n")
        monkeypatch.setattr(repository, "GIT_SECONDS", 0.5)
        git(repo, "config", "filter.slow.clean", "sleep 60")
        start = time.monotonic()
        assert code_diff(repo).splitlines()[-1] == "note: git took longer than 0.5 s"
        assert time.monotonic() - start < 20

    @pytest.mark.skipif(os.name != "posix", reason="needs an executable script")
    def test_git_that_fails(self, repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A note that tells no path, whatever git says; the setting to make when it doubts the owner."""
        fake = tmp_path / "bin" / "git"
        fake.parent.mkdir()
        monkeypatch.setenv("PATH", f"{fake.parent}{os.pathsep}{os.environ['PATH']}")
        for complaint, note in {
            "fatal: detected dubious ownership in repository at '/home/me'": "note: git doesn't trust the owner of this "
            "repository (git config --global --add safe.directory PATH)\n",
            "error: /home/me is on fire": "note: git failed\n",
        }.items():
            fake.write_text(f'#!/bin/sh\necho "{complaint}" >&2\nexit 128\n')
            fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
            assert code_diff(repo) == note

    def test_corrupt(self, repo: Path) -> None:
        """A note for a repository that is damaged."""
        (repo / ".git" / "index").write_bytes(b"nonsense")
        assert code_diff(repo) == "note: git failed\n"


class TestDefaultFolder:
    """The main script's folder, then the working directory."""

    def test_main_script(self, repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The repository of the script, from any working directory."""
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys.modules["__main__"], "__file__", str(repo / "train.py"), raising=False)
        assert "branch: main" in code_diff()

    def test_working_directory(self, repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The working directory's when the script is in none, is an installed command, or there is no script."""
        monkeypatch.chdir(repo)
        for place in (str(tmp_path / "train.py"), os.path.join(sys.prefix, "bin", "tool"), None):
            monkeypatch.setattr(sys.modules["__main__"], "__file__", place, raising=False)
            assert "branch: main" in code_diff()


class TestParse:
    """Our header and tinker-cookbook's."""

    def test_tinker(self) -> None:
        """The commit, and dirty when a diff follows."""
        text = "### repo: /home/me/x @ 5e9d034384d239fb66bf215c9d6bcdc0e22a4963\nmodules: tinker_cookbook\n"
        assert parse_code_header(text) == {"commit": "5e9d034384d239fb66bf215c9d6bcdc0e22a4963", "dirty": False}
        assert parse_code_header(text + "diff --git a/x b/x\n")["dirty"] is True

    @pytest.mark.parametrize("text", ["", "\n\n", "diff --git a/x b/x\n+commit: x", "hello\nbranches: 3\n", "commit"])
    def test_other_text(self, text: str) -> None:
        """Nothing from other text, nor from the diff itself."""
        assert parse_code_header(text) == {}
        assert parse_code_header("note: x\n\ncommit: abc\n") == {}
