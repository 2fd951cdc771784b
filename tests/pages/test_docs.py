"""Pages say what the scripts are: links, commands, logged tags, tables of committed data."""

import importlib
import json
import re
import tomllib

import numpy as np
import pytest
from program import ROOT, scalars
from scripts import EVERY, SMALL, train

from benchmark import data
from benchmark.published import HERE, RESULTS, docs, tables
from benchmark.speed import summarise

TEXTS = [*docs.PAGES, HERE / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
ALL = "".join(page.read_text() for page in docs.PAGES)
MORE = {  # with which all is logged that can be
    "ppo_continuous_action_warp": "--num-envs 2 --num-steps 210 --no-stagger-episodes",
    "ppo_pixels": "--eval-interval 1 --eval-episodes 1",
    "ppo_lstm": "--eval-interval 1 --eval-episodes 1",
}
TAG = r"(?:charts|losses)/[\w-]+"


@pytest.mark.parametrize("page", docs.PAGES, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_tables_and_links_are_up_to_date(page):
    assert docs.rewrite(page) == page.read_text(), "run: python -m benchmark.published"


def logged(script: str) -> set[str]:
    """The tags that a script's page explains, or the page that it names."""
    text = (docs.DOCS / f"{script}.md").read_text()
    text = text.split("## What is logged")[1].split("\n## ")[0]
    others = re.findall(r"\((\w+)\.md#what-is-logged\)", text)
    return set(re.findall(TAG, text)).union(*map(logged, others))


@EVERY
@pytest.mark.usefixtures("small")
def test_a_page_for_each_script(script, tmp_path):
    """It explains all that is logged, and leads to the code."""
    train(script, tmp_path / "run", MORE.get(script, ""), iterations=14)
    tags = scalars(tmp_path / "run", timed=True)  # some for each agent: charts/return/NAME
    assert logged(script) == {"/".join(tag.split("/")[:2]) for tag in tags}
    assert len(docs.LINK.findall((docs.DOCS / f"{script}.md").read_text())) >= 10


def test_tags_to_look_at_are_logged():
    """Those of the page "When it does not learn" are explained where a script logs them."""
    tags = set(re.findall(f"`({TAG})`", (docs.DOCS / "when_it_does_not_learn.md").read_text()))
    assert len(tags) >= 8
    assert tags <= set.union(*map(logged, SMALL))


@pytest.mark.parametrize("page", docs.PAGES, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_code_that_a_page_names_is_there(page):
    for text, file in docs.LINK.findall(page.read_text()):
        assert text in (ROOT / file).read_text(), f"{text} is not in {file}"


def anchors(text: str) -> set[str]:
    """What GitHub calls the headings of a page."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles)
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    for link in links:
        if not link.startswith(("http", "mailto")):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), link
            if anchor and target.suffix == ".md":
                assert anchor in anchors(target.read_text()), link


@EVERY
def test_commands_have_flags_that_their_script_takes(script):
    commands = re.findall(rf"\b{script}\.py (-[^`\"#\n]*)", ALL.replace("\\\n", " "))
    assert len(commands) >= 3
    taken = {"--env_name"} | {
        f"--{name}" for name in importlib.import_module(script).Args().__dict__
    }
    for command in commands:
        flags = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", command))
        plain = {
            flag.replace("--no-", "--").replace("-", "_").replace("__", "--", 1) for flag in flags
        }
        assert plain <= taken, command


# --- tables by hand -------------------------------------------------------------------------------


def cells(block: str, first: str) -> list[str]:
    """The row of a table that begins with this text."""
    lines = tables.BLOCKS[block]().splitlines()
    (line,) = (line for line in lines if line.startswith(f"| {first}"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def info_of(env_id: str, script: str, name: str) -> dict:
    return json.loads((RESULTS / env_id / script / f"{name}.json").read_text())


def played(env_id: str, script: str, name: str, seeds: range) -> list[float]:
    """Means of the final policies of these seeds, from the lowest."""
    infos = (info_of(env_id, script, f"{name}-s{k}") for k in seeds)
    return sorted(float(np.mean(info["evaluation"])) for info in infos)


def test_speed_tables_by_hand():
    table = data.read_csv(tables.SPEED / "ppo_continuous_action-HalfCheetah-v4.csv")
    found = summarise([tuple(row.values()) for row in table])
    ours, sb3, bare = (found[name] for name in ("compiled", "sb3", "bare"))
    low, middle, high = sorted(ours.cpu_rates / sb3.cpu_rates)
    row = cells("all-speeds", "`ppo_continuous_action.py`, HalfCheetah-v4 |")
    assert cells("speeds", "`ppo_continuous_action.py`, HalfCheetah-v4 |") == row[:4]
    assert row[1] == f"{np.median(ours.cpu_rates):,.0f}"
    assert row[2] == f"**{middle:.1f}** ({low:.1f} to {high:.1f})"
    assert row[3] == f"{np.median(ours.cpu_rates / bare.cpu_rates):.2f}"
    assert row[5].endswith(f"{sb3.memory:.0f} MB")


def test_result_tables_by_hand():
    scores = played("HalfCheetah-v4", "ppo_continuous_action", "default", range(201, 211))
    middle = f"{np.mean(scores[2:8]):,.0f}"
    assert cells("clipped-results", "HalfCheetah-v4, 1M")[2].startswith(f"**{middle}** [")
    assert cells("head-to-head-evaluation", "HalfCheetah-v4")[2].startswith(f"**{middle}** [")


def test_every_extra_that_a_page_installs_exists():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = set(",".join(re.findall(r"-e '\.\[([\w,-]+)\]'", ALL)).split(","))
    assert named >= {"benchmark", "dev", "envpool"}
    assert named <= project["optional-dependencies"].keys()


def test_from_a_number_to_its_maker_and_its_command():
    """benchmark/published/README.md lists every table of every page, with function and command."""
    text = (HERE / "README.md").read_text()
    rows = re.findall(r"^\| \[\w+\]\(([^)]+)\) \| `([\w-]+)` \| `(\w+)` \| (.*) \|$", text, re.M)
    listed = {((HERE / page).resolve(), name) for page, name, _, _ in rows}
    shown = {
        (page.resolve(), name)
        for page in docs.PAGES
        for name in re.findall(r"^<!-- ([\w-]+) -->\n\|", page.read_text(), re.M)
    }
    assert listed == {(page, name) for page, name in shown if name in tables.BLOCKS}
    assert {name for _, name in shown} >= tables.BLOCKS.keys() | {"flags", "superseded"}
    for _, _, maker, commands in rows:
        assert callable(getattr(tables, maker))
        assert re.findall(r"\]\(([^)]+)\)", commands)  # whose files another test looks for
    for program in (HERE / "studies").glob("[!_]*.py"):
        assert f"](studies/{program.name})" in text
