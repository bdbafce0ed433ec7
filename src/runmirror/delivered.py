"""What a delivery brought."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Delivered:
    """What a :meth:`runmirror.mirror.Mirror.deliver` brought: rows, points (pairs of key and value), files,
    rejected rows and keys."""

    rows: int = 0
    points: int = 0
    files: int = 0
    rejected: int = 0

    def __add__(self, other: Delivered) -> Delivered:
        return Delivered(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    def __sub__(self, other: Delivered) -> Delivered:
        return self + Delivered(-other.rows, -other.points, -other.files, -other.rejected)
