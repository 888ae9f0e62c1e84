from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

import setfold
from experiments import page, records, report, style
from experiments.recipe import Outcome, Recipe, Run, Size
from experiments.recipes.common import against
from experiments.statistics import ACCURACY, Part
from tests.experiments.clouds import RECORDS


def values_of(found):
    return report.grid(found, "accuracy", "method", "points")


def section(found) -> report.Section:
    drawing, [axes] = style.figure()
    style.curves(axes, values_of(found), "points", "accuracy")
    rows = [[method, *line.values()] for method, line in values_of(found).items()]
    text = report.table(["", "200", "1000"], rows, digits=2, best=max)
    return report.Section(text, {"": drawing, "more": style.figure()[0]}, "Taller is better.")


def headline(found) -> str:
    best = [
        one for one in found if one.method == "SSE, slots apart" and one.settings["points"] > 200
    ]
    return f"SSE {report.summary(report.metric(best, 'accuracy'), 2)}"


def comparisons(found):
    return against(values_of(found), "SSE, slots apart", ["Deep Sets"], ACCURACY, " points")


CLOUDS = Recipe(
    number=2,
    name="clouds",
    title="Clouds | points",
    claim="SSE wins at 0.9. Deep Sets\nloses.",
    runs=lambda size, seed: [
        Run(one.method, one.training, dict, one.settings) for one in RECORDS if one.seed == seed
    ],
    section=section,
    headline=headline,
    verdict="SSE wins here, too.",
    cut="180 epochs of 200.",
    minutes=1,
    summary="SSE wins",
    comparisons=comparisons,
    test_items=2446,
    seeds={Size.SMALL: 2, Size.PAPER: 2},
)
DIGITS = dataclasses.replace(CLOUDS, number=3, name="digits", title="Digits")


def rendered(*recipes: Recipe, found=RECORDS, size=Size.SMALL) -> str:
    return page.render(recipes, {"clouds": found}, size)[0]


def test_the_page_has_all_that_a_recipe_says():
    text, figures = page.render([CLOUDS, DIGITS], {"clouds": RECORDS})
    assert '<a id="clouds"></a>\n\n## 2. Clouds | points' in text
    for part in (
        "SSE wins at 0.9. Deep Sets loses.",
        "| SSE, slots apart | **0.30 ± 1.27** | **0.40 ± 1.27** |",
        "![Clouds | points](results/clouds.png)",
        "![Clouds | points: more](results/clouds-more.png)",
        "Taller is better.",
        "**Measured.** SSE 0.40 ± 1.27.",
        "**Verdict: holds in part.** SSE wins here, too.",
        "180 epochs of 200.",
        "runs: 8; seeds: 2; epochs: 20; batch size: 64; learning rate: 0.001.",
        "| Deep Sets | 1,234 | 30 s |",
        "`python -m experiments run clouds --size small`",
        "Not run yet: `python -m experiments run digits --size small`",
    ):
        assert part in text
    assert set(figures) == {"clouds.png", "clouds-more.png"}
    assert set(re.findall(r"results/(.*?\.png)", text)) == set(figures)


def test_paired_differences_have_a_table():
    text = rendered(CLOUDS)
    header = (
        "| counts for | ours | baseline | where | difference in accuracy (higher is better) | "
        "in favour | verdict |"
    )
    assert header in text
    # 0.2 and 0.21 at 1000 points: better alone and after the correction. 0.15, 0.25 at 200: not.
    rows = [line for line in text.splitlines() if line.startswith("| claim | SSE")]
    assert rows == [
        "| claim | SSE, slots apart | Deep Sets | 200 points | +0.2000 ± 0.6353 | 2 of 2 | "
        "no difference shown |",
        "| claim | SSE, slots apart | Deep Sets | 1,000 points | +0.2050 ± 0.0635 | 2 of 2 | "
        "**better** |",
    ]
    assert "An accuracy of 0.10 has a standard error of 0.0061" in text


def several(found) -> list:
    """Nine more comparisons, of which none shows anything."""
    return comparisons(found) + [
        dataclasses.replace(one, part=Part.ASIDE) for one in comparisons(found)[:1] * 9
    ]


def test_verdicts_are_bold_only_after_the_correction():
    text = rendered(dataclasses.replace(CLOUDS, comparisons=several))
    assert "| 2 of 2 | better |" in text
    assert "**better**" not in text


def test_the_summary_shows_one_result_and_the_verdict():
    def first(found):
        return comparisons(found)[1:]

    holding = dataclasses.replace(CLOUDS, comparisons=first)
    result = "+0.2050 ± 0.0635 accuracy: SSE, slots apart against Deep Sets (1,000 points)"
    row = f"| SSE wins | {result}; 1 of 1 better | holds | [§2](#clouds) |"
    assert f"| **What holds, in full or in part** | | | |\n{row}\n" in rendered(holding)
    assert f"| **What is new, not in the paper** | | | |\n{row}\n" in rendered(
        dataclasses.replace(holding, new=True)
    )
    assert "| **What does not hold or is not shown** | | | |\n| SSE wins |" not in rendered(holding)
    text = rendered(CLOUDS, DIGITS)
    assert "1 of 2 better | holds in part" in text
    assert "Not run yet: Digits [§3](#digits)." in text


def test_a_claim_for_slots_apart_shows_their_result():
    def both(found):
        values = values_of(found)
        values["SSE, as printed"] = values["Deep Sets"]
        printed = against(values, "SSE, as printed", ["SSE, slots apart"], ACCURACY, " points")
        return printed + [
            dataclasses.replace(one, part=Part.APART) for one in comparisons(found)[1:]
        ]

    text = rendered(dataclasses.replace(CLOUDS, comparisons=both))
    assert "(1,000 points); 1 of 1 better | holds only with slots apart |" in text


def test_a_recipe_without_comparisons_says_itself_whether_it_holds():
    alone = dataclasses.replace(CLOUDS, comparisons=lambda found: [], outcome=Outcome.HOLDS)
    text = rendered(alone)
    assert "| SSE wins | SSE 0.40 ± 1.27 | holds | [§2](#clouds) |" in text
    assert "**Paired differences**\n" not in text


def test_one_seed_shows_nothing():
    text = rendered(CLOUDS, found=[one for one in RECORDS if one.seed == 0])
    assert "**Verdict: one seed.**" in text
    assert "| +0.1500 | 1 of 1 | one seed |" in text
    assert "(200 points) | one seed | [§2]" in text
    assert "±" not in text.split('<a id="clouds">')[1]


def test_the_page_says_where_numbers_come_from():
    changed = dataclasses.replace(RECORDS[0], commit="fedcba9876543210+", finished="2026-02-01")
    text = rendered(CLOUDS, found=[changed, *RECORDS[1:]])
    assert "Commits: 0123456789ab (7 runs); fedcba987654 with local changes (1 run)." in text
    assert "Machine: cpu fast, cores 2." in text
    assert "Versions: python 3.12, torch 2.9." in text
    assert "The last run finished at 2026-02-01." in " ".join(text.split())
    # eight runs of 30 s; each training is shared by two
    assert "8 runs took about 2 min" in text
    assert text.index("## How the experiments were run") > text.index('<a id="clouds">')


def test_other_sizes_are_left_out():
    large = [dataclasses.replace(one, size="paper") for one in RECORDS]
    text, figures = page.render([CLOUDS], {"clouds": large})
    assert "Not run yet" in text
    assert not figures
    text = rendered(CLOUDS, found=large, size=Size.PAPER)
    assert "run clouds --size paper" in text
    assert "**Verdict: holds in part.**\n" in text
    assert "SSE wins here, too." not in text  # the words are about the small size


def test_prose_is_wrapped_and_tables_are_not():
    long = dataclasses.replace(CLOUDS, claim="many words " * 40, title="T" * 120)
    wide = [line for line in rendered(long).splitlines() if len(line) > report.COLUMNS]
    assert all("T" * 120 in line or line.startswith("|") for line in wide)


def test_what_is_written_is_the_same_each_time(tmp_path: Path):
    for one in RECORDS:
        records.write(one, tmp_path)
    out = tmp_path / "out"
    paths = page.write([CLOUDS, DIGITS], tmp_path, out)
    content = {path: path.read_bytes() for path in paths}
    names = ["results/clouds.png", "results/clouds-more.png", "RESULTS.md"]
    assert [str(path.relative_to(out)) for path in paths] == names
    assert sorted(path for path in out.rglob("*") if path.is_file()) == sorted(paths)
    assert page.write([CLOUDS, DIGITS], tmp_path, out) == paths
    assert content == {path: path.read_bytes() for path in paths}
    assert (out / "RESULTS.md").read_text() == rendered(CLOUDS, DIGITS)


def test_methods_that_were_not_run_are_listed():
    text = rendered(CLOUDS, found=[one for one in RECORDS if one.method != "Deep Sets"])
    _, _, section = text.partition('<a id="clouds">')
    assert "\n**Not run yet** with these seeds: Deep Sets.\n" in section
    assert "| SSE, slots apart | 0.30 ± 1.27 | 0.40 ± 1.27 |" in section
    assert "**Paired differences**" not in section
    assert "**Not run yet**" not in rendered(CLOUDS)


def test_a_verdict_without_all_methods_is_one_so_far():
    def runs(size, seed):
        return [*CLOUDS.runs(size, seed), Run("PMA", None, dict, {"points": 200})]

    text = rendered(dataclasses.replace(CLOUDS, runs=runs))
    assert "1 of 2 better | holds in part, so far | [§2](#clouds) |" in text
    assert "**Verdict: holds in part, so far.** SSE wins here, too." in text
    assert "**Not run yet** with these seeds: PMA." in text
    assert "so far" not in rendered(CLOUDS).partition('<a id="clouds">')[2]


def test_the_page_says_if_seeds_are_missing():
    text = rendered(dataclasses.replace(CLOUDS, seeds={Size.SMALL: 5}))
    assert "runs: 8; seeds: 2 of 5;" in text


def test_nothing_is_written_if_no_record_counts(tmp_path: Path):
    with pytest.raises(setfold.InputError, match="nothing to report"):
        page.write([CLOUDS], tmp_path / "typo", tmp_path)
    assert not list(tmp_path.iterdir())
