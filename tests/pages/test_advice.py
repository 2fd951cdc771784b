"""Links between pages; what is advised exists; from a table to its maker and its command."""

import importlib
import re

import pytest
from program import ROOT

from benchmark.published import HERE, docs, tables

ADVICE = (ROOT / "docs" / "when_it_does_not_learn.md").read_text()
SCRIPTS = sorted(path.stem for path in ROOT.glob("ppo*.py"))
TEXTS = [*docs.PAGES, HERE / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]


def anchors(text: str) -> set[str]:
    """What GitHub calls the headings of a page."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles)
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}


def test_github_names_headings_so():
    text = "# `--target-kl 0.02`: why, and how\n## Three [algorithms](x.md)\n```\n# none\n```\n"
    assert anchors(text) == {"--target-kl-002-why-and-how", "three-algorithms"}


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    inner = [link for link in links if not link.startswith(("http", "mailto"))]
    for link in inner:
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target.read_text()), link


def logged() -> set[str]:
    """Tags that the scripts' pages explain."""
    pages = (ROOT / "docs" / f"{script}.md" for script in SCRIPTS)
    sections = (page.read_text().split("## What is logged")[1] for page in pages)
    return set(re.findall(r"`((?:charts|losses)/\w+)", "".join(sections)))


def test_tags_to_look_at_are_logged():
    tags = set(re.findall(r"`((?:charts|losses)/\w+)`", ADVICE))
    assert len(tags) >= 8
    assert tags <= logged()


def test_flags_to_try_exist():
    flags = set(re.findall(r"(--[a-z][\w-]*)", ADVICE)) - {"--logdir"}
    known = set()
    for script in SCRIPTS:
        fields = importlib.import_module(script).Args.__dataclass_fields__
        known |= {f"--{name.replace('_', '-')}" for name in fields}
    assert len(flags) > 15
    assert flags <= known


def test_every_kind_of_script_is_advised():
    assert {"ppo_pixels", "ppo_pettingzoo", "ppo_atari_lstm", "ppo_cma"} <= {
        script for script in SCRIPTS if f"`{script}.py`" in ADVICE
    }


def test_from_a_number_to_its_maker_and_its_command():
    """benchmark/published/README.md lists every table of every page, with function and command."""
    text = (HERE / "README.md").read_text()
    rows = re.findall(r"^\| \[\w+\]\(([^)]+)\) \| `([\w-]+)` \| `(\w+)` \| (.*) \|$", text, re.M)
    listed = {((HERE / page).resolve(), name) for page, name, _, _ in rows}
    shown = set()
    for page in docs.PAGES:
        names = re.findall(r"^<!-- ([\w-]+) -->$", page.read_text(), re.MULTILINE)
        shown |= {(page.resolve(), name) for name in names if name in tables.BLOCKS}
    assert listed == shown
    assert len(shown) > 25
    for _, _, maker, commands in rows:
        assert callable(getattr(tables, maker))
        assert re.findall(r"\]\(([^)]+)\)", commands)  # whose files another test looks for
