"""Pages say what the scripts are: links, flags, logged tags, tables of committed data."""

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

from benchmark.published import HERE, RESULTS, docs, tables

TEXTS = [*docs.PAGES, HERE / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
MORE = {  # with which all is logged that can be
    "ppo_continuous_action_warp": "--num-envs 2 --num-steps 210 --no-stagger-episodes",
    "ppo_pettingzoo_ma_atari": "--eval-interval 1",
}


@pytest.mark.parametrize("page", docs.PAGES, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_tables_and_links_are_up_to_date(page):
    assert docs.rewrite(page) == page.read_text(), "run: python -m benchmark.published"


def test_every_table_is_shown():
    text = "".join(page.read_text() for page in docs.PAGES)
    assert set(re.findall(r"<!-- ([\w-]+) -->\n\|", text)) >= tables.BLOCKS.keys() | {"flags"}


@EVERY
@pytest.mark.usefixtures("small")
def test_a_page_for_each_script(script, tmp_path):
    """It explains all that is logged, and leads to the code."""
    train(script, tmp_path / "run", MORE.get(script, ""), iterations=14)
    text = (docs.DOCS / f"{script}.md").read_text()
    section = text.split("## What is logged")[1].split("\n## ")[0]
    explained = set(re.findall(r"(?:charts|losses)/[\w-]+", section))
    logged = scalars(tmp_path / "run", timed=True)  # some for each agent: charts/return/NAME
    assert explained == {"/".join(tag.split("/")[:2]) for tag in logged}
    assert len(docs.LINK.findall(text)) >= 10


def test_a_link_leads_to_the_definition():
    source = (docs.DOCS.parent / "ppo.py").read_text().splitlines()
    assert source[docs.line_of("gae", "ppo.py") - 1].startswith("def gae(")
    assert source[docs.line_of("Agent", "ppo.py") - 1].startswith("class Agent(")
    assert "advantages.std()" in source[docs.line_of("advantages.std()", "ppo.py") - 1]
    with pytest.raises(SystemExit, match=r"not in ppo\.py"):
        docs.line_of("what is not there", "ppo.py")


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


# Of other programs: benchmark's, torchrun's, Slurm's, TensorBoard's, uv's; of other projects
FOREIGN = """--algorithm --cluster --command --env-ids --gres --logdir --max-restarts --metric
    --model --nnodes --nodes --nproc-per-node --num-seeds --output --project --python --rdzv-backend
    --rdzv-endpoint --runs-dir --search --standalone --study --trials --variant --with --workers
    --algorithm-name --config --episode-length --n-rollout-threads --num-mini-batch --ppo-epoch
    --render --upload-model --use-centralized-V --use-valuenorm
    --local-batch-size --local-minibatch-size --std-min"""
ALIASES = "--env-name --lam --max-steps --ppo-ent-l-w --ppo-epsilon --run-suffix"


@pytest.mark.parametrize("page", docs.PAGES, ids=lambda page: page.stem)
def test_flags_that_a_page_names_exist(page):
    modules = [importlib.import_module(script) for script in SMALL]
    known = {f"--{name}" for module in modules for name in module.Args.__dataclass_fields__}
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", page.read_text()))
    named = {flag.replace("--no-", "--").replace("_", "-") for flag in named}
    known = {flag.replace("_", "-") for flag in known}
    assert named - known - {*FOREIGN.split(), *ALIASES.split()} == set()


def test_tags_to_look_at_are_logged():
    """Those of the page "When it does not learn" are explained where a script logs them."""
    pages = [(docs.DOCS / f"{script}.md").read_text() for script in SMALL]
    sections = "".join(page.split("## What is logged")[1] for page in pages)
    advice = (docs.DOCS / "when_it_does_not_learn.md").read_text()
    tags = set(re.findall(r"`((?:charts|losses)/\w+)`", advice))
    assert len(tags) >= 8
    assert tags <= set(re.findall(r"`((?:charts|losses)/\w+)", sections))


def cells(block: str, first: str) -> list[str]:
    """The row of a README table that begins with this text."""
    lines = tables.BLOCKS[block]().splitlines()
    (line,) = (line for line in lines if line.startswith(f"| {first}"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_speed_tables_by_hand():
    path = tables.SPEED / "ppo_continuous_action-HalfCheetah-v4.csv"
    table = [line.split(",") for line in path.read_text().splitlines() if line[0] != "#"][1:]
    rates = {}
    for name in ("compiled", "sb3", "bare"):
        for k in "123":
            short, long = (
                next(row for row in table if row[:3] == [name, k, kind])
                for kind in ("short", "long")
            )
            steps, cpu = (float(long[j]) - float(short[j]) for j in (3, 4))
            rates.setdefault(name, []).append(steps / cpu)
    middle = sorted(rates["compiled"])[1]
    to_sb3 = sorted(a / b for a, b in zip(rates["compiled"], rates["sb3"], strict=True))
    to_bare = sorted(a / b for a, b in zip(rates["compiled"], rates["bare"], strict=True))
    row = cells("all-speeds", "`ppo_continuous_action.py`, HalfCheetah-v4 |")
    assert cells("speeds", "`ppo_continuous_action.py`, HalfCheetah-v4 |") == row[:4]
    assert row[1] == f"{middle:,.0f}"
    assert row[2] == f"**{to_sb3[1]:.1f}** ({to_sb3[0]:.1f} to {to_sb3[2]:.1f})"
    assert row[3] == f"{to_bare[1]:.2f}"
    most = max(float(line[6]) for line in table if line[0] == "sb3" and line[2] == "long")
    assert row[5].endswith(f"{most:.0f} MB")


def test_result_tables_by_hand():
    folder = RESULTS / "HalfCheetah-v4" / "ppo_continuous_action"
    played = [
        np.mean(json.loads((folder / f"default-s{k}.json").read_text())["evaluation"])
        for k in range(201, 211)
    ]
    middle = f"{np.mean(sorted(played)[2:8]):,.0f}"
    assert cells("clipped-results", "HalfCheetah-v4, 1M")[1].startswith(f"**{middle}** [")
    assert cells("head-to-head-evaluation", "HalfCheetah-v4")[2].startswith(f"**{middle}** [")
    for script, run, name in (
        ("ppo_cma", "default-s1", ", `--no-anneal-lr`, seed 1"),
        ("ppo_continuous_action", "10M-64envs-s2", ", 64 environments, seed 2"),
    ):
        folder = RESULTS / "Humanoid-v4" / script
        with gzip.open(folder / f"{run}.csv.gz", "rt") as file:
            episodes = [line.split(",") for line in file][1:]
        windows = {}
        for step, _, episodic_return, _ in episodes:
            windows.setdefault((int(step) - 1) // 32_000, []).append(float(episodic_return))
        first = min(k for k, returns in windows.items() if np.mean(returns) >= 1000)
        row = cells("humanoid", f"`{script}.py`{name}")
        assert row[1] == f"{(first + 1) * 0.032:.2f}M"
        inside = [np.mean(windows[k]) for k in windows if 4.5e6 < (k + 1) * 32_000 <= 5e6]
        assert row[5] == f"{np.mean(inside):,.0f}"
        played = json.loads((folder / f"{run}.json").read_text())["evaluation"]
        assert row[7] == f"{np.mean(played):,.0f}"


def played_by(env_id: str, name: str = "no-target-kl") -> list[float]:
    """Means of the final policies of three runs of the clipped script, from the lowest."""
    folder = RESULTS / env_id / "ppo_continuous_action"
    infos = (json.loads((folder / f"{name}-s{k}.json").read_text()) for k in (1, 2, 3))
    return sorted(float(np.mean(info["evaluation"])) for info in infos)


def test_dm_control_stands_beside_cleanrls_numbers():
    played = played_by("dm_control-cheetah-run-v0")
    row = cells("control", "dm_control/cheetah-run-v0")
    assert row[4] == f"{np.mean(played):.1f} [{played[0]:.1f}, {played[2]:.1f}]"
    assert row[5] == "432.6 ± 82.5"  # after 1M steps, as ours
    folder = RESULTS / "dm_control-cheetah-run-v0" / "ppo_continuous_action"
    files = (json.loads((folder / f"default-s{k}.json").read_text()) for k in (201, 202, 203))
    z = [(info["final_return"] - 432.56) / 82.54 for info in files]
    chances = [0.5 * (1 + math.erf(x / math.sqrt(2))) for x in z]
    assert row[6] == f"{np.mean(chances):.2f}"
    middle = f"{np.mean(played_by('HalfCheetah-v4', 'rpo-0.1')):,.0f} ["
    assert cells("rpo", "`--rpo-alpha 0.1`")[2].startswith(middle)
    assert cells("rpo", "none")[6].startswith(f"{np.mean(played):.1f} [")


def test_each_goal_of_the_study_has_what_came_nearest():
    row = cells("goals", "HalfCheetah-v4, 1M")
    assert row[1:3] == ["7,000", "5,819 (one tuned run)"]
    default = cells("finalists", "`--target-kl 0.02`, now the default")
    assert row[3].split(" [")[0] == default[3].split(" [")[0]
    tried = [tables.BLOCKS[x]().splitlines()[2:] for x in ("what-matters", "finalists")]
    cheetah = [line.split("|")[4].split(" [")[0].strip() for line in tried[0][1:] + tried[1][1:]]
    highest = max(float(x.replace(",", "")) for x in cheetah if x != "-")
    assert row[4].startswith(f"{highest:,.0f} [")


def test_coadys_tables_by_hand():
    folder = RESULTS / "HalfCheetah-v4" / "ppo_kl_adaptive"
    firsts, highest = [], []
    for seed in range(1, 6):
        with gzip.open(folder / f"default-s{seed}.csv.gz", "rt") as file:
            returns = [float(line.split(",")[2]) for line in list(file)[1:]]
        means = {k: sum(returns[k - 5 : k]) / 5 for k in range(5, len(returns) + 1)}
        firsts.append(next((f"{k:,}" for k in means if means[k] >= 4700), "-"))
        highest.append(f"{max(means.values()):,.0f}")
    assert firsts.count("-") == 3
    row = cells("coady-episodes", "HalfCheetah-v4, 4,700")
    assert row[1:4] == [", ".join(firsts), "1,966", "20,785"]
    row = cells("coady-best", "HalfCheetah-v4")
    assert row[1:3] + row[-1:] == [", ".join(highest), "5,363", "3,000"]


def test_every_extra_that_a_page_installs_exists():
    project = tomllib.loads((docs.ROOT / "pyproject.toml").read_text())["project"]
    text = "".join(page.read_text() for page in docs.PAGES)
    named = {
        name for found in re.findall(r"-e '\.\[([\w,-]+)\]'", text) for name in found.split(",")
    }
    assert named >= {"benchmark", "dev", "envpool"}
    assert named <= project["optional-dependencies"].keys()


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
