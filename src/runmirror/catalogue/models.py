"""The form of a catalogue file: metrics, what they mean, and which checks watch them.

A file is TOML: ``family``, ``title``, and a ``[[metric]]`` per key or pattern. Every check tells for itself what it takes.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from runmirror.catalogue.patterns import Pattern

Better = Literal["up", "down", "one", "zero", "steady", ""]
"""Where a metric should go: up, down, near 1, near 0, or stay; "" when it has no direction."""
Best = Literal["min", "max", "last"]


class Strict(BaseModel):
    """Base of the models: a field that is not known is an error, so that a typing mistake is found."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Above(Strict):
    """Values above ``warn`` (or ``fail``) in ``rows`` rows in a row; ``absolute`` takes the distance from 0."""

    test: Literal["above"]
    rule: str
    warn: float
    fail: float | None = None
    absolute: bool = False
    rows: int = Field(3, ge=1)


class Below(Strict):
    """Values at or below ``warn`` in ``rows`` rows in a row."""

    test: Literal["below"]
    rule: str
    warn: float
    rows: int = Field(3, ge=1)


class Band(Strict):
    """Values outside ``warn`` in ``rows`` rows in a row, or once at or beyond an end of ``fail``."""

    test: Literal["band"]
    rule: str
    warn: tuple[float, float]
    fail: tuple[float, float] | None = None
    rows: int = Field(3, ge=1)


class Negative(Strict):
    """A divergence below 0 for long: twenty rows below a hundredth of its scale (``scale``, or what is usual in the run when
    that is more), or three that its noise does not explain."""

    test: Literal["negative"]
    rule: str
    scale: float = Field(1.0, gt=0)


class Explodes(Strict):
    """``rows`` rows in a row above ``times`` the median of the ones before, three times their highest, and ``floor``."""

    test: Literal["explodes"]
    rule: str
    times: float = Field(10.0, gt=1)
    floor: float = 0.0
    rows: int = Field(3, ge=1)


class Collapse(Strict):
    """The median of three values below ``share`` of the median of the first ten."""

    test: Literal["collapse"]
    rule: str
    share: float = Field(0.1, gt=0, lt=1)


class Falling(Strict):
    """Far below its best stretch of ten: the last three by more than noise explains, or the last twenty."""

    test: Literal["falling"]
    rule: str


class Monotone(Strict):
    """A value below the one before."""

    test: Literal["monotone"]
    rule: str


class Grows(Strict):
    """A count that rises in ``rows`` rows in a row."""

    test: Literal["grows"]
    rule: str
    rows: int = Field(3, ge=1)


class Present(Strict):
    """Above 0 in ``rows`` training rows in a row; a row without the key ends it."""

    test: Literal["present"]
    rule: str
    rows: int = Field(3, ge=1)


class FromConfig(Strict):
    """Values above ``times`` a number of the run's configuration (the first of ``keys``, ``a.b.c``, that is there)."""

    test: Literal["config"]
    rule: str
    keys: tuple[str, ...]
    times: float = Field(1.0, gt=0)
    rows: int = Field(3, ge=1)


Check = Annotated[
    Above | Below | Band | Negative | Explodes | Collapse | Falling | Monotone | Grows | Present | FromConfig,
    Field(discriminator="test"),
]


class Metric(Strict):
    """A key, or a pattern of keys.

    Attributes:
        key: ``{name}`` stands for one segment between slashes, ``{name...}`` for any number of them.
        meaning: one or two sentences; ``{name}`` is what stood there.
        unit: "" when there is none.
        low, high: the range of its values, where there is one.
        better: where it should go.
        main: its rank as a run's main reward, 1 the first; None when it is none.
        nonfinite: whether NaN or an infinity is a fault, is one only after a finite value, or is fine.
        hidden_by: a metric that may look fine in the same row when this one is NaN.
        sparse: it may come and go.
        basis: where the rule comes from.
        checks: what watches it.
    """

    key: str = Field(min_length=1)
    meaning: str = Field(min_length=1)
    unit: str = ""
    low: float | None = None
    high: float | None = None
    better: Better = ""
    main: int | None = None
    nonfinite: Literal["fault", "if never finite", "fine"] = "fault"
    hidden_by: str | None = None
    sparse: bool = False
    basis: Literal["documentation", "code", "observed", "ours"] = "documentation"
    checks: tuple[Check, ...] = ()

    @field_validator("key")
    @classmethod
    def _readable(cls, key: str) -> str:
        Pattern(key)
        return key

    @model_validator(mode="after")
    def _parts(self) -> Metric:
        known = set(Pattern(self.key).names)
        if unknown := set(Pattern(self.meaning, anywhere=True).names) - known:
            raise ValueError(f"{self.key}: its meaning names {', '.join(sorted(unknown))}, which the key has not")
        return self


class Family(Strict):
    """One file: the metrics of one framework, the first match first."""

    family: str
    title: str
    metric: tuple[Metric, ...]


class Rule(Strict):
    """What a rule finds: what is said of a key (``{value}``, ``{other}``, ``{count}``), what it usually means, and what
    people try."""

    says: str
    means: str
    tries: str = Field(alias="try")


class Description(Strict):
    """What is known of a metric key.

    Attributes:
        key: as it was asked for.
        meaning: with the parts of the key filled in.
        family: the file it comes from.
        pattern: the entry that matched.
        parts: part of the pattern -> what stood there.
        evaluation: it is the same number of an evaluation.
        metric: the entry.
    """

    key: str
    meaning: str
    family: str
    pattern: str
    parts: dict[str, str]
    evaluation: bool
    metric: Metric

    @property
    def unit(self) -> str:
        """Its unit, "" when there is none."""
        return self.metric.unit

    @property
    def better(self) -> Better:
        """Where it should go."""
        return self.metric.better
