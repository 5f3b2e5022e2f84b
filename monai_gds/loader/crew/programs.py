"""Where the items of an epoch get their programs, which worker processes draw and record. For reading ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice, takewhile

from monai_gds import limits
from monai_gds.base import stages
from monai_gds.base.stages import Watch
from monai_gds.dataset.dataset import GDSDataset
from monai_gds.dataset.programmed import Programmed, Seed
from monai_gds.loader.crew.crew import Crew, Running
from monai_gds.loader.crew.drawn import Drawn
from monai_gds.loader.crew.worker import ItemTask
from monai_gds.pipeline.settings import OfThread
from monai_gds.pipeline.split import Split
from monai_gds.programs.trust import Trust


class LoopLeft(Exception):
    """The loop was left while its thread waited for a worker. Nobody sees it."""


class Programs:
    """Where the items of one epoch get their programs: worker processes draw and record them.

    Args:
        crew: the processes, which have begun this epoch.
        loops: the datasets, in the order of the crew's work, with their pipelines. Their random halves are this loop's
            own.
        trusts: what is known of the programs of each.
        watch: adds up what workers measure.
        foresee: returns the batches of the next epoch, as far as that can be told.
    """

    def __init__(
        self, crew: Crew, loops: Mapping[GDSDataset, Split], trusts: Sequence[Trust], watch: Watch | None,
        foresee: Callable[[], Iterable[Drawn]],
    ) -> None:  # fmt: skip
        self._crew, self._loops, self._trusts, self._watch = crew, loops, trusts, watch
        self._foresee = foresee
        self._parts = list(loops)
        self._next: list[list[tuple[tuple[GDSDataset, int, Seed], Running]]] = []  # the next epoch's first batches
        #: How many items are drawn ahead of those that are read.
        self.window = 2 * crew.order.num_workers

    def order(self, dataset: GDSDataset, index: int, seed: Seed) -> Running:
        """Has a worker draw an item, and compute and save it if it is not cached."""
        return self._crew.take(self._task(dataset, index, seed))

    def go_on(self) -> None:
        """Has workers begin with the next epoch, since all of this one is ordered."""
        batches: list[list[tuple[GDSDataset, int, Seed]]] = []
        with suppress(Exception):  # of the user's sampler: it comes again with that epoch
            for batch in self._foresee():
                batches.append([(*place, seed) for place, seed in zip(batch.places, batch.seeds, strict=True)])
                if sum(map(len, batches)) >= self.window:
                    break
        first = islice(chain.from_iterable(batches), self.window)
        running = iter(self._crew.go_on([self._task(*item) for item in first]))
        self._next = [list(zip(items, running, strict=False)) for items in batches]

    def make_next(self, room: int, each: int, around: OfThread) -> Iterator[None]:
        """Makes the items of the first batches of the next epoch, as far as they are drawn, while the training is busy
        with the last ones of this epoch. Its first steps would wait for them, and compete with this thread for Python's
        lock.

        Not in an epoch that is measured, which would have them in its figures, nor where the order of this one was not
        foreseen.

        Args:
            room: bytes that they may take.
            each: bytes of a record that is read.
            around: the settings of the consumer.
        """
        wanted = self._watch is None and self._crew.foresees
        with suppress(Exception):  # it comes again with that epoch
            for batch in self._next[: limits.BATCHES_AHEAD] if wanted else ():
                drawn = list(takewhile(lambda pair: pair[1].has_program, batch))[: max(0, room // each)]
                made = [(running, self.begin(*item, running)) for item, running in drawn]
                for running, begun in made:  # all are being read
                    begun.arrive()  # without these settings, as in an epoch: gradients cannot use what inference reads
                    with around.applied():
                        if begun.replayed():
                            running.begun = begun
                            room -= begun.made_bytes
                if len(made) < len(batch):
                    break
                del made, begun  # or they would take room while others are read
                yield

    def _task(self, dataset: GDSDataset, index: int, seed: Seed) -> ItemTask:
        part = self._parts.index(dataset)
        trust = self._trusts[part]
        measured = self._watch is not None
        address = None if trust.rounds else self._crew.address
        return ItemTask(part, index, seed, trust.most, dict(trust.guesses), address, measured)

    def begin(self, dataset: GDSDataset, index: int, seed: Seed, running: Running) -> Programmed:
        """Begins to read what an item needs, once a worker has drawn it.

        Raises:
            LoopLeft: the loop was left meanwhile.
            Exception: what the worker raised.
        """
        session, split = dataset.session, self._loops[dataset]
        trust = self._trusts[self._parts.index(dataset)]
        begun, running.begun = running.begun, None
        if begun is not None and begun.holds(trust):
            return begun
        answer = self._crew.result(running, self._watch)
        if answer is None:
            raise LoopLeft
        stale = answer.digest not in ("", session.key(index).digest)  # a source was edited between the epochs
        if running.foreseen and (stale or answer.saved.how == "busy"):  # it was just being saved
            self._crew.again(running)
            answer = self._crew.result(running, self._watch)
            if answer is None:
                raise LoopLeft
        answer.saved.note()
        trust.note(answer.program, answer.refused)
        stages.count("rounded", answer.rounded)
        if answer.refused is not None:  # and not one that is not tried again
            session.runtime.on_values.setdefault(answer.refused.name, answer.refused.why)
        for step in answer.drew_globally:
            session.runtime.global_draws.note(split, step)
        return Programmed(session, split, index, answer, seed, trust)

    def warm(self) -> None:
        """Loads what the first items will need, while workers draw them."""
        if not self._crew.is_warm:
            self._crew.is_warm = True
            for part in self._parts:
                if (cache := part.session.cache()) is not None:
                    cache.warm()
