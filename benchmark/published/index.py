"""results/INDEX.csv: of each number in a table of README.md or docs/, the files that it comes from.

    grep '6,315' benchmark/published/results/INDEX.csv

`file` and `policy` are paths below benchmark/published, which a shell expands: s{201..203} is three
seeds. A .csv.gz has a run's training episodes. The .json beside it has the returns of its final
policy, its arguments, versions and hardware.
"""

import csv
import io
import re
from collections.abc import Iterable
from pathlib import Path

from benchmark import data
from benchmark.published import HERE, RESULTS, ROOT, docs, tables

FIELDS = "page", "table", "row", "column", "value", "file", "seeds", "steps", "commit", "policy"
INDEX = RESULTS / "INDEX.csv"


def span(values: Iterable[int]) -> str:
    """Numbers as a shell expands them: 3, {1..5} or {1,3,4}."""
    values = sorted(set(values))
    if len(values) == 1:
        return str(values[0])
    if values[-1] - values[0] == len(values) - 1:
        return f"{{{values[0]}..{values[-1]}}}"
    return f"{{{','.join(map(str, values))}}}"


def paths(runs: Iterable[data.Run], endings: str) -> str:
    """The files of runs with these endings, as a shell expands them; of a row, its table."""
    seeds = {}
    for run in runs:
        place = run.place.relative_to(HERE)
        stem = str(place) if place.suffix == ".csv" else f"{place.parent}/{run.variant}"
        seeds.setdefault(stem, []).append(run.seed)
    texts = (x if x.endswith(".csv") else f"{x}-s{span(own)}{endings}" for x, own in seeds.items())
    return " ".join(texts)


def origin(sources: tuple[data.Run | Path, ...]) -> list[str]:
    """file, seeds, steps, commit, policy."""
    files = [str(source.relative_to(HERE)) for source in sources if isinstance(source, Path)]
    if files:
        return [" ".join(files), "", "", "", ""]
    steps = sorted({run.info["global_step"] for run in sources})
    ends = " to ".join(map(str, dict.fromkeys((steps[0], steps[-1]))))
    commits = " ".join(sorted({run.commit[:7] for run in sources}))
    kept = [run for run in sources if run.place.with_suffix(".pt").exists()]
    seeds = span(run.seed for run in sources).strip("{}")
    return [paths(sources, ".{json,csv.gz}"), seeds, ends, commits, paths(kept, ".pt")]


def rows() -> Iterable[list[str]]:
    for page in docs.PAGES:
        for name in re.findall(r"^<!-- ([\w-]+) -->$", page.read_text(), re.M):
            made = docs.block(page, name)
            for header, lines in made[1] if made else ():
                for line in lines:
                    sourced = [isinstance(x, tables.Cell) and bool(x.sources) for x in line]
                    if not any(sourced):
                        continue
                    first = zip(header[: sourced.index(True)], line, strict=False)
                    row = ", ".join(str(x) for title, x in first if not title.startswith("seeds"))
                    for column, value, known in zip(header, line, sourced, strict=True):
                        if known and value:
                            place = str(page.relative_to(ROOT)), name, row, column
                            yield [*place, value.replace("**", ""), *origin(value.sources)]


def text() -> str:
    made = io.StringIO()
    csv.writer(made, lineterminator="\n").writerows([FIELDS, *rows()])
    return made.getvalue()


def write():
    INDEX.write_text(text())
