"""Keep README.md and docs/ true to the scripts and to the committed runs.

This writes the tables of tables.py anew, each between <!-- its name --> and <!-- end -->. In a page
of docs/ it also writes

    <!-- flags -->                  a table of the script's flags, without those that ppo.md has
    <!-- results -->                a table of its committed runs
    <!-- edit-NAME -->              tests/edits/NAME.patch, with the names of what it changes
"""

import dataclasses
import importlib
import re
from functools import cache, partial
from pathlib import Path

from benchmark import data
from benchmark.published import ROOT, curves, superseded, tables

DOCS = ROOT / "docs"
EDITS = ROOT / "tests" / "edits"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
ALGORITHMS = {
    "ppo": "clipped PPO for choices; observations and rewards are scaled",
    "ppo_continuous_action": "clipped PPO for numbers; observations and rewards are scaled",
    "ppo_kl_adaptive": 'an adaptive KL penalty, after Coady\'s "AI Gym Workout"',
    "ppo_cma": "PPO-CMA: a variance from a history of actions, negative advantages mirrored",
    "ppo_atari_multigpu": "clipped PPO on Atari, one process or many",
    "ppo_continuous_action_warp": "clipped PPO with thousands of environments on the device",
    "ppo_pixels": "clipped PPO from images, or any mix of images, vectors and choices",
    "ppo_lstm": "the same with a memory, LSTM or GRU",
    "ppo_pettingzoo": "several agents that share a network (IPPO, MAPPO); two players in self-play",
}
LINK = re.compile(r"\[`([^`]+)`\]\(\.\./(\w+\.py)\)")  # to a script that has this text


def flag_rows(script: str) -> list[list]:
    """For each field of a script's Args: flag, default, and the comment that is its help."""
    fields = dataclasses.fields(importlib.import_module(script).Args)
    source = (ROOT / f"{script}.py").read_text()
    words = {None: "", True: "on", False: "off"}
    rows = []
    for field in fields:
        comment = re.search(rf"\n    {field.name}: [^\n#]*# ([^\n]*)", source)[1]
        default = field.default
        if default is dataclasses.MISSING:
            default = field.default_factory()
        if field.name == "exp_name":
            default = "the file's name"
        if isinstance(default, tuple | list):
            default = " ".join(map(str, default))
        if default is None or isinstance(default, bool):
            default = words[default]
        rows.append([f"`--{field.name.replace('_', '-')}`", default, comment.replace("|", "\\|")])
    return rows


def flags(script: str) -> str:
    """A table of a script's flags; for other scripts than ppo.py, of those that differ from its."""
    rows = flag_rows(script)
    if script == "ppo":
        return tables.table("flag | default |", rows, "---")
    common = flag_rows("ppo")
    own = [row for row in rows if row not in common]
    shared = ", ".join(row[0] for row in rows if row in common)
    text = f"As in [`ppo.py`](ppo.md#flags): {shared}. Its own:"
    return f"{text}\n\n{tables.table('flag | default |', own, '---')}"


FIRST = {"ppo_cma": ("anneal-lr", "1M"), "ppo_kl_adaptive": ("default", "1M")}  # its settings


def results(script: str) -> str:
    """A table of a script's committed runs, then one of those with other settings."""
    runs = [run for run in curves.read() if run.script == script and run.status == "finished"]
    runs = [run for run in runs if superseded.FOLDER not in run.place.parents]
    first = FIRST.get(script, ("default",))
    text = listed([run for run in runs if run.variant in first])
    others = [run for run in runs if run.variant not in first]
    if others:
        text += "\n\n<details><summary>Other settings</summary>\n\n"
        text += f"{listed(others)}\n\n</details>"
    return text


def defaults_of_before() -> str:
    """A table of the clipped script's runs with settings that are no default any more."""
    before = superseded.FOLDER / "rpo.csv", superseded.FOLDER / "defaults.csv"
    return listed([run for run in curves.read() if run.place in before])


def listed(runs: list[data.Run]) -> str:
    """A row for each environment, setting and length."""
    groups = {}
    for run in runs:
        groups.setdefault((run.env_id, run.variant, run.budget), []).append(run)
    rows = []
    for (env_id, setting, _), own in groups.items():
        steps = sorted(run.info["global_step"] for run in own)
        lengths = dict.fromkeys(f"{steps[k] / 1e6:.2g}M" for k in (0, -1))
        commits = sorted({run.commit[:7] for run in own})
        scores = (tables.bold(tables.by_seed(own, x)) for x in ("training", "evaluation"))
        rows.append([env_id, setting, f"{len(own)}, {' to '.join(lengths)}", *scores])
        rows[-1].append(", ".join(commits))
    header = "environment | setting | seeds, steps | training | final policy | commits"
    return tables.table(header, rows, "---")


def scripts() -> str:
    """README's table of the scripts: their lines, and where PPO ends."""
    rows = []
    for script, algorithm in ALGORITHMS.items():
        lines = (ROOT / f"{script}.py").read_text().splitlines()
        below = next(k for k, line in enumerate(lines) if line.startswith("# ==== below"))
        names = f"[`{script}.py`]({script}.py), [page](docs/{script}.md)"
        rows.append([names, algorithm, len(lines), below])
    return tables.table("script | algorithm | lines | PPO ends at line", rows, "---")


@cache
def block(page: Path, name: str) -> tuple[str, list] | None:
    """The text of a page's block, and its tables; None if there is no such block."""
    makers = tables.BLOCKS | {"scripts": scripts, "superseded": defaults_of_before}
    if page.parent == DOCS:
        makers |= {make.__name__: partial(make, page.stem) for make in (flags, results)}
        makers |= {f"edit-{patch.stem}": partial(edit, patch) for patch in EDITS.glob("*.patch")}
    if name not in makers:
        return None
    tables.MADE.clear()
    return makers[name](), list(tables.MADE)


def edit(patch: Path) -> str:
    """A patch, whose parts begin with the names of the class or function that they change."""
    _, *parts = re.split(r"^@@.*\n", patch.read_text(), flags=re.M)
    (script,) = re.findall(r"^--- a/(.*)$", patch.read_text(), re.M)
    source = (ROOT / script).read_text()
    lines = [f"```diff\n# git apply tests/edits/{patch.name}\n--- {script}"]
    for part in parts:
        old = "".join(line[1:] for line in part.splitlines(True) if line[0] != "+")
        before = source[: source.index(old)] + old[: old.index("\n")]
        names = re.findall(r"^(    )?(?:class|def) (\w+)", before, re.M)
        outer = [name for indent, name in names if not indent]
        name = f"{outer[-1]}.{names[-1][1]}" if names and names[-1][0] else "".join(outer[-1:])
        is_new = re.match(r"(?: .*\n)*\+(?:class|def) ", part)
        lines.append(f"@@ {'new' if is_new else name or 'import'} @@\n{part.rstrip()}")
    return "\n".join([*lines, "```"])


def rewrite(page: Path) -> str:
    """A page's text with its tables made anew."""

    def fill(found: re.Match) -> str:
        made = block(page, found[1])
        return f"<!-- {found[1]} -->\n{made[0]}\n<!-- end -->" if made else found[0]

    return re.sub(r"<!-- ([\w-]+) -->.*?<!-- end -->", fill, page.read_text(), flags=re.S)


def docs():
    """Write all pages anew."""
    for page in PAGES:
        page.write_text(rewrite(page))
