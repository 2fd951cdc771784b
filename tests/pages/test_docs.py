"""Pages say what the scripts are: links, commands, logged tags, tables of committed data."""

import gzip
import importlib
import json
import math
import re
import tomllib

import numpy as np
import pytest
from program import ROOT, scalars
from scripts import EVERY, SMALL, train

from benchmark import data
from benchmark.published import HERE, RESULTS, curves, docs, tables
from benchmark.speed import summarise

TEXTS = [*docs.PAGES, HERE / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
ALL = "".join(page.read_text() for page in docs.PAGES)
MORE = {  # with which all is logged that can be
    "ppo_continuous_action_warp": "--num-envs 2 --num-steps 210 --no-stagger-episodes",
    "ppo_pixels": "--eval-interval 1 --eval-episodes 1",
    "ppo_lstm": "--eval-interval 1 --eval-episodes 1",
    "ppo_pettingzoo_ma_atari": "--eval-interval 1",
}
TAG = r"(?:charts|losses)/[\w-]+"


@pytest.mark.parametrize("page", docs.PAGES, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_tables_and_links_are_up_to_date(page):
    assert docs.rewrite(page) == page.read_text(), "run: python -m benchmark.published"


def logged(script: str) -> set[str]:
    """The tags that a script's page explains."""
    text = (docs.DOCS / f"{script}.md").read_text()
    return set(re.findall(TAG, text.split("## What is logged")[1].split("\n## ")[0]))


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


def test_github_names_headings_so():
    text = "# `--target-kl 0.02`: why, and how\n## Three [algorithms](x.md)\n```\n# none\n```\n"
    assert anchors(text) == {"--target-kl-002-why-and-how", "three-algorithms"}


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


def episodes(env_id: str, script: str, name: str) -> list[tuple[int, float]]:
    """Of each training episode, the step where it ends and its return."""
    with gzip.open(RESULTS / env_id / script / f"{name}.csv.gz", "rt") as file:
        rows = [line.split(",") for line in file][1:]
    return [(int(step), float(episodic_return)) for step, _, episodic_return, _ in rows]


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
    assert cells("clipped-results", "HalfCheetah-v4, 1M")[1].startswith(f"**{middle}** [")
    assert cells("head-to-head-evaluation", "HalfCheetah-v4")[2].startswith(f"**{middle}** [")


def test_all_eight_by_hand(monkeypatch):
    """Normalised and pooled, in the table as in the figure of PPO-CMA beside PPO."""
    scales = data.read_scales(data.SCALES)
    pooled = []
    for env_id in curves.MUJOCO:
        low, high = scales[env_id].low, scales[env_id].high
        scores = played(env_id, "ppo_continuous_action", "default", range(201, 211))
        pooled += [(score - low) / (high - low) for score in scores]
    row = cells("head-to-head-evaluation", "all eight")
    assert row[2].startswith(f"{np.mean(sorted(pooled)[20:60]):.2f} [")
    drawn = []
    monkeypatch.setattr(curves.report, "save", lambda figure, *_, **__: drawn.append(figure))
    curves.modes()
    *each, all_eight = drawn[0].axes
    assert len(each) == 8
    cma, ppo = (line.get_ydata()[-1] for line in all_eight.lines)
    assert (cma, ppo) == pytest.approx((0.566, 0.363), abs=0.001)


@pytest.mark.parametrize(
    "script, run, name",
    [
        ("ppo_cma", "default-s1", ", `--no-anneal-lr`, seed 1"),
        ("ppo_continuous_action", "10M-64envs-s2", ", 64 environments, seed 2"),
    ],
)
def test_humanoids_by_hand(script, run, name):
    windows = {}
    for step, episodic_return in episodes("Humanoid-v4", script, run):
        windows.setdefault((step - 1) // 32_000, []).append(episodic_return)
    first = min(k for k, returns in windows.items() if np.mean(returns) >= 1000)
    row = cells("humanoid", f"`{script}.py`{name}")
    assert row[1] == f"{(first + 1) * 0.032:.2f}M"
    inside = [np.mean(windows[k]) for k in windows if 4.5e6 < (k + 1) * 32_000 <= 5e6]
    assert row[5] == f"{np.mean(inside):,.0f}"
    assert row[7] == f"{np.mean(info_of('Humanoid-v4', script, run)['evaluation']):,.0f}"


def test_dm_control_stands_beside_cleanrls_numbers():
    own = ("dm_control-cheetah-run-v0", "ppo_continuous_action")
    row = cells("control", "dm_control/cheetah-run-v0")
    assert row[5] == "432.6 ± 82.5"  # after 1M steps, as ours
    ends = [info_of(*own, f"ent-coef-0-s{k}")["final_return"] for k in (201, 202, 203)]
    assert row[4].startswith(f"{np.mean(ends):.1f} [")
    z = [(end - 432.56) / 82.54 for end in ends]
    assert row[7] == f"{np.mean([0.5 * (1 + math.erf(x / math.sqrt(2))) for x in z]):.2f}"


def test_noise_on_the_means_by_hand():
    scores = played("dm_control-cheetah-run-v0", "ppo_continuous_action", "no-target-kl", (1, 2, 3))
    rpo = played("HalfCheetah-v4", "ppo_continuous_action", "rpo-0.1", range(1, 4))
    assert cells("rpo", "`--rpo-alpha 0.1`")[2].startswith(f"{np.mean(rpo):,.0f} [")
    assert cells("rpo", "none")[6].startswith(f"{np.mean(scores):.1f} [")


def test_each_goal_of_the_study_has_what_came_nearest():
    row = cells("goals", "HalfCheetah-v4, 1M")
    assert row[1:3] == ["7,000", "5,819 (one tuned run)"]
    default = cells("head-to-head-evaluation", "HalfCheetah-v4")[2]
    assert row[3].split(" [")[0] == default.split(" [")[0].strip("*")
    tried = [tables.BLOCKS[x]().splitlines()[3:] for x in ("what-matters", "finalists")]
    cheetah = [line.split("|")[4].split(" [")[0].strip() for line in tried[0] + tried[1]]
    highest = max(float(x.replace(",", "")) for x in cheetah if x != "-")
    assert row[4].startswith(f"{highest:,.0f} [")


def test_coadys_tables_by_hand():
    firsts, highest = [], []
    for seed in range(1, 6):
        run = episodes("HalfCheetah-v4", "ppo_kl_adaptive", f"default-s{seed}")
        returns = [x for _, x in run]
        means = {k: sum(returns[k - 5 : k]) / 5 for k in range(5, len(returns) + 1)}
        firsts.append(next((f"{k:,}" for k in means if means[k] >= 4700), "-"))
        highest.append(f"{max(means.values()):,.0f}")
    assert firsts.count("-") == 3
    row = cells("coady-episodes", "HalfCheetah-v4, 4,700")
    assert row[1:4] == [", ".join(firsts), "1,966", "20,785"]
    row = cells("coady-best", "HalfCheetah-v4")
    assert row[1:3] + row[-1:] == [", ".join(highest), "5,363", "3,000"]


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
    assert {name for _, name in shown} >= tables.BLOCKS.keys() | {"flags"}
    for _, _, maker, commands in rows:
        assert callable(getattr(tables, maker))
        assert re.findall(r"\]\(([^)]+)\)", commands)  # whose files another test looks for
