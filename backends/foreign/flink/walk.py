"""Entries of canonical key groups, found by lanes that walk many places of a stream at once.

An entry stores its own length, so it can only be found from the previous one. There are three ways,
depending on the key group:

* *runs*: entries of one size are found by comparing their lengths as strided arrays;
* *lanes*: small key groups are walked all at once, a step of numpy for one entry of each;
* *guesses*: a large key group is cut in pieces, and in each piece a place is sought that looks like
  an entry: its key begins with the number of the key group. A guess counts only where the lane
  before it arrives at that very byte, so that what is returned has been reached from the key
  group's beginning, whatever the bytes say. Where a guess was wrong its lane starts again.

Layout: `i32 key length, key, i32 value length, value`; the top bit of a key's first byte says that
an i16 follows the entry, the number of the next state or −1 for the end of the key group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from stateformat.errors import DamagedCheckpoint, ErrorKind

from ..byte_strings import ByteStrings, Octets, Positions, at_every_byte

PADDING: Final = 16
"""Bytes that must follow the last key group in a buffer, so that reads need no check."""

_RUN_BYTES: Final = 4096
"""Key groups below this are walked in lanes at once; comparing arrays would cost more."""
_PIECE: Final = 8192
_WINDOW: Final = 256
_ROUNDS: Final = 64
_PROBES: Final = 3

_REACHED, _ENDED, _BROKEN = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Entries:
    """Entries of one state: the key group of each, in ascending order, keys with their prefix."""

    groups: npt.NDArray[np.int32]
    keys: ByteStrings
    values: ByteStrings

    def __len__(self) -> int:
        return len(self.groups)

    def head(self, count: int) -> Entries:
        """Return the first ``count`` of them."""
        return Entries(self.groups[:count], self.keys.slice(0, count), self.values.slice(0, count))


@dataclass(frozen=True, slots=True)
class Frames:
    """All entries of some key groups, in the order of the stream.

    Entries ``first[i]`` … ``first[i + 1] − 1`` are those of state ``state[i]`` in key group
    ``group[i]``.
    """

    data: Octets
    entry: Positions
    """Where each entry begins: at the length of its key."""
    group: npt.NDArray[np.int32]
    state: npt.NDArray[np.int32]
    first: Positions

    def of(self, state: int) -> Entries:
        """Return the entries of the state that the header names at this position."""
        chosen = np.flatnonzero(self.state == state)
        counts = np.diff(self.first)[chosen]
        every = len(chosen) == len(self.state)
        entry = self.entry if every else self.entry[_ranges(self.first[chosen], counts)]
        data = self.data
        words = at_every_byte(data, ">i4")
        key_length = words[entry].astype(np.int64)
        value = entry + key_length
        value += 4
        value_length = words[value].astype(np.int64)
        value += 4
        groups = np.repeat(self.group[chosen], counts)
        return Entries(groups, ByteStrings(data, entry + 4, key_length), ByteStrings(data, value, value_length))

    def rows(self, state: int, groups: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Count the entries of a state in each of these key groups, which ascend by one."""
        counts = np.zeros(len(groups), np.int64)
        chosen = self.state == state
        if len(groups):
            np.add.at(counts, self.group[chosen] - groups[0], np.diff(self.first)[chosen])
        return counts


def frame_groups(
    data: Octets,
    start: Positions,
    end: Positions,
    groups: npt.NDArray[np.int32],
    prefix: int,
    *,
    where: str,
    open_end: bool = False,
) -> Frames:
    """Find the entries of key groups that lie at ``start[i]`` … ``end[i]`` of ``data``.

    Each begins with the number of its first state and ends with the mark −1 at ``end[i]``; with
    ``open_end`` the last one may end before. ``data`` has ``PADDING`` bytes behind the last end.
    ``prefix`` is the size of the key group's number in a key. Raises ``DamagedCheckpoint``.
    """
    if not len(start):
        none = np.zeros(0, np.int64)
        return Frames(data, none, np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(1, np.int64))
    finder = _Finder(data, groups, end, prefix, where, open_end)
    return finder.find(start)


class _Finder:
    """One call of :func:`frame_groups`."""

    def __init__(
        self,
        data: Octets,
        groups: npt.NDArray[np.int32],
        end: Positions,
        prefix: int,
        where: str,
        open_end: bool,
    ) -> None:
        self.data, self.groups, self.end, self.prefix = data, groups, end, prefix
        self.where, self.open_end = where, open_end
        self.words, self.halves = at_every_byte(data, ">i4"), at_every_byte(data, ">i2")
        self.lead = (groups >> 8 if prefix == 2 else groups).astype(np.uint8)

    def find(self, start: Positions) -> Frames:
        short = np.flatnonzero(self.end - start < 12 + self.prefix)
        if len(short):
            which = int(short[0])
            room = int(self.end[which] - start[which])
            self._damaged(which, f"has {room} bytes, too few for one entry and its end mark")
        state = self.halves[start].astype(np.int32)
        position = start + 2
        runs: list[tuple[int, Positions]] = []
        done = np.zeros(len(start), np.bool_)
        for which in np.flatnonzero(self.end - start >= _RUN_BYTES).tolist():
            pieces, position[which], done[which] = self._runs(which, int(position[which]))
            runs += [(which, piece) for piece in pieces]
        left = np.flatnonzero(~done)
        return self._frames(state, runs, *self._walked(left, position[left]))

    def _runs(self, which: int, position: int) -> tuple[list[Positions], int, bool]:
        """Find entries of one size from ``position`` on, as far as they go; return where they
        end.
        """
        end, data = int(self.end[which]), self.data
        found: list[Positions] = []
        lead = int(self.lead[which])
        while True:
            key = int(self.words[position])
            value = int(self.words[position + 4 + key]) if self.prefix <= key <= end - position - 10 else -1
            size = 8 + key + value
            if value < 0 or position + size + 2 > end:
                return found, position, False
            most = (end - 2 - position) // size
            count = 0
            # A few first: entries of different sizes show soon.
            for look in (min(32, most), most):
                firsts = np.ndarray((look,), np.uint8, data, position + 4, (size,))
                other = np.ndarray((look,), ">i4", data, position, (size,)) != key
                other |= np.ndarray((look,), ">i4", data, position + 4 + key, (size,)) != value
                other |= firsts != lead
                count = int(np.argmax(other)) if other.any() else look
                if count < look:
                    break
            last = position + count * size
            if count < most and int(self.words[last]) == key and int(self.words[last + 4 + key]) == value:
                count += 1
            if count < 8:
                return found, position, False
            found.append(position + size * np.arange(count, dtype=np.int64))
            position += count * size
            if not data[position - size + 4] & 0x80:
                continue
            after = int(self.halves[position])
            position += 2
            if after < 0 or position + 10 + self.prefix > end:
                self.ends(which, after, position)
                return found, position, True

    def _walked(self, which: npt.NDArray[np.int64], position: Positions) -> tuple[Positions, Positions]:
        """Walk key groups from ``position`` on. Returns for each entry, in order, its group and
        place.
        """
        if not len(which):
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        lanes = _Lanes(self, *self._guesses(which, position))
        lanes.walk()
        rounds = 0
        while lanes.mend(alone=rounds >= _ROUNDS):
            rounds += 1
        lanes.judge()
        return lanes.entries()

    def _guesses(self, which: npt.NDArray[np.int64], position: Positions) -> tuple[Positions, Positions]:
        """Return lanes, in order: their key groups' places, and where they begin."""
        owners, guesses, cells = [], [], []
        cell = 0
        for index in np.flatnonzero(self.end[which] - position >= 3 * _PIECE).tolist():
            group = int(which[index])
            begin, end = int(position[index]) + _PIECE, int(self.end[group])
            rows = (end - begin - _WINDOW - 8) // _PIECE
            # Below 64 KiB a key's length begins with two zeros, and the key with its group.
            shape, strides = (rows, _WINDOW), (_PIECE, 1)
            likely = np.ndarray(shape, ">u2", self.data, begin, strides) == 0
            likely &= (np.ndarray(shape, np.uint8, self.data, begin + 4, strides) & 0x7F) == self.lead[group]
            if self.prefix == 2:
                likely &= np.ndarray(shape, np.uint8, self.data, begin + 5, strides) == int(self.groups[group]) & 0xFF
            row, column = np.nonzero(likely)
            owners.append(np.full(len(row), group))
            guesses.append(begin + row * _PIECE + column)
            cells.append(cell + row)
            cell += rows
        if not owners:
            return which, position
        owner, guess = np.concatenate(owners), np.concatenate(guesses)
        probe = _Lanes(self, owner, guess, apart=True)
        probe.walk(steps=_PROBES)
        good = np.flatnonzero(probe.fate != _BROKEN)
        good = good[np.unique(np.concatenate(cells)[good], return_index=True)[1]]
        owner, begins = np.concatenate([which, owner[good]]), np.concatenate([position, guess[good]])
        order = np.lexsort((begins, owner))
        return owner[order], begins[order]

    def _frames(
        self,
        state: npt.NDArray[np.int32],
        runs: list[tuple[int, Positions]],
        walked: Positions,
        entries: Positions,
    ) -> Frames:
        """Put the entries of all key groups in order, and find where states change."""
        counts = np.bincount(walked, minlength=len(state))
        entry = entries
        if runs:
            cut = np.flatnonzero(np.diff(walked)) + 1
            pieces = [(which, 0, piece) for which, piece in runs]
            owners = walked[np.append(0, cut)].tolist() if len(walked) else []
            pieces += [(which, 1, piece) for which, piece in zip(owners, np.split(entries, cut), strict=False)]
            # Runs come first in a key group, in their own order.
            pieces.sort(key=lambda item: item[:2])
            entry = np.concatenate([piece for _, _, piece in pieces])
            np.add.at(counts, [which for which, _ in runs], [len(piece) for _, piece in runs])
        begin = np.cumsum(counts) - counts
        self._check_groups(entry, counts)
        flagged = np.flatnonzero(self.data[entry + 4] & 0x80)
        mark = entry[flagged]
        mark = mark + 4 + self.words[mark]
        after = self.halves[mark + 4 + self.words[mark]].astype(np.int32)
        goes_on = after >= 0
        first = np.concatenate([begin, flagged[goes_on] + 1])
        states = np.concatenate([state, after[goes_on]])
        groups = np.searchsorted(begin, flagged[goes_on], "right") - 1
        owner = np.concatenate([np.arange(len(state)), groups])
        order = np.argsort(first, kind="stable")
        first = np.append(first[order], len(entry))
        return Frames(self.data, entry, self.groups[owner[order]], states[order], first)

    def _check_groups(self, entry: Positions, counts: npt.NDArray[np.int64]) -> None:
        own = np.repeat(self.groups, counts)
        if self.prefix == 1:
            said = (self.data[entry + 4] & 0x7F).astype(np.int32)
        else:
            said = (self.halves[entry + 4] & 0x7FFF).astype(np.int32)
        wrong = np.flatnonzero(said != own)
        if len(wrong):
            which = int(np.searchsorted(np.cumsum(counts), wrong[0], "right"))
            self._damaged(which, f"holds a key of key group {said[wrong[0]]}")

    def ends(self, which: int, after: int, position: int) -> None:
        """Check what follows the last entry of a state."""
        end = int(self.end[which])
        if after >= 0:
            self._damaged(which, f"begins state {after} {end - position} bytes before its end")
        if after != -1:
            self._damaged(which, f"has {after} where the number of a state or −1 should stand")
        if position != end and not (self.open_end and which == len(self.end) - 1):
            self._damaged(which, f"ends {end - position} bytes before the next one begins")

    def broken(self, which: int, position: int) -> None:
        """Return the error for the entry at ``position``."""
        left = int(self.end[which]) - position
        key = int(self.words[position])
        what = f"has an entry {left} bytes before its end whose key says it has {key} bytes"
        if self.prefix <= key <= left - 10:
            first = int(self.data[position + 4]) & 0x7F
            if first != int(self.lead[which]):
                what = f"has a key of another key group {left} bytes before its end"
            else:
                what += f" and whose value says {int(self.words[position + 4 + key])}"
        self._damaged(which, what)

    def _damaged(self, which: int, what: str) -> None:
        group = int(self.groups[which])
        raise DamagedCheckpoint(
            f"key group {group} in {self.where} {what}; restore from another checkpoint or savepoint",
            kind=ErrorKind.DAMAGED_SEGMENT,
            path=self.where,
            key_group=group,
        )


class _Lanes:
    """Places of key groups that are walked at once, in order of the stream."""

    def __init__(self, finder: _Finder, which: Positions, begin: Positions, *, apart: bool = False) -> None:
        self.finder, self.which, self.begin = finder, which, begin
        self.apart = apart
        """Whether lanes continue where others begin."""
        self.position = begin.copy()
        """Where each lane has arrived."""
        self.fate = np.zeros(len(which), np.int8)
        self.steps: list[tuple[Positions, Positions]] = []
        """Lanes, and where their entries begin: at most one of each lane."""

    def _stops(self) -> Positions:
        """Return where each lane may stop: where the next one of its key group begins."""
        stop = self.finder.end[self.which]
        if not self.apart:
            stop[:-1] = np.where(self.which[1:] == self.which[:-1], self.begin[1:], stop[:-1])
        return stop

    def walk(self, lanes: Positions | None = None, steps: int = 1 << 62) -> None:
        """Walk these lanes, or all, to their stops; at most this many steps."""
        finder = self.finder
        words, halves, data, prefix = finder.words, finder.halves, finder.data, finder.prefix
        if lanes is None:
            lanes = np.arange(len(self.begin))
        at, stop, which = self.begin[lanes], self._stops()[lanes], self.which[lanes]
        end, lead = finder.end[which], finder.lead[which]
        while len(lanes) and steps > 0:
            steps -= 1
            key = words[at].astype(np.int64)
            good = key >= prefix
            good &= key <= end - at - 10
            value_at = np.where(good, at + key + 4, at)
            value = words[value_at].astype(np.int64)
            first = data[at + 4]
            good &= value >= 0
            good &= value <= end - value_at - 6
            good &= (first & 0x7F) == lead
            after = np.where(good, value_at + value + 4, at)
            fate = np.where(good, _REACHED, _BROKEN).astype(np.int8)
            flagged = np.flatnonzero((first >= 0x80) & good)
            if len(flagged):
                mark = halves[after[flagged]]
                after[flagged] += 2
                fate[flagged[mark < -1]] = _BROKEN
                fate[flagged[mark == -1]] = _ENDED
            if good.all():
                self.steps.append((lanes, at))
            else:
                self.steps.append((lanes[good], at[good]))
            going = (after < stop) & (fate == _REACHED)
            at = after
            if not going.all():
                self.position[lanes], self.fate[lanes] = after, fate
                lanes, at, stop, end, lead = lanes[going], at[going], stop[going], end[going], lead[going]
        self.position[lanes] = at

    def mend(self, *, alone: bool) -> bool:
        """Restart, in each key group, after the first lane whose successor begins elsewhere.

        Returns whether there was any. With ``alone`` one lane walks everything that is left.
        """
        same = self.which[1:] == self.which[:-1]
        apart = np.flatnonzero(same & ((self.position[:-1] != self.begin[1:]) | (self.fate[:-1] != _REACHED)))
        if not len(apart):
            return False
        apart = apart[np.unique(self.which[apart], return_index=True)[1]]
        lasts = np.searchsorted(self.which, self.which[apart], "right")
        alive, again = np.ones(len(self.begin), np.bool_), []
        for lane, last in zip(apart.tolist(), lasts.tolist(), strict=True):
            follow = last
            arrived = self.position[lane]
            if self.fate[lane] == _REACHED and not alone:
                follow = lane + 1 + int(np.searchsorted(self.begin[lane + 1 : last], arrived))
            alive[lane + 1 : follow] = False
            if self.fate[lane] == _REACHED and not (follow < last and self.begin[follow] == arrived):
                # The lane whose guess was wrong begins where the previous lanes have arrived.
                self.begin[lane + 1], alive[lane + 1] = arrived, True
                again.append(lane + 1)
        stays = alive.copy()
        stays[again] = False
        renamed = np.cumsum(alive) - 1
        self.steps = [(renamed[lane[stays[lane]]], at[stays[lane]]) for lane, at in self.steps]
        self.which, self.begin = self.which[alive], self.begin[alive]
        self.position, self.fate = self.position[alive], self.fate[alive]
        self.walk(renamed[np.array(again, np.int64)])
        return True

    def judge(self) -> None:
        """Raise ``DamagedCheckpoint`` unless the last lane of each key group has reached its
        end.
        """
        finder = self.finder
        last = np.append(self.which[1:] != self.which[:-1], True)
        wrong = np.flatnonzero(last & ((self.fate != _ENDED) | (self.position != finder.end[self.which])))
        for lane in wrong.tolist():
            which, position = int(self.which[lane]), int(self.position[lane])
            if self.fate[lane] == _BROKEN:
                finder.broken(which, position)
            after = -1 if self.fate[lane] == _ENDED else int(finder.halves[position - 2])
            finder.ends(which, after, position)

    def entries(self) -> tuple[Positions, Positions]:
        """Return for each entry, in order, its lane and where it begins."""
        counts = np.zeros(len(self.begin), np.int64)
        for lanes, _ in self.steps:
            counts[lanes] += 1
        place = np.cumsum(counts) - counts
        found = np.empty(int(counts.sum()), np.int64)
        for lanes, at in self.steps:
            found[place[lanes]] = at
            place[lanes] += 1
        return np.repeat(self.which, counts), found


def _ranges(first: Positions, counts: Positions) -> Positions:
    """Return the indexes of ranges, one range after another; none may be empty."""
    if not len(first):
        return np.zeros(0, np.int64)
    # Steps of one, and a jump where a range begins.
    steps = np.ones(int(counts.sum()), np.int64)
    steps[0] = first[0]
    steps[np.cumsum(counts)[:-1]] = first[1:] - (first[:-1] + counts[:-1] - 1)
    return np.cumsum(steps)
