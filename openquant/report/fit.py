"""The table of `openquant fit`, as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from ..diagnosis.result import BROKEN
from ..fit.table import FitTable, Held, SchemeFit, SearchResult, Target
from ..formats.hardware import ENGINES, ENGINES_FOR
from ..patterns import group_pairs
from .cells import NOTHING, gigabytes, join_lines, optional, or_dash, paragraphs, short, table, terminal


def fit_text(found: FitTable, width: int | None = None) -> str:
    """Format the table of schemes for a terminal.

    Args:
        found: the result of fit_table().
        width: the most characters of a line; None for any number.

    Returns:
        The text: what the table is for, a row for each scheme, notes, and the command for the best.
    """
    name = f"{found.model}{optional('@{}', found.revision)}"
    lines = [
        *paragraphs([f"{name}: {found.architecture}", fit_caption(found)], width),
        "",
        *table(fit_rows(found), width=width),
        "",
        *paragraphs(fit_notes(found), width),
        "",
    ]
    for about, command in fit_advice(found):
        if command:
            lines += [*paragraphs([f"{about}:"], width), f"  {terminal(command)}"]
        else:
            lines += paragraphs([about], width)
    return join_lines(lines)


def fit_notes(found: FitTable) -> list[str]:
    """Say what the figures of the table are, what must be installed, and which schemes are not in it, a line each.

    Args:
        found: the result of fit_table().
    """
    notes = [
        *(f"note: {terminal(note)}" for note in found.notes),
        f"KL: what {found.measured_on} lost, in nats; other models lose more or less",
        *_calibrated_lines(found),
        *_unmeasured_lines(found),
        *_heads(found),
    ]

    if found.quantized_source:
        notes.append("the model is quantized already: KL is what is lost on top of that")
    if found.cache_in_config:
        notes.append("FP8 KV cache: config.json asks for it (docs/how-to/serve.md)")
    if found.unknown:
        notes.append(f"the KV cache is not counted: it is not known {terminal(found.unknown)}")

    return [*notes, *_needs(found.schemes), *_refused_lines(found)]


def _calibrated_lines(found: FitTable) -> list[str]:
    """Say with which calibrations, and what is lost without them."""
    rows = [row for row in found.schemes if row.calibrated]
    options = [f"{str(row.calibrated).removeprefix('--scheme ')} ({row.kl:.3f} without)" for row in rows]
    return [f"KL *: with a calibration, {', '.join(options)}"] if rows else []


def _unmeasured_lines(found: FitTable) -> list[str]:
    names = [row.scheme for row in found.schemes if row.kl is None]
    if not names:
        return []
    broken = " and ".join(name for name in BROKEN if name in names)
    return [f"KL -: not measured for this scheme{optional('; {} in groups of 64 broke it (docs/results.md)', broken)}"]


def fit_caption(found: FitTable) -> str:
    """Say what a table is for: "2 A100-80 of 84.9 GB (Ampere), for sequences of 8,192 tokens in an FP8 KV cache".

    Args:
        found: the result of fit_table().
    """
    cache = "an FP8" if found.kv_cache == "fp8" else "a bfloat16"
    return f"{_targets(found)}, for sequences of {found.context:,} tokens in {cache} KV cache"


def _targets(found: FitTable) -> str:
    if len(found.targets) != 1:
        return "the fewest GPUs and the longest sequence that they hold"
    [target] = found.targets
    if target.memory_bytes is None:
        return str(target.name)
    size = gigabytes(target.memory_bytes)
    return f"{target.count} {target.name or 'GPU'} of {size}{optional(' ({})', target.hardware)}"


def fit_rows(found: FitTable) -> list[list[str]]:
    """Return the cells of the table as text, the heads of columns first.

    Args:
        found: the result of fit_table().
    """
    # The arithmetic is known.
    named = any(target.hardware for target in found.targets)
    several = len(found.targets) > 1

    memory = [target for target in found.targets if target.memory_bytes is not None]
    head = ["scheme", "bits", "size"]
    if several:
        head += [_memory(target) for target in memory]
    elif memory:
        head += ["GPUs", "longest", "at once"]
    if named:
        head.append("computes")
    rows = [[*head, "engine", "KL"]]

    for row in found.schemes:
        cells = [row.scheme or "(as it is)", or_dash("{:.2f}", row.bits), gigabytes(row.bytes)]
        for one in row.holds:
            if several:
                cells.append(_fewest(one))
            else:
                cells += [or_dash("{}", one.gpus), or_dash("{:,}", one.longest), short(one.sequences)]
        if named:
            cells.append(_arithmetic(row))
        rows.append([*cells, _engines(row.engines), _kl(row)])

    return rows


def _memory(target: Target) -> str:
    assert target.memory_bytes is not None
    return f"{target.memory_bytes / 1e9:g} GB"


def _fewest(held: Held) -> str:
    """Say how many GPUs hold it, and the longest sequence: "2: 40k"."""
    if held.gpus is None:
        return NOTHING
    if held.longest is None:
        return str(held.gpus)
    return f"{held.gpus}: {short(held.longest)}"


def _arithmetic(row: SchemeFit) -> str:
    """Name the numbers that are multiplied: "FP8"; "16 bits/FP8" if experts have others."""
    return "/".join(dict.fromkeys(filter(None, (row.arithmetic, row.expert_arithmetic)))) or NOTHING


def _kl(row: SchemeFit) -> str:
    if row.kl is None:
        return NOTHING
    if row.scheme is None:
        return "0"
    if row.calibrated:
        return f"{row.least:.3f}*"
    return f"{row.kl:.3f}"


def _engines(engines: tuple[str, ...]) -> str:
    if not engines:
        return NOTHING
    return "both" if len(engines) > 1 else engines[0]


def _heads(found: FitTable) -> list[str]:
    """Say what becomes of the output head, and that no figure counts it."""
    if not found.quantize_lm_head:
        return []
    lines = ["KL is without what the quantized output head loses (docs/output-head.md)"]
    names = [row.scheme for row in found.schemes if row.scheme in found.head_schemes]
    if names:
        lines.append(f"the output head is int8-weights beside {', '.join(map(str, names))}: fewer bits lose much in it")
    return lines


def _needs(rows: Iterable[SchemeFit]) -> list[str]:
    """Say what schemes need that does not come with the engine."""
    by_need = group_pairs((need, str(row.scheme)) for row in rows for need in row.needs)
    return [f"{need}: needed for {', '.join(schemes)}" for need, schemes in by_need.items()]


def _refused_lines(found: FitTable) -> list[str]:
    by_reason = group_pairs((reason, scheme) for scheme, reason in found.refused.items())
    return [terminal(f"not {', '.join(schemes)}: {reason}") for reason, schemes in by_reason.items()]


def fit_advice(found: FitTable) -> list[tuple[str, str]]:
    """Say what to type.

    Args:
        found: the result of fit_table().

    Returns:
        Sentences, each with its command, or "": ("fastest, 0.030 nats, computed in FP8", "openquant compress ..").
    """
    if len(found.targets) != 1:
        return [("name your GPU with --gpu, such as --gpu 4090, to get the command for it", "")]

    if found.command is None:
        advice = [(_nothing_fits(found, found.targets[0]), "")]
        if found.instead is not None and not _left_as_it_is(found):
            advice.append((f"this fits, for sequences of {found.context:,} tokens", found.instead))
            if found.longest_context is None or found.context < found.longest_context:
                advice.append((_serve_with(found.context, ENGINES), ""))
        return advice

    served = [(line, "") for line in _served_lines(found)]
    advice = [*((line, "") for line in _gained_lines(found)), *_commands(found), *served]
    if found.mixture is not None:
        engines = ENGINES_FOR.get(found.engines or "", _best(found).engines)
        mixture = f"a mixture for {' and '.join(engines)} fills the memory, and may lose less (docs/fit.md)"
        advice.append((mixture, found.mixture))
        if served:
            advice.append((_serve_with(found.context, _best(found).engines), ""))

    return advice


def _commands(found: FitTable) -> list[tuple[str, str]]:
    """Return the commands of the best schemes, and what each of them is best at."""
    rows = {row.scheme: row for row in found.schemes}
    commands = {"closest": (found.best, found.command), "fastest": (found.fastest, found.fastest_command)}
    if found.fastest == found.best:
        commands = {"closest and fastest": (found.best, found.command)}
    return [(f"{about}, {_why(rows[scheme])}", command) for about, (scheme, command) in commands.items() if command]


def _why(row: SchemeFit) -> str:
    """Say what a scheme loses, and in which numbers it is computed: "0.030 nats, computed in FP8"."""
    return f"{row.least:.3f} nats{optional(', computed in {}', ' and '.join(sorted(row.numbers)))}"


def _gained_lines(found: FitTable) -> list[str]:
    """Say that the model fits as it is, and what is gained all the same."""
    if found.quantized_source or not _fits_as_it_is(found, found.targets[0]):
        return []
    source, best = _source(found), _best(found)
    gained = f"{gigabytes(best.bytes)} in place of {gigabytes(source.bytes)}"

    sequences = [short(row.holds[0].sequences) for row in (best, source)]
    if sequences[0] != sequences[1]:
        gained += f", and {' sequences at once in place of '.join(sequences)}"
    return [f"the model fits as it is: nothing need be compressed. Compressed it has {gained}."]


def _left_as_it_is(found: FitTable) -> int | None:
    """Tokens that a quantized source leaves room for."""
    if not found.quantized_source:
        return None
    return next((held.left for held in _source(found).holds), None)


def _source(found: FitTable) -> SchemeFit:
    return next(row for row in found.schemes if row.scheme is None)


def _fits_as_it_is(found: FitTable, target: Target) -> bool:
    """Whether as many GPUs as there are hold the source."""
    return target.memory_bytes is not None and _source(found).holds[0].gpus == target.count


def _served_lines(found: FitTable) -> list[str]:
    """Name the option of engines for the context, if the model allows a longer one than fits."""
    rows = [row for row in found.schemes if row.scheme and row.scheme in (found.best, found.fastest)]
    longest = min((held.longest for row in rows for held in row.holds if held.longest is not None), default=None)
    if longest is None or longest == found.longest_context:
        return []
    return [f"{_serve_with(longest, _best(found).engines)} or less"]


def _best(found: FitTable) -> SchemeFit:
    return next(row for row in found.schemes if row.scheme == found.best)


def _serve_with(context: int, engines: Iterable[str]) -> str:
    """Name the option of the engines that load it."""
    sglang = " (SGLang: --context-length)" if "SGLang" in engines else ""
    return f"serve it with --max-model-len {context}{sglang}"


def _nothing_fits(found: FitTable, target: Target) -> str:
    """Say why there is no command for a GPU."""
    if found.quantized_source and _fits_as_it_is(found, target):
        return "the model is quantized already, and fits as it is: serve it"

    if left := _left_as_it_is(found):
        serve = _serve_with(left, ENGINES)
        return f"as it is the model leaves {left:,} tokens: {serve}, or try --kv-cache fp8 or more GPUs (--gpu 2x..)"

    gpus = f"{target.count} {target.name or 'GPU'}"

    rows = [row for row in found.schemes if row.scheme is not None and row.kl is not None and row.holds]
    row = next((row for row in rows if row.holds[0].gpus is not None), None)
    most = max(rows, key=lambda row: row.holds[0].left or 0, default=None)

    given = {"--kv-cache fp8": found.kv_cache == "fp8", "--quantize-lm-head": found.quantize_lm_head}
    names = ["a smaller --context", *(option for option, is_given in given.items() if not is_given)]
    advice = f"try {', '.join(names)} or more GPUs (--gpu 2x..)"

    needs = ", nor do 8 of them hold one"
    if row is not None:
        needs = f"; {row.scheme} needs {row.holds[0].gpus}"
    most_left = ""
    if most is not None and most.holds[0].left:
        most_left = f"; {most.scheme} leaves {most.holds[0].left:,} tokens"

    return f"no scheme with a known KL fits {gpus}{most_left}{needs}: {advice}"


def frontier_text(found: SearchResult, width: int | None = None) -> str:
    """Format what a search measured for a terminal.

    Args:
        found: the result of search_mixtures().
        width: the most characters of a line; None for any number.

    Returns:
        The text: a row for each mixture and scheme, the smallest first, and the commands that make them.
    """
    name = f"{found.model}{optional('@{}', found.revision)}"

    rows = [["", "bits", "size", "KL, nats", "95 % interval", "predicted"]]
    if found.limit is not None:
        rows[0].append("fits")

    for point in found.points:
        interval = " to ".join(f"{edge:.4f}" for edge in point.interval or ())
        cells = [point.name, f"{point.bits:.2f}", gigabytes(point.bytes), f"{point.kl:.4f}", interval]
        rows.append([*cells, f"{point.predicted:.4f}"])
        if point.fits is not None:
            rows[-1].append("yes" if point.fits else "no")

    engines = " and ".join(ENGINES_FOR[found.engines])
    heading = [f"{name}: {found.architecture}, for {engines}", f"weights rounded to nearest, on {found.texts}"]
    if found.gpu:
        heading.append(_room(found))
    predicted = "predicted: the sum of the scores, on other texts; it ranks mixtures, and is usually too large"

    lines = [*paragraphs(heading, width), "", *table(rows, width=width), "", *paragraphs([predicted], width)]
    # The command for the point that fits and loses least; without GPUs, one for any size.
    points = sorted((point for point in found.points if point.fits), key=lambda point: point.kl)
    points = points or [point for point in found.points if point.scheme is None]
    if points:
        lines += ["", f"  {terminal(points[0].command)}"]
    return join_lines(lines)


def _room(found: SearchResult) -> str:
    """Say how many bytes of weights fit."""
    if found.limit is None:
        return "how much memory a CPU has for weights is not known: name their size with compress --fit size=12.5GB"
    return f"{found.gpu} leaves {gigabytes(found.limit)} for weights"
