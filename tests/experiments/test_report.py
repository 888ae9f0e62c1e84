from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

import setfold
from experiments import records, report, style
from experiments.recipe import Outcome, Recipe, Run, Size
from experiments.records import Record


def record(method: str, points: int, seed: int, accuracy: float, **changes) -> Record:
    made = Record(
        recipe="clouds",
        size="small",
        method=method,
        settings={"points": points},
        seed=seed,
        metrics={"accuracy": accuracy, "seen": [10.0, 20.0], "after": [accuracy, accuracy + 1]},
        history={"epoch": [1.0, 2.0], "loss": [accuracy, accuracy / 2]},
        training={"epochs": 20, "batch_size": 64, "rate": 0.001, "seed": seed, "of": method},
        parameters=1234,
        command="python -m experiments run clouds",
        commit="0123456789abcdef",
        versions={"python": "3.12", "torch": "2.9"},
        machine={"cpu": "fast", "cores": 2},
        seconds=30.0,
        finished="2026-01-02T03:04:05+00:00",
    )
    return dataclasses.replace(made, **changes)


RECORDS = [
    record("SSE, slots apart", 1000, 1, 0.5),
    record("SSE, slots apart", 1000, 0, 0.3),
    record("SSE, slots apart", 200, 0, 0.2),
    record("SSE, slots apart", 200, 1, 0.4),
    record("Deep Sets", 1000, 0, 0.1),
    record("Deep Sets", 200, 0, 0.05),
]


def section(found) -> report.Section:
    drawing, [axes] = style.figure()
    values = report.grid(found, "accuracy", "method", "points")
    style.curves(axes, values, "points", "accuracy")
    rows = [[method, *line.values()] for method, line in values.items()]
    text = report.table(["", "200", "1000"], rows, digits=2, best=max)
    return report.Section(text, {"": drawing, "more": style.figure()[0]}, "Taller is better.")


def headline(found) -> str:
    best = [one for one in found if one.method == "SSE, slots apart"]
    return f"SSE {report.summary(report.metric(best, 'accuracy'), 2)}"


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
    holds="only with slots apart",
    outcome=Outcome.WITH_SLOTS_APART,
    summary="SSE wins\nat 200 points.",
)
DIGITS = dataclasses.replace(CLOUDS, number=3, name="digits", title="Digits")


def test_summary_is_mean_and_deviation_of_a_sample():
    values = [0.8556, 0.8507, 0.8612]
    expected = f"{np.mean(values):.4f} ± {np.std(values, ddof=1):.4f}"
    assert report.summary(values) == expected
    assert report.summary([0.85], digits=3) == "0.850"
    assert report.summary([-0.0001], digits=2) == "0.00"  # not -0.00


def test_records_are_grouped_in_the_order_of_methods_and_settings():
    groups = report.by(RECORDS, "method", "points")
    methods = ["Deep Sets", "SSE, slots apart"]
    assert list(groups) == [(method, points) for method in methods for points in (200, 1000)]
    assert report.metric(groups["SSE, slots apart", 1000], "accuracy") == [0.3, 0.5]  # by seed
    assert sum(map(len, groups.values())) == len(RECORDS)


def test_a_grid_and_traces_are_what_figures_draw():
    assert report.grid(RECORDS, "accuracy", "points", "method")[200] == {
        "Deep Sets": [0.05],
        "SSE, slots apart": [0.2, 0.4],
    }
    small = [one for one in RECORDS if one.settings["points"] == 200]
    assert report.traces(small, "loss")["SSE, slots apart"] == {1: [0.2, 0.4], 2: [0.1, 0.2]}
    assert report.traces(small, "after", x="seen")["Deep Sets"] == {10: [0.05], 20: [1.05]}


def test_unknown_metrics_and_settings_are_refused_with_those_there_are():
    with pytest.raises(KeyError, match=r"'nll'.*clouds, SSE.*accuracy"):
        report.metric(RECORDS, "nll")
    with pytest.raises(KeyError, match="expected a number 'seen'"):
        report.metric(RECORDS, "seen")
    with pytest.raises(KeyError, match=r"'slots'.*method.*points.*seed"):
        report.by(RECORDS, "slots")


def test_tables_align_numbers_and_show_the_best():
    rows = [
        ["paper", 0.9, None, 1_000_000, "a | b"],
        ["ours", [0.5, 0.7], [0.25], 20, "-1.5e-05"],
        ["theirs", [0.4], [0.251], 3, "c"],
    ]
    lines = report.table(["", "x", "y", "n", "text"], rows, digits=2, best=max).split("\n")
    assert lines == [
        "| | x | y | n | text |",
        "|---|---:|---:|---:|---|",
        "| paper | 0.90 | – | 1,000,000 | a \\| b |",
        "| ours | **0.60 ± 0.14** | **0.25** | 20 | -1.5e-05 |",
        "| theirs | 0.40 | **0.25** | 3 | c |",  # what prints alike is alike
    ]
    assert "**0.40**" in report.table(["", "x", "y", "n", "text"], rows, digits=2, best=min)
    assert "**" not in report.table(["", "x", "y", "n", "text"], rows)


def test_a_row_of_another_length_is_refused():
    with pytest.raises(ValueError, match="expected 2 cells"):
        report.table(["a", "b"], [["only one"]])


def test_the_page_has_all_that_a_recipe_says():
    text, figures = report.render([CLOUDS, DIGITS], {"clouds": RECORDS})
    summary = "**Holds only with slots apart**\n\n- SSE wins at 200 points. [§2](#clouds)\n"
    assert summary in text
    assert "**Not run yet**\n\n- Digits. [§3](#digits)\n" in text
    assert '<a id="clouds"></a>\n\n## 2. Clouds | points' in text
    for part in (
        "SSE wins at 0.9. Deep Sets loses.",
        "| SSE, slots apart | **0.30 ± 0.14** | **0.40 ± 0.14** |",
        "![Clouds | points](results/clouds.png)",
        "![Clouds | points: more](results/clouds-more.png)",
        "Taller is better.",
        "**Measured.** SSE 0.35 ± 0.13.",
        "**Does it hold? Only with slots apart.** SSE wins here, too.",
        "180 epochs of 200.",
        "runs: 6; seeds: 2; epochs: 20; batch size: 64; learning rate: 0.001.",
        "| Deep Sets | 1,234 | 30 s |",
        "`python -m experiments run clouds --size small`",
        "Not run yet: `python -m experiments run digits --size small`",
    ):
        assert part in text
    assert set(figures) == {"clouds.png", "clouds-more.png"}
    assert set(re.findall(r"results/(.*?\.png)", text)) == set(figures)


def test_the_page_says_where_numbers_come_from():
    changed = dataclasses.replace(RECORDS[0], commit="fedcba9876543210+", finished="2026-02-01")
    text, _ = report.render([CLOUDS], {"clouds": [changed, *RECORDS[1:]]})
    assert "Commits: 0123456789ab (5 runs); fedcba987654 with local changes (1 run)." in text
    assert "Machine: cpu fast, cores 2." in text
    assert "Versions: python 3.12, torch 2.9." in text
    assert "The last run finished at 2026-02-01." in " ".join(text.split())
    # six runs of 30 s; each training of SSE is shared by two, that of Deep Sets as well
    assert "6 runs took about 90 s" in text


def test_other_sizes_are_left_out():
    large = [dataclasses.replace(one, size="paper") for one in RECORDS]
    text, figures = report.render([CLOUDS], {"clouds": large})
    assert "Not run yet" in text
    assert not figures
    text, _ = report.render([CLOUDS], {"clouds": large}, Size.PAPER)
    assert "run clouds --size paper" in text
    assert "**Measured**\n\n- Clouds | points: SSE 0.35 ± 0.13. [§2](#clouds)" in text
    assert "only with slots apart" not in text.lower()  # the verdict is about the small size


def test_prose_is_wrapped_and_tables_are_not():
    long = dataclasses.replace(CLOUDS, claim="many words " * 40, title="T" * 120)
    text, _ = report.render([long], {"clouds": RECORDS})
    wide = [line for line in text.splitlines() if len(line) > report.COLUMNS]
    assert all("T" * 120 in line or line.startswith("|") for line in wide)


def test_what_is_written_is_the_same_each_time(tmp_path: Path):
    for one in RECORDS:
        records.write(one, tmp_path)
    out = tmp_path / "out"
    paths = report.write([CLOUDS, DIGITS], tmp_path, out)
    content = {path: path.read_bytes() for path in paths}
    names = ["results/clouds.png", "results/clouds-more.png", "RESULTS.md"]
    assert [str(path.relative_to(out)) for path in paths] == names
    assert sorted(path for path in out.rglob("*") if path.is_file()) == sorted(paths)
    assert report.write([CLOUDS, DIGITS], tmp_path, out) == paths
    assert content == {path: path.read_bytes() for path in paths}
    expected, _ = report.render([CLOUDS, DIGITS], {"clouds": RECORDS})
    assert (out / "RESULTS.md").read_text() == expected


def test_only_seeds_that_are_complete_count():
    other = record("SSE, slots apart", 200, 0, 0.9, size="smoke")
    stranger = record("a method that is gone", 200, 1, 0.9)
    retuned = dataclasses.replace(RECORDS[0], training={**RECORDS[0].training, "epochs": 5})
    missing = [one for one in RECORDS if (one.seed, one.method) != (0, "Deep Sets")]
    found = report.complete(CLOUDS, [*missing, other, stranger], Size.SMALL)
    assert found == [one for one in RECORDS if one.seed == 1]
    assert report.complete(CLOUDS, [retuned, *RECORDS[1:]], Size.SMALL) == [
        one for one in RECORDS if one.seed == 0
    ]
    assert report.complete(CLOUDS, [*RECORDS, other, stranger], Size.SMALL) == sorted(
        RECORDS, key=lambda one: one.seed
    )


def test_nothing_is_written_if_no_record_counts(tmp_path: Path):
    with pytest.raises(setfold.InputError, match="nothing to report"):
        report.write([CLOUDS], tmp_path / "typo", tmp_path)
    assert not list(tmp_path.iterdir())
