"""Train a script with changes.

    change.py NAME FLAGS...         the script's own flags; NAME+NAME makes two changes
    change.py --resume RUN          later; or --evaluate RUN

Each change is a patch in changes/. It changes ppo_cma.py if its name begins with cma-,
ppo_kl_adaptive.py if with coady-, and else ppo_continuous_action.py. The patches and their numbers
are of the scripts at COMMIT, so the script is read from there.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
COMMIT = "e500984"
SCRIPTS = {"cma": "ppo_cma.py", "coady": "ppo_kl_adaptive.py"}  # by how a change's name begins


def script_of(name: str) -> str:
    return SCRIPTS.get(name.split("-")[0], "ppo_continuous_action.py")


def changed(names: str):
    """The script that these changes belong to, as a module with the changes made."""
    script = script_of(names)
    paths = sorted((HERE / "changes").glob("*.patch"))
    known = {path.stem: path for path in paths if script_of(path.stem) == script}
    if not set(names.split("+")) <= known.keys():
        raise SystemExit(f"change.py {names}: not among {', '.join(known)}")
    kept = tempfile.TemporaryDirectory()  # until the program ends, because its text is read again
    folder = Path(kept.name)
    text = subprocess.run(["git", "show", f"{COMMIT}:{script}"], cwd=HERE, capture_output=True)
    if text.returncode:
        raise SystemExit(f"change.py needs commit {COMMIT}: git fetch --unshallow")
    (folder / script).write_bytes(text.stdout)
    here = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}  # git sees no clone above
    for name in names.split("+"):
        subprocess.run(["git", "apply", known[name]], cwd=folder, env=here, check=True)
    name = f"changed_{names.replace('.', '_')}"  # always the same, for torch's compile cache
    spec = importlib.util.spec_from_file_location(name, folder / script)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    module.kept = kept
    spec.loader.exec_module(module)
    module.__name__ = "__main__"  # its last line names this program
    return module


def main():
    name, *flags = sys.argv[1:] or [""]
    if name in ("--resume", "--evaluate"):  # the run's name says which changes it has
        run = json.loads((Path(flags[0]) / "run.json").read_text())
        flags = [name, *flags]
        name = run["args"]["exp_name"]
    else:
        flags += ["--exp-name", name]
    script = changed(name)
    args = script.parse_args(flags)
    if args.evaluate:
        script.evaluate(args)
    else:
        script.train(args)


if __name__ == "__main__":
    main()
