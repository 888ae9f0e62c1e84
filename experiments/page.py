"""Make RESULTS.md and its figures from the records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from experiments import records as record_files
from experiments import style
from experiments.blocks import complete, missing
from experiments.differences import result_of, table_of
from experiments.provenance import costs, origin, settings
from experiments.recipe import Outcome, Recipe, Size
from experiments.records import Record
from experiments.report import Cell, table, wrap
from experiments.statistics import judge
from setfold import InputError
from setfold.core.persist import write_atomically

_INTRODUCTION = """\
# Results

We reproduce the experiments of *Mini-Batch Consistent Slot Set Encoder for Scalable Set Encoding*
(NeurIPS 2021) at reduced size, and add some. The Slot Set Encoder (SSE) **as printed** follows the
paper's text and pools the slots into one vector. With **slots apart** it concatenates them, at the
same encoding size. A result is a mean difference over seeds, with its 95% interval, in one of the
comparisons by which the claim is judged, and how many of them are better. NLL is negative
log-likelihood in nats per dimension; lower is better. `python -m experiments report` makes this
page from [results/records](results/records)."""

_READING = """\
## How to read the sections

Numbers:

- **±** is half the width of the 95% confidence interval of a mean over seeds (Student's t); a
  number without it has one seed. In figures, bands and whiskers show the range from the lowest to
  the highest seed.
- **Paired differences** compare two methods that were trained with the same seeds. A row is
  *better* or *worse* if the 95% interval of the mean difference excludes zero; with up to four
  seeds this implies that all seeds agree. Otherwise there is *no difference shown*, which does not
  mean that the methods are equal: with three seeds, an interval is 2.5 standard deviations wide to
  each side. A row of one seed says *one seed*.
- **Several comparisons** in one section raise the chance that one of them is wrong. Verdicts in
  bold remain after Holm's correction for all rows of the section.
- **Verdict.** A claim *holds* if all rows that count for it are better. This needs no correction,
  because all must agree. It *holds only with slots apart* if that is true of the rows for
  slots apart, but not of those for the encoder as printed. It *holds in part* if at least one row
  is better after the correction. It *does not hold* if none is, and at least one is worse after the
  correction; otherwise it is *not shown*. The program computes this from the rows. It says nothing
  about longer training: each section lists the differences from the paper's setup.
- **Missing runs.** All methods of a section have the same seeds. While some runs are missing, a
  section shows the largest block of methods and seeds without gaps; more than three seeds count as
  three, so that a method with three seeds is not left out for the sake of more seeds. The methods
  that are left out are listed as *not run yet*. There are no comparisons with them, and the
  verdict is one *so far*.
- **Bold numbers** are the best mean of a column and all that are not shown to be worse by their
  paired differences. So a bold number may be far from the best if its seeds differ much.
- **Test sets.** Intervals are over seeds, with one training set and one test set. Sections with
  accuracies state the standard error of a test set, which intervals do not contain: 0.74 percentage
  points for an accuracy of 0.84 on 2,446 shapes. For a difference of two methods it is up to 1.4
  times as large, and smaller the more their mistakes coincide; the records do not have the
  predictions that would tell. So *better* by less than about a point says that it is better on
  these shapes with other seeds, not that it is better on other shapes.
- **What was chosen how.** Weights, learning rates and all other choices were made on validation
  splits. A recorded run reads the test split once, after its training; `finished` in the record
  says when. Two things weaken this. The starting point of the tuning came from earlier short runs
  that had used the test split. And the sections on the number of slots, hierarchies, slots with
  places and own data were extended or repeated, in part with changed methods, after first test
  results were known; the history of [results/records](results/records) has the earlier records.
- **What was declared when.** The comparisons of sections 1 to 24 were declared after their first
  records existed. Those of later sections, and those with the baselines that sections 3 to 6 and 12
  to 17 got later, were declared without looking at their results. In sections 14, 25 and 26 some
  runs of the first seed had finished by then; the others were declared before they were run. Two of
  the later baselines, *Linear, mean* and *Mean of the features*, were known from section 22; they
  do not count for a claim.

Methods:

- **As printed** often loses the effect of attention. The attention weights of an element sum to one
  over the slots. So if slots hold sums or means and are then summed or averaged, attention cancels.
- **Deep Sets** is the element-wise form without message passing, which streams. The aggregate is
  the mean unless the name says otherwise. **PMA** is the Set Transformer's attention pooling
  without the self-attention layers before it. **ISAB** is its self-attention through inducing
  points.
- **Wide slots** have more dimensions than their share of the encoding; a linear layer maps their
  concatenation to the encoding size. **SSE → Set Transformer** applies a Set Transformer to the
  slots instead. Both still need one pass only.
- **Places**: `setfold.PlacedSlotEncoder`, slots on a grid that elements attend to by distance, and
  a network that knows the grid. It is not in the paper. These sections also state the CPU time of
  training.
- **Slots attended**: the decoder attends to the slots instead of reading one vector.
- Each section lists parameters and run time, which differ between methods."""

_GROUPS = {
    "What holds, in full or in part": (Outcome.HOLDS, Outcome.WITH_SLOTS_APART, Outcome.PARTLY),
    "What does not hold or is not shown": (
        Outcome.FAILS,
        Outcome.NOT_SHOWN,
        Outcome.ONE_SEED,
        None,
    ),
}
_NEW = "What is new, not in the paper"


def render(
    recipes: Sequence[Recipe], records: Mapping[str, Sequence[Record]], size: Size = Size.SMALL
) -> tuple[str, dict[str, Figure]]:
    """Return the text of RESULTS.md, and the figures by their file names in results/.

    Args:
        recipes: recipes in the order of the page.
        records: records by recipe name; blocks.py says which of them are shown.
        size: size to report. The words of verdicts were written for size "small" and are left out
            for others.
    """
    found = {one.name: complete(one, records.get(one.name, ()), size) for one in recipes}
    figures: dict[str, Figure] = {}
    parts = [_INTRODUCTION, _summary(recipes, found), _READING]
    for recipe in recipes:
        parts.append(f'<a id="{recipe.name}"></a>\n\n## {recipe.number}. {recipe.title}')
        parts.append(wrap(f"**Claim.** {recipe.claim}"))
        if found[recipe.name]:
            parts.extend(_paragraphs(recipe, found[recipe.name], size, figures))
        else:
            parts.append(f"Not run yet: `{_command(recipe, size)}`")
    parts.append(origin([one for several in found.values() for one in several], size))
    return "\n\n".join(part for part in parts if part) + "\n", figures


def write(
    recipes: Sequence[Recipe], records_folder: Path, out: Path, size: Size = Size.SMALL
) -> list[Path]:
    """Write RESULTS.md and results/*.png to a folder; each file is written atomically.

    Returns:
        The paths of the files.
    """
    records = {recipe.name: record_files.read(records_folder, recipe.name) for recipe in recipes}
    if not any(complete(recipe, records[recipe.name], size) for recipe in recipes):
        raise InputError(
            f"nothing to report: {records_folder} contains no method of size {size} with all its runs. Pass "
            "the folder that `run` printed as --records, or run a recipe first."
        )
    text, figures = render(recipes, records, size)
    contents = {out / "results" / name: style.png(figure) for name, figure in figures.items()}
    contents[out / "RESULTS.md"] = text.encode()  # last: it must not refer to missing figures
    (out / "results").mkdir(parents=True, exist_ok=True)
    for path, content in contents.items():
        write_atomically(path, content)
    return list(contents)


def _summary(recipes: Sequence[Recipe], records: Mapping[str, Sequence[Record]]) -> str:
    """List all claims, each with one result and the verdict, in a table of three groups."""
    groups: dict[str, list[list[Cell]]] = {name: [] for name in (*_GROUPS, _NEW)}
    later = []
    for recipe in recipes:
        link, own = f"[§{recipe.number}](#{recipe.name})", records[recipe.name]
        if not own:
            later.append(f"{recipe.title} {link}")
            continue
        compared = recipe.comparisons(own)
        outcome = judge(compared) or recipe.outcome
        result = result_of(compared) or recipe.headline(own)
        group = _NEW if recipe.new else next(name for name, of in _GROUPS.items() if outcome in of)
        claim, verdict = recipe.summary or recipe.title, _words(outcome, missing(recipe, own))
        groups[group].append([claim, _capitalised(result), verdict or "–", link])
    rows: list[list[Cell]] = []
    for name, several in groups.items():
        if several:
            rows += [[f"**{name}**", "", "", ""], *several]
    parts = ["## Summary"]
    if rows:
        parts.append(table(["claim", "result", "verdict", "section"], rows))
    if later:
        parts.append(wrap(f"Not run yet: {'; '.join(later)}."))
    return "\n\n".join(parts)


def _paragraphs(
    recipe: Recipe, records: Sequence[Record], size: Size, figures: dict[str, Figure]
) -> list[str]:
    """Return the paragraphs of a recipe with records, and add its figures to `figures`."""
    section = recipe.section(records)
    pictures = []
    for name, figure in section.figures.items():
        file = f"{recipe.name}-{name}.png" if name else f"{recipe.name}.png"
        figures[file] = figure
        about = f"{recipe.title}: {name}" if name else recipe.title
        pictures.append(f"![{about}](results/{file})")
    compared, absent = recipe.comparisons(records), missing(recipe, records)
    outcome = judge(compared) or recipe.outcome
    verdict = f"**Verdict: {_words(outcome, absent)}.**" if outcome else ""
    texts = [verdict]
    if size is Size.SMALL:
        texts = [
            f"{verdict} {recipe.verdict}",
            f"**Differences from the paper's setup.** {recipe.cut}",
        ]
    return [
        wrap(f"**Measured.** {_capitalised(recipe.headline(records))}."),
        wrap(f"**Not run yet** with these seeds: {'; '.join(absent)}.") if absent else "",
        section.table,
        *pictures,
        section.notes,
        table_of(compared, recipe.test_items),
        *map(wrap, texts),
        costs(records),
        wrap(f"**Settings.** {settings(records, recipe.seeds[size])}."),
        f"**Command.** `{_command(recipe, size)}`",
    ]


def _words(outcome: Outcome | None, absent: Sequence[str]) -> str:
    """Return a verdict as a text; it may change if methods are absent."""
    return f"{outcome}, so far" if outcome and absent else outcome or ""


def _command(recipe: Recipe, size: Size) -> str:
    return f"python -m experiments run {recipe.name} --size {size}"


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]
