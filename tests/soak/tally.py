"""What a campaign counted."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

__all__ = ["COUNTS", "Tally"]

#: Texts that are kept of what was found.
_NOTES = 40


@dataclass
class Tally:
    """What a campaign, or one of its processes, counted.

    Attributes:
        trials: faults that were tried.
        items: items that were compared with a fresh computation.
        wrong: items that differed.
        lost: exceptions that reached the loop over a dataset.
        hangs: what did not end in time.
        crashes: processes that died without having been killed.
        other: anything else that should not be: files left behind, memory, growth.
        notes: the first few of these in words.
        skipped: what could not be tried on this machine, and why.
    """

    trials: int = 0
    items: int = 0
    wrong: int = 0
    lost: int = 0
    hangs: int = 0
    crashes: int = 0
    other: int = 0
    notes: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def found(self, kind: str, note: str) -> None:
        """Counts something that should not be."""
        setattr(self, kind, getattr(self, kind) + 1)
        if len(self.notes) < _NOTES:
            self.notes.append(f"{kind}: {note}")

    def add(self, other: Tally) -> None:
        """Adds what another one counted."""
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.notes = [*self.notes, *other.notes][:_NOTES]
        self.skipped += [text for text in other.skipped if text not in self.skipped]

    @property
    def bad(self) -> int:
        """How much there was of what should not be."""
        return self.wrong + self.lost + self.hangs + self.crashes + self.other

    def row(self) -> str:
        """The counts, under :meth:`head`."""
        return "".join(f"{getattr(self, name):>9}" for name in COUNTS)

    @staticmethod
    def head() -> str:
        """The names of the counts."""
        return "".join(f"{name:>9}" for name in COUNTS)


COUNTS = tuple(f.name for f in fields(Tally) if f.type == "int")
