"""What a delivery brought."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Delivered:
    """What a :meth:`Mirror.deliver` brought: rows, points (key and value pairs), files, rejected rows and keys."""

    rows: int = 0
    points: int = 0
    files: int = 0
    rejected: int = 0

    def __add__(self, other: Delivered) -> Delivered:
        return Delivered(
            self.rows + other.rows,
            self.points + other.points,
            self.files + other.files,
            self.rejected + other.rejected,
        )

    def __sub__(self, other: Delivered) -> Delivered:
        return self + Delivered(-other.rows, -other.points, -other.files, -other.rejected)
