"""One conversion from its beginning, or from where a kill left it, to its end."""

from __future__ import annotations

import inspect
import os
import shutil
import time
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from penstock.core.errors import PenstockError, SourceError
from penstock.feed.convert.canon import Tally
from penstock.feed.convert.compare import compare
from penstock.feed.convert.crew import Crew
from penstock.feed.convert.fingerprint import Fingerprint
from penstock.feed.convert.journal import Journal
from penstock.feed.convert.plan import Plan, contents, grouped, planned
from penstock.feed.convert.progress import Meter
from penstock.feed.convert.reading import Recipe, layout_of
from penstock.feed.convert.segment import Count, Join, Prove, Write, Wrote, data_path
from penstock.feed.convert.target import Target, nbytes_of
from penstock.feed.sources.base import Source
from penstock.feed.sources.sample import Errors


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """What a conversion has done."""

    samples: int
    files: tuple[str, ...]
    """Those that were written, or compared."""
    nbytes: int
    """Of the files."""
    seconds: float
    checksum: str
    """Of the samples, in whatever order: see `penstock.feed.convert.canon`. Equal for equal samples of any format."""
    skipped: int
    """Broken records that were left out; a shard whose rest could not be read counts as one."""
    resumed: int
    """Samples that an earlier attempt had written."""
    verified: bool
    """Whether the result was read again and compared with the source, sample by sample."""


class Work:
    """One conversion: looks, plans, writes segments, joins them, gives the result its name."""

    def __init__(
        self,
        recipe: Recipe,
        target: Target,
        errors: Errors,
        workers: int,
        writer_options: dict[str, Any],
        meter: Meter,
    ) -> None:
        self._recipe = recipe
        self._target = target
        self._errors = errors
        self._workers = workers
        self._writer_options = writer_options
        self._meter = meter
        self._module = target.kind.load()
        if not hasattr(self._module, "Writer"):
            raise SourceError(f"{target.path}: {target.kind.name} is read by penstock, and not written")
        target.kind.check_options(self._module.Writer, writer_options)

    def run(self, found: Fingerprint, *, overwrite: bool, verify: bool, began: float) -> Conversion:
        """Do it, or what is left of it."""
        if not os.path.isdir(self._target.partial):
            self._target.refuse(overwrite=overwrite)
        with closing(Journal(self._target.partial, self._settings(found))) as journal:
            try:
                if journal.last("finished") is None:
                    self._target.refuse(overwrite=overwrite)
                    with closing(Crew(self._workers, journal.lock)) as crew:
                        self._make(journal, crew, verify=verify)
                done = journal.last("finished") or {}
                names = self._target.publish(done["folders"], overwrite=overwrite)
            except PenstockError as error:
                self._leave(journal, error)
                raise
            except OSError as error:
                failure = SourceError(f"{self._target.path} could not be finished: {error}")
                self._leave(journal, failure)
                raise failure from error
        return Conversion(
            samples=done["samples"],
            files=tuple(names),
            nbytes=sum(nbytes_of(name) for name in names),
            seconds=time.monotonic() - began,
            checksum=done["checksum"],
            skipped=done["skipped"],
            resumed=done["resumed"],
            verified=done["verified"],
        )

    def _leave(self, journal: Journal, error: PenstockError) -> None:
        """Keep what an earlier end has left, if it is worth it, and say so."""
        kept = sum({entry["number"]: entry["samples"] for entry in journal.all("wrote")}.values())
        if kept:
            error.add_note(
                f"{kept} samples are kept in {self._target.partial}; when it is mended the same call goes on"
            )
        else:  # whoever mends the command is not to stumble over it
            shutil.rmtree(self._target.partial, ignore_errors=True)

    def _settings(self, found: Fingerprint) -> dict[str, Any]:
        recipe, target = self._recipe, self._target
        return {
            "source": recipe.path,
            "format": recipe.format,
            "fields": recipe.fields,
            "options": recipe.options,
            "errors": self._errors,
            "target": target.kind.name,
            "writer options": self._writer_options,
            "shards": target.shards,
            "shard size": target.shard_nbytes,
            "files of the source": found.to_json(),
        }

    def _make(self, journal: Journal, crew: Crew, *, verify: bool) -> None:
        """Do all that can be done before the result gets its name."""
        plan = self._plan(journal, crew)
        wrote, resumed = self._write(plan, journal, crew)
        folders, counts = self._join(plan, wrote, journal, crew)
        files = tuple(data_path(folder, self._target.suffix) for folder in folders)
        options = self._options_to_read()
        result = Recipe.of(files, format=self._target.kind.name, fields=list(plan.schema) or None, options=options)
        skipped = sum(one.skipped for one in wrote) + plan.lost
        if verify:
            self._meter.begin("comparing", sum(counts))
            compare(
                self._recipe,
                result,
                plan.layout,
                layout_of(result, counts),
                crew,
                self._meter,
                errors=self._errors,
                in_step=not skipped,
                is_ordered=self._target.is_ordered(plan.schema),
            )
        tally = Tally()
        for one in wrote:
            tally.add_tally(one.tally)
        journal.append(
            "finished",
            folders=[os.path.basename(folder) for folder in folders],
            samples=tally.samples,
            checksum=tally.checksum(),
            skipped=skipped,
            resumed=resumed,
            verified=verify,
        )

    def _options_to_read(self) -> dict[str, Any]:
        """Return the writer's options that whoever reads the result has to say, too: a delimiter, a dtype."""
        known = inspect.signature(self._module.opened).parameters
        return {name: value for name, value in self._writer_options.items() if name in known}

    def _plan(self, journal: Journal, crew: Crew) -> Plan:
        entry = journal.last("planned")
        if entry is not None:
            return Plan.of_json(entry)
        self._refuse_early()
        held = contents(self._recipe, self._errors, crew, self._workers, self._meter, journal)
        self._refuse(self._module.unfit(held.schema))
        with closing(self._recipe.open()) as source:
            runs = source.runs if isinstance(source, Source) else None
        plan = planned(held, self._target, runs, self._workers, joins=hasattr(self._module, "joined"))
        journal.append("planned", **plan.to_json())
        return plan

    def _refuse_early(self) -> None:
        """Refuse what the first sample shows already, before all are looked through.

        Raises:
            SourceError: the format can hold it neither as it is nor if sizes should turn out to differ.
        """
        with closing(self._recipe.open()) as source:
            try:
                schema = source.schema
            except SourceError:  # told with its place when it is looked at
                return
        wide = {name: replace(field, shape=(None,) * len(field.shape)) for name, field in schema.items()}
        if self._module.unfit(wide):
            self._refuse(self._module.unfit(schema))

    def _refuse(self, reason: str) -> None:
        if reason:
            raise SourceError(
                f"{self._target.path}: {reason}; choose or rename fields with fields= (--fields a,new=old)"
            )

    # ── segments ────────────────────────────────────────────────────────────────────────────────────────────

    def _part(self, number: int) -> str:
        return os.path.join(self._target.partial, f"part-{number:06d}")

    def _file(self, number: int) -> str:
        return os.path.join(self._target.partial, f"file-{number:06d}")

    def _write(self, plan: Plan, journal: Journal, crew: Crew) -> tuple[list[Wrote], int]:
        """Write the segments that are not written yet; return all, and the samples that were written before."""
        count = len(plan.cuts) - 1
        wrote = self._proven(plan, journal, crew)
        resumed = sum(one.tally.samples for one in wrote.values())
        self._meter.begin("writing", plan.layout.total, resumed)
        tasks = [
            Write(
                number=number,
                recipe=self._recipe,
                stretches=plan.layout.stretches(plan.cuts[number], plan.cuts[number + 1]),
                errors=self._errors,
                schema=plan.schema,
                format=self._target.kind.name,
                options=self._writer_options,
                folder=self._part(number),
                suffix=self._target.suffix,
            )
            for number in range(count)
            if number not in wrote
        ]
        for _, one in crew.run(tasks, self._meter):
            wrote[one.number] = one
            journal.append("wrote", **one.to_json())
        return [wrote[number] for number in range(count)], resumed

    def _proven(self, plan: Plan, journal: Journal, crew: Crew) -> dict[int, Wrote]:
        """Return the segments that the journal proves, and throw all other files away."""
        said = {entry["number"]: Wrote.of_json(entry) for entry in journal.all("wrote")}
        kept = {"journal.jsonl", "lock"}
        inside: set[int] = set()
        if len(said) == len(plan.cuts) - 1:
            for number, group in enumerate(self._groups(plan, [said[one] for one in range(len(said))])):
                if self._is_joined(number, journal):
                    inside.update(group)
                    kept.add(os.path.basename(self._file(number)))
        proofs = [
            Prove(number=number, folder=self._part(number), file_nbytes=one.file_nbytes, crc32=one.crc32)
            for number, one in said.items()
            if number not in inside
        ]
        proven = {number: said[number] for number in inside}
        for task, holds in crew.run(proofs, self._meter):
            if holds:
                proven[task.number] = said[task.number]
                kept.add(os.path.basename(self._part(task.number)))
        for name in set(os.listdir(self._target.partial)) - kept:
            path = os.path.join(self._target.partial, name)
            if os.path.isdir(path):
                shutil.rmtree(path)
            else:
                os.remove(path)
        return proven

    # ── files ───────────────────────────────────────────────────────────────────────────────────────────────

    def _groups(self, plan: Plan, wrote: list[Wrote]) -> list[range]:
        return grouped(plan, self._target, [one.file_nbytes for one in wrote])

    def _is_joined(self, number: int, journal: Journal) -> bool:
        path = self._file(number)
        sizes = [entry["nbytes"] for entry in journal.all("joined") if entry["number"] == number]
        return bool(sizes) and os.path.exists(path) and nbytes_of(path) == sizes[-1]

    def _join(self, plan: Plan, wrote: list[Wrote], journal: Journal, crew: Crew) -> tuple[list[str], tuple[int, ...]]:
        """Make the files; return their folders, and how many samples each has."""
        groups = self._groups(plan, wrote)
        counts = tuple(sum(wrote[number].tally.samples for number in group) for group in groups)
        folders = [
            self._part(group[0]) if len(group) == 1 else self._file(number) for number, group in enumerate(groups)
        ]
        self._meter.begin("joining", None)
        tasks = [
            Join(
                number=number,
                format=self._target.kind.name,
                parts=tuple(self._part(one) for one in group),
                folder=self._file(number),
                suffix=self._target.suffix,
            )
            for number, group in enumerate(groups)
            if len(group) > 1 and not self._is_joined(number, journal)
        ]
        for task, nbytes in crew.run(tasks, self._meter):
            journal.append("joined", number=task.number, nbytes=nbytes)
        for one in (one for group in groups if len(group) > 1 for one in group):
            shutil.rmtree(self._part(one), ignore_errors=True)
        checks = [
            Count(
                number=number,
                path=data_path(folder, self._target.suffix),
                format=self._target.kind.name,
                options=self._options_to_read(),
                expected=count,
            )
            for number, (folder, count) in enumerate(zip(folders, counts, strict=True))
        ]
        for _ in crew.run(checks, self._meter):
            pass
        return folders, counts
