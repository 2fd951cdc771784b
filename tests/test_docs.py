"""docs/ says what the scripts are: links, flags, results and logged tags."""

import importlib
import re

import pytest

from benchmark import docs, readme

PAGES = sorted(docs.DOCS.glob("*.md"))
TAG = re.compile(r"(?:charts|losses)/\w+")


def test_a_page_for_each_script():
    assert {page.stem for page in PAGES} == {p.stem for p in docs.DOCS.parent.glob("ppo*.py")}


def test_readme_is_up_to_date():
    text = docs.README.read_text()
    assert docs.rewrite(docs.README) == text, "run: python -m benchmark.docs"
    assert set(re.findall(r"<!-- ([\w-]+) -->\n\|", text)) == set(readme.BLOCKS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_flags_and_results_are_up_to_date(page):
    assert docs.rewrite(page) == page.read_text(), "run: python -m benchmark.docs"
    assert len(docs.LINK.findall(page.read_text())) >= 10


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_all_that_is_logged_is_explained(page):
    script = importlib.import_module(page.stem)
    source = (docs.DOCS.parent / f"{page.stem}.py").read_text()
    logged = {tag for text in re.findall(r'"([^"\n]*)"', source) for tag in TAG.findall(text)}
    logged -= {"charts/share_"}
    logged |= {f"losses/{name}" for name in getattr(script, "METRICS", ())}
    section = page.read_text().split("## What is logged")[1].split("\n## ")[0]
    assert set(TAG.findall(section)) == logged


def test_a_link_leads_to_the_definition():
    source = (docs.DOCS.parent / "ppo.py").read_text().splitlines()
    assert source[docs.line_of("gae", "ppo.py") - 1].startswith("def gae(")
    assert source[docs.line_of("METRICS", "ppo.py") - 1] == "METRICS = ("
    assert "advantages.std()" in source[docs.line_of("advantages.std()", "ppo.py") - 1]
    with pytest.raises(SystemExit, match=r"not in ppo\.py"):
        docs.line_of("what is not there", "ppo.py")
