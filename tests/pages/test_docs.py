"""Pages say what the scripts are: links, commands, logged tags, tables of committed data."""

import importlib
import re

import pytest
from program import ROOT, scalars
from scripts import EVERY, small_environments, train

from benchmark.published import HERE, docs, tables

TEXTS = [*docs.PAGES, HERE / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
ALL = "".join(page.read_text() for page in docs.PAGES)
MORE = {  # with which all is logged that can be
    "ppo_continuous_action_warp": "--num-envs 2 --num-steps 210 --no-stagger-episodes",
    "ppo_pixels": "--eval-interval 1 --eval-episodes 1",
    "ppo_lstm": "--eval-interval 1 --eval-episodes 1",
}
TAG = r"(?:charts|losses)/[\w-]+"


@pytest.mark.parametrize("page", docs.PAGES, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_tables_are_up_to_date_and_code_that_is_named_is_there(page):
    text = page.read_text()
    assert docs.rewrite(page) == text, "run: python -m benchmark.published"
    for words, file in docs.LINK.findall(text):
        assert words in (ROOT / file).read_text(), f"{words} is not in {file}"


def logged(script: str) -> set[str]:
    """The tags that a script's page explains, or the page that it names."""
    text = (docs.DOCS / f"{script}.md").read_text()
    text = text.split("## What is logged")[1].split("\n## ")[0]
    others = re.findall(r"\((\w+)\.md#what-is-logged\)", text)
    return set(re.findall(TAG, text)).union(*map(logged, others))


@EVERY
def test_a_page_for_each_script(script, tmp_path, monkeypatch):
    """It explains all that is logged, and leads to the code."""
    small_environments(monkeypatch)
    train(script, tmp_path / "run", MORE.get(script, ""), iterations=14)
    tags = scalars(tmp_path / "run", timed=True)  # some for each agent: charts/return/NAME
    assert logged(script) == {"/".join(tag.split("/")[:2]) for tag in tags}
    assert len(docs.LINK.findall((docs.DOCS / f"{script}.md").read_text())) >= 10


def anchors(text: str) -> set[str]:
    """What GitHub calls the headings of a page."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles)
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\((?!http|mailto)([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target.read_text()), link


@EVERY
def test_commands_have_flags_that_their_script_takes(script):
    commands = re.findall(rf"\b{script}\.py (-[^`\"#\n]*)", ALL.replace("\\\n", " "))
    assert len(commands) >= 3
    taken = {"env_name", *vars(importlib.import_module(script).Args())}
    for command in commands:
        flags = re.findall(r"(?<![\w-])--(?:no-)?([a-z][\w-]*)", command)
        assert {flag.replace("-", "_") for flag in flags} <= taken, command


def test_from_a_number_to_its_maker_and_its_command():
    """benchmark/published/README.md lists every table of every page, with function and command."""
    text = (HERE / "README.md").read_text()
    rows = re.findall(r"^\| \[\w+\]\(([^)]+)\) \| `([\w-]+)` \| `(\w+)` \| (.*) \|$", text, re.M)
    listed = {((HERE / page).resolve(), name) for page, name, _, _ in rows}
    shown = set()
    for page in docs.PAGES:
        names = re.findall(r"^<!-- ([\w-]+) -->\n\|", page.read_text(), re.M)
        shown |= {(page.resolve(), name) for name in names}
    assert listed == {(page, name) for page, name in shown if name in tables.BLOCKS}
    assert {name for _, name in shown} >= tables.BLOCKS.keys() | {"flags", "superseded"}
    for _, _, maker, commands in rows:
        assert callable(getattr(tables, maker))
        assert re.findall(r"\]\(([^)]+)\)", commands)  # whose files another test looks for
    for program in (HERE / "studies").glob("[!_]*.py"):
        assert f"](studies/{program.name})" in text
