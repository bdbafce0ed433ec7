"""Sinks by name, and as data for people."""

from __future__ import annotations

import importlib.metadata
from typing import Literal

import pytest
from pydantic import Field

from runmirror.exceptions import MissingPackageError, OptionError, UnknownSinkError
from runmirror.log.layout import Kind
from runmirror.sinks import registry
from runmirror.sinks.base import Sink, SinkOptions, env_field
from runmirror.sinks.describe import OptionField, Requirement, describe_options, describe_sink, describe_sinks
from runmirror.sinks.registry import SinkEntry, check_options, installed_sinks, load_sink, make_sink
from runmirror.targets import parse_targets


def install(monkeypatch: pytest.MonkeyPatch, entry: SinkEntry) -> None:
    """Have ``entry`` among the installed sinks."""
    points = importlib.metadata.entry_points

    class Distribution:
        name, version = entry.package, entry.version

    class Point:
        name, value, dist = entry.name, entry.target, Distribution

    def entry_points(group: str) -> list[object]:
        return [*points(group=group), Point]

    monkeypatch.setattr(registry, "_scan", getattr(registry._scan, "__wrapped__", registry._scan))  # not cached
    monkeypatch.setattr(registry.importlib.metadata, "entry_points", entry_points)


def test_ours_are_found_and_made() -> None:
    """dummy and tensorboard, each a Sink whose name is the one it is found by."""
    assert {"dummy", "tensorboard"} <= installed_sinks().keys()
    for name in ("dummy", "tensorboard"):
        sink = make_sink(name)
        assert isinstance(sink, Sink)
        assert sink.name == name


@pytest.mark.parametrize(
    ("name", "told"), [("tensorbord", "did you mean 'tensorboard'?"), ("zzz", "There are: dummy, ")]
)
def test_an_unknown_sink_says_what_there_is(name: str, told: str) -> None:
    """UnknownSinkError with the nearest name and the list, from every way to ask."""
    for ask in (load_sink, make_sink, describe_sink):
        with pytest.raises(UnknownSinkError) as caught:
            ask(name)
        assert told in str(caught.value)


def test_a_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours: the extra. Another package's: that package."""
    install(monkeypatch, SinkEntry("later", "runmirror.sinks.no_such_module:Later", "runmirror", "1"))
    with pytest.raises(MissingPackageError, match=r"pip install 'runmirror\[later\]'"):
        load_sink("later")
    install(monkeypatch, SinkEntry("theirs", "no_such_package:Theirs", "their-package", "2"))
    with pytest.raises(MissingPackageError, match="of package their-package can't be imported: ModuleNotFoundError"):
        load_sink("theirs")
    described = describe_sink("theirs")
    assert (described.usable, described.fix) == (False, "pip install --upgrade their-package")
    assert (described.capabilities, described.options) == (None, ())
    assert [one.name for one in describe_sinks() if not one.usable] == ["later", "theirs"]


def test_a_class_that_is_no_sink_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """MissingPackageError with the verbs and attributes."""
    install(monkeypatch, SinkEntry("odd", "pathlib:Path", "odd-package", "2"))
    with pytest.raises(MissingPackageError, match="lacks Options, capabilities, destination, put"):
        load_sink("odd")


def test_options_are_checked_by_name_and_value() -> None:
    """OptionError that names the option, the nearest one, and those there are."""
    model = load_sink("tensorboard").Options
    with pytest.raises(OptionError, match=r"no option 'logdri'; did you mean 'logdir'\? It has: exclude, "):
        check_options("tensorboard", model, {"logdri": "x"})
    with pytest.raises(OptionError, match=r"no option 'zzz'\. It has: "):
        check_options("tensorboard", model, {"zzz": "x"})
    with pytest.raises(OptionError, match=r"option 'tombstones' of the sink 'tensorboard'.*got 'perhaps'"):
        check_options("tensorboard", model, {"tombstones": "perhaps"})


def test_a_secret_is_not_repeated() -> None:
    """Neither that of an option that is one, nor credentials in a URL, nor the value of an option that no sink has."""
    model = load_sink("tensorboard").Options
    with pytest.raises(OptionError, match=r"option 'storage_options' .* expected a JSON object") as wrong:
        check_options("tensorboard", model, {"storage_options": '{"key": "t0p-s3cret"'})
    assert "t0p" not in str(wrong.value)
    with pytest.raises(OptionError, match="option 'tombstones'") as wrong:
        check_options("tensorboard", model, {"tombstones": "https://me:t0p-s3cret@host"})
    assert "t0p" not in str(wrong.value)
    with pytest.raises(OptionError, match=r"-o api_key=\.\.\.: none of tensorboard, dummy has") as wrong:
        parse_targets(["tensorboard", "dummy"], ["api_key=t0p-s3cret"])
    assert "t0p" not in str(wrong.value)


def test_a_sink_is_described() -> None:
    """Name, package, capabilities as plain data, options with their environment variable, and the packages it needs."""
    described = describe_sink("tensorboard")
    assert (described.usable, described.built_in, described.package) == (True, True, "runmirror")
    assert described.capabilities is not None
    assert described.capabilities["records"] == ["checkpoints", "code", "config", "logtree"]
    assert described.capabilities["test_only"] is False
    logdir = next(option for option in described.options if option.name == "logdir")
    assert (logdir.type, logdir.default, logdir.env) == ("text", "./tensorboard-mirror", "TENSORBOARD_LOGGING_DIR")
    needs = {need.package: need for need in described.requirements}
    assert {"tensorboard", "google-crc32c"} <= needs.keys()
    assert needs["tensorboard"].installed == importlib.metadata.version("tensorboard")
    assert all(need.ok for need in needs.values())
    assert described.as_dict()["requirements"][0].keys() == {"package", "wanted", "installed"}


def test_options_are_described_as_people_read_them() -> None:
    """Own options first; types in words, defaults as they are typed, nothing for none."""

    class Options(SinkOptions):
        host: str = env_field("localhost", "MY_HOST", "where")
        retries: int = Field(description="how often")
        mode: Literal["a", "b"] | None = Field(default=None, description="how")
        fast: bool = Field(default=True, description="whether")
        limits: tuple[float, ...] = Field(default=(0.5, 1.0), description="which")
        labels: dict[str, str] = Field(default_factory=dict, description="more")

    described = list(describe_options(Options))
    assert described[:6] == [
        OptionField("host", "text", "localhost", "where", "MY_HOST"),
        OptionField("retries", "integer", "required", "how often"),
        OptionField("mode", "a|b", "", "how"),
        OptionField("fast", "true|false", "true", "whether"),
        OptionField("limits", "comma list of number", "0.5,1.0", "which"),
        OptionField("labels", "JSON object", "", "more"),
    ]
    assert [option.name for option in described[6:]] == ["include", "exclude", "records"]
    kinds = "|".join(Kind.__args__)  # type: ignore[attr-defined]
    assert described[-1].type == f"comma list of {kinds}"


@pytest.mark.parametrize(
    ("wanted", "installed", "ok"),
    [
        (">=2.19", "2.19", True),
        (">=2.19", "2.9.1", False),
        (">=2", "2.0.1+cpu", True),
        (">=2.0", "2", True),
        ("", "0.1", True),
        ("", None, False),
        ("<81", "99", True),
    ],
)
def test_a_requirement_is_compared_by_number(wanted: str, installed: str | None, ok: bool) -> None:
    """2.9 is older than 2.19; what is not there is not there."""
    assert Requirement("it", wanted, installed).ok is ok
