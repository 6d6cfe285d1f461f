"""Carry out a prepared plan: claim the output, fetch, convert, write the other files, publish."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from .convert.conversion import Progress, check_copied, convert
from .distributed import Ranks, attempt
from .errors import OutputError, SourceError
from .files.checkpoint import open_checkpoint, readable
from .files.evaluation import find_evaluation
from .files.names import CARD_FILE, INDEX_FILE
from .files.output import REPLACE, OutputDirectory
from .files.small_files import read_small
from .formats.finite import NonFinite
from .hub.fetch import ShardSupply
from .hub.publish import Published, Publisher
from .hub.source import Source, silent
from .job import Prepared, Rounding, output_directory, source_needs
from .plan.layout import Shard
from .plan.plan import Plan
from .report.card import evaluated_card, model_card
from .report.escape import terminal
from .reporter import Reporter
from .verification.finished import check_finished, require_sound


class Outcome(NamedTuple):
    """What became of a run.

    Attributes:
        resumed: whether it continued an earlier one.
        already_complete: whether that had left nothing to do.
        published: where the model was pushed, if it was.
        not_finite: the tensors with NaN or infinity among those that stay unquantized, known to the first rank.
        unread: how many shards were not looked at for these, since an earlier run has moved them to the Hub.
    """

    resumed: bool
    already_complete: bool
    published: Published | None
    not_finite: Mapping[str, NonFinite]
    unread: int


class _Traffic:
    """Fetches shards before they are converted and uploads them afterwards, as convert() asks; ends if a rank fails."""

    def __init__(self, supply: ShardSupply, publisher: Publisher | None, ranks: Ranks) -> None:
        self.supply = supply
        self.ranks = ranks
        self.publisher = publisher
        self.path = supply.path

    def wait_for(self, output: str, stopped: Callable[[], bool]) -> None:
        def ended() -> bool:
            self.ranks.check()
            return stopped()

        if self.publisher is not None:
            self.publisher.wait_for_room(output, ended)
        self.supply.wait_for(output, ended)

    def finished(self, output: str) -> None:
        self.supply.finished(output)
        if self.publisher is not None:
            self.publisher.finished(output)


def carry_out(prepared: Prepared, ranks: Ranks, reporter: Reporter, rounding: Rounding | None = None) -> Outcome:
    """Write the output and publish it, together with the other ranks.

    Args:
        prepared: what is to be written.
        ranks: this process among several.
        reporter: is told of it.
        rounding: rounds layers before the conversion, if something is to be converted.
    """
    plan, source, push = prepared.plan, prepared.source, prepared.run.push
    shards = {shard.name: shard.nbytes for shard in plan.shards}
    # Made before anything is converted, so that nothing about them can fail after hours.
    made = _made_files(prepared)
    publisher = Publisher(push, prepared.target, plan.digest, shards) if push else None
    directory = output_directory(prepared, made, publisher, ranks, rounding.missing(prepared) if rounding else 0)
    with ExitStack() as stack:
        if source.remote or publisher:
            stack.enter_context(silent())

        def advanced(nbytes: int) -> None:
            ranks.check()
            reporter.advanced(nbytes)

        def claim() -> tuple[list[str] | None, list[str], str]:
            """What the first rank tells all: the unfinished shards (None if nothing at all is left to do), the source's
            shards that look different than when something was made of them, the repository to push to.
            """
            if not ranks.first:
                return None, [], ""
            stack.enter_context(directory)
            changed = sorted(directory.moved - prepared.stamps.keys())
            if changed:
                raise SourceError(f"{source.root / changed[0]} changed since {prepared.target} was made", REPLACE)
            if publisher:
                if directory.moved:
                    publisher.forget()
                publisher.prepare(made[CARD_FILE], source.downloaded_commit())
            unfinished = [name for name in shards if not directory.is_finished(name)]
            repo = publisher.repo if publisher else ""
            return None if directory.complete else unfinished, sorted(directory.moved), repo

        claimed, error = attempt(claim)
        told = ranks.agree(error, claimed)[0]
        assert told is not None
        todo, moved, repo = told[0], frozenset(told[1]), told[2]
        if publisher:
            publisher.repo = repo
            stack.enter_context(publisher)
        if rounding is not None and (todo or moved):
            found, error = attempt(lambda: rounding.run(prepared, ranks, reporter))
            ranks.agree(error)
            assert found is not None
            plan, prepared = found, replace(prepared, plan=found)
        if todo is not None or moved:
            if not ranks.first:
                stack.enter_context(directory.joined())
            names = set(todo or ())
            held = [shard for shard in plan.shards if shard.name not in names and plan.sources(shard.name) & moved]
            left = names.union(shard.name for shard in held)
            sizes = {shard: plan.consumed(shard) for shard in shards}
            reporter.started(sum(sizes.values()), sum(size for shard, size in sizes.items() if shard not in left))
            if moved:
                mine = ranks.share(held)
                _, error = attempt(lambda: _hold(prepared, directory, mine, moved, ranks, advanced))
                ranks.agree(error)
                _, error = attempt(lambda: directory.renew() if ranks.first else None)
                ranks.agree(error)
        not_finite: dict[str, NonFinite] = {}
        unread: list[str] = []
        if todo is not None:
            mine = ranks.share([shard for shard in plan.shards if shard.name in names])

            def work() -> None:
                needs = source_needs(source, plan, [shard.name for shard in mine])
                scratch = directory.make_scratch(ranks.rank) if prepared.run.stream else None
                if source.remote and scratch is None:
                    source.require_cache_space({name for names in needs.values() for name in names})
                with ShardSupply(source, needs, scratch) as supply:
                    traffic = _Traffic(supply, publisher, ranks)
                    found = convert(
                        plan, mine, traffic, directory, prepared.workers, prepared.device, advanced, fast=prepared.fast
                    )
                not_finite.update(found)
                if publisher:
                    publisher.drain()

            _, error = attempt(work)
            ranks.agree(error)
            for data in ranks.gather(json.dumps(not_finite).encode()):
                not_finite.update({name: NonFinite(*counts) for name, counts in json.loads(data).items()})

        def finish() -> Published | None:
            evaluation: list[str] = []
            if not ranks.first:
                return None
            if todo is not None:
                _write_others(prepared, directory, made, ranks, reporter)
                # A run that only pushes has deleted those that are on the Hub.
                if not (push and push.only):
                    _require_all(prepared.target, shards)
                    _check_finished(prepared.target, plan, directory.resumed)
                for name in shards.keys() - names:
                    # An earlier run has copied tensors into these.
                    if directory.folder.is_file(name):
                        not_finite.update(check_copied(prepared.target / name, plan.lay_out(name)))
                    else:
                        unread.append(name)
                directory.finish()
            if publisher is None or push is None:
                return None
            if todo is None and not push.only:
                # Nobody looked at it since an earlier run was done with it.
                require_sound(prepared.target, directory.files.keys())
                evaluation = take_evaluation(publisher)
            reporter.publishing(publisher.repo)
            title = terminal(f"{source.name} in {plan.numbers} ({plan.title})")
            return publisher.finish(sorted([*plan.files.keys() | made.keys(), *evaluation]), title)

        published, error = attempt(finish)
        ranks.agree(error)
        if rounding is not None and ranks.first:
            rounding.remove(prepared)
    return Outcome(directory.resumed, todo is None, published, not_finite, len(unread))


def take_evaluation(publisher: Publisher) -> list[str]:
    """The files of an evaluation that lies beside what is to be published, whose figures the card then has too.

    Raises:
        SourceError: it is damaged, or of another model.
    """
    found = find_evaluation(open_checkpoint(publisher.directory))
    if found is None:
        return []
    publisher.complete = partial(evaluated_card, evaluation=found.evaluation)
    return found.files


def _check_finished(target: Path, plan: Plan, resumed: bool) -> None:
    """Hold what lies there against the plan; what an earlier run had finished may have been changed since."""
    try:
        check_finished(target, plan)
    except RuntimeError as error:
        if not resumed:
            raise
        raise OutputError(
            f"{error}; an earlier run wrote part of it", "if something changed it since, replace it with --overwrite"
        ) from None


def _require_all(target: Path, shards: Iterable[str]) -> None:
    """Refuse to finish what has lost a shard since, or has it elsewhere: ranks may see different directories."""
    for name in shards:
        if not (target / name).is_file():
            raise OutputError(
                f"{target / name} was written, and is not there",
                "let all ranks write to one directory, and nothing else touch it; then run the same command again",
            )


def _made_files(prepared: Prepared) -> dict[str, bytes]:
    """The files that are written rather than copied, config.json last: without it no engine takes this for a model."""
    made = {CARD_FILE: _card(prepared.plan, prepared.source, prepared.target)}
    if prepared.plan.source.indexed:
        made[INDEX_FILE] = _index(prepared.plan)
    made["config.json"] = _config(prepared.plan)
    return made


def _hold(
    prepared: Prepared,
    directory: OutputDirectory,
    shards: Sequence[Shard],
    moved: Set[str],
    ranks: Ranks,
    progress: Progress,
) -> None:
    """Make finished shards once more, in memory, and compare them with what lies there byte for byte.

    Args:
        prepared: the run.
        directory: where they lie.
        shards: those made from source shards that look different now.
        moved: those source shards.
        ranks: the other ranks, whose failure ends this.
        progress: is told of bytes.

    Raises:
        SourceError: the source makes something else now.
    """
    plan, root = prepared.plan, prepared.source.root
    against = {shard.name: _named(root, sorted(plan.sources(shard.name) & moved)) for shard in shards}
    with ShardSupply(prepared.source, {}, None) as supply:
        traffic = _Traffic(supply, None, ranks)
        convert(plan, shards, traffic, directory, prepared.workers, prepared.device, progress, against, prepared.fast)


def _named(root: Path, names: Sequence[str]) -> str:
    """Files of which one is to blame, for a message: "one of a.safetensors, b.safetensors in /models/x"."""
    if len(names) == 1:
        return str(root / names[0])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"one of {', '.join(names[:3])}{more} in {root}"


def _write_others(
    prepared: Prepared, directory: OutputDirectory, made: dict[str, bytes], ranks: Ranks, reporter: Reporter
) -> None:
    """Write what is no shard; what the source is now must be what all was made from."""
    source, plan = prepared.source, prepared.plan
    stamps, digests = source.stamps(prepared.checkpoint), source.digests(prepared.checkpoint)
    copied = plan.files.keys() - made.keys()
    changed = {name for name, digest in digests.items() if directory.sources[name] != digest}
    if changed - copied:
        raise SourceError(f"{source.root / min(changed - copied)} changed while it was being converted", REPLACE)
    # Not the inode: some network file systems give a file another one every now and then, and a replaced file has
    # another time of change.
    moved = {name for name, (*times, _) in stamps.items() if prepared.stamps[name][:-1] != times}
    shards = [shard for shard in plan.shards if plan.sources(shard.name) & moved]
    if moved and plan.gptq is not None:
        # What was rounded before stays as it is, and would not show it.
        raise SourceError(f"{source.root / min(moved)} changed while it was being converted", REPLACE)
    gone = [shard.name for shard in shards if not directory.folder.is_file(shard.name)]
    if gone:
        raise SourceError(
            f"{source.root / min(moved)} changed while it was being converted, and {gone[0]} is on the Hub already",
            "run the same command again: all shards are made and uploaded again",
        )
    if moved:
        _hold(prepared, directory, shards, moved, ranks, lambda _: reporter.advanced(0))
        directory.sources = {**directory.sources, **stamps}
    for name in copied:
        if name in changed or not directory.is_finished(name):
            directory.copy(source.root / name, name)
    for name, data in made.items():
        if not directory.is_finished(name):
            directory.write(name, data)


def _card(plan: Plan, source: Source, target: Path) -> bytes:
    base = None
    if CARD_FILE in plan.files:
        with readable():
            base = read_small(source.root / CARD_FILE, CARD_FILE).decode("utf-8-sig", errors="replace")
    # A name that is no UTF-8 could not be written.
    directory = os.fsencode(Path(os.path.realpath(target)).name).decode("utf-8", "replace")
    return model_card(base, plan, source.name, source.repo, source.revision, directory).encode()


def _index(plan: Plan) -> bytes:
    placed = {info.name: shard.name for shard in plan.shards for info in plan.outputs(shard.name)}
    index = {"metadata": {"total_size": plan.output_bytes}, "weight_map": dict(sorted(placed.items()))}
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()


def _config(plan: Plan) -> bytes:
    try:
        return (json.dumps(plan.config, indent=2, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:
        # Half of a surrogate pair, which JSON can only hold escaped.
        return (json.dumps(plan.config, indent=2) + "\n").encode()
