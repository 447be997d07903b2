"""What the tests of the publication protocol share: a stepped world, its errors, and rules that can
be broken.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from stateformat import paths as layout
from stateformat.errors import CheckpointError, ErrorKind, PublishConflict
from stateformat.publication import pending
from stateformat.publication.protocol import MOVES, Observation, Step
from tests.worlds.stepping import Driver, Options, Request, World, explore

Patch = pytest.MonkeyPatch
Stops = Callable[[Request], bool]
Break = Callable[[Patch], None]


def overtaken(driver: Driver, *, published: bool = False) -> PublishConflict:
    """The error of a driver when others have gone on: never a permit."""
    return _conflict(driver, ErrorKind.OVERTAKEN, published)


def lost(driver: Driver) -> PublishConflict:
    return _conflict(driver, ErrorKind.PUBLISH_LOST, False)


def _conflict(driver: Driver, kind: ErrorKind, published: bool) -> PublishConflict:
    error = driver.fail()
    assert isinstance(error, PublishConflict), repr(error)
    assert (error.kind, error.details["published"]) == (kind, published)
    return error


def protocol_only(request: Request) -> bool:
    """Only requests about records: all others of a publisher are named by its own attempt and meet
    nobody's.
    """
    return request.path.startswith(layout.RECORDS)


def records_and_manifests(request: Request) -> bool:
    return request.path.startswith((layout.RECORDS, layout.MANIFESTS))


def orders(
    build: Callable[[World], object], *options: Options, stops: Stops = protocol_only, least: int = 2
) -> Iterator[World]:
    """Every interleaving of the drivers that ``build`` starts, each when they have ended; there are
    some at least.
    """

    def make() -> World:
        world = World(stops=stops)
        build(world)
        return world

    count = 0
    for world, _ in explore(make, *options):
        count += 1
        yield world
    assert count >= least


class Rule(NamedTuple):
    """A rule of the protocol: how it is broken, and the test that then fails."""

    id: str
    broken: Break
    scenario: Callable[..., None]

    def holds_the_scenario(self, patch: Patch) -> None:
        self._run()
        self.broken(patch)
        with pytest.raises((AssertionError, CheckpointError, FileNotFoundError, pytest.fail.Exception)):
            self._run()

    def _run(self) -> None:
        if not inspect.signature(self.scenario).parameters:
            self.scenario()
            return
        with World() as world:
            self.scenario(world)


class Rules(list[Rule]):
    """The rules of one file. ``@rules("F2-permit", broken)`` names the rule that a test needs."""

    def __call__(self, name: str, broken: Break) -> Callable[[Callable[..., None]], Callable[..., None]]:
        def listed(scenario: Callable[..., None]) -> Callable[..., None]:
            self.append(Rule(name, broken, scenario))
            return scenario

        return listed


def instead(at: Step, saw: Observation, after: Step) -> Break:
    """Another move than the table's."""
    return lambda patch: patch.setitem(MOVES, (at, saw), after)


def do_not_look(patch: Patch) -> None:
    """The source's record is not looked at between manifest and record."""
    patch.setattr(pending, "record_exists", lambda storage, ref: True)
