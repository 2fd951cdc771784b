"""ppo_continuous_action.py with changes: `change.py NAME`, or `NAME+NAME`, then its own flags. Each
is a file of changes/; in a clone, `git apply benchmark/published/changes/NAME.patch` makes it.
"""

import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCRIPT = HERE.parents[1] / "ppo_continuous_action.py"


def changed(names: str, folder: Path) -> Path:
    """A copy of the script with these changes."""
    known = {path.stem: path for path in sorted((HERE / "changes").glob("*.patch"))}
    if not set(names.split("+")) <= known.keys():
        raise SystemExit(f"change.py {names}: not among {', '.join(known)}")
    shutil.copy(SCRIPT, folder)
    here = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}  # not in a clone around it
    for name in names.split("+"):
        subprocess.run(["git", "apply", known[name]], cwd=folder, env=here, check=True)
    return folder / SCRIPT.name


if __name__ == "__main__":
    names = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    with tempfile.TemporaryDirectory() as folder:
        runpy.run_path(str(changed(names, Path(folder))), run_name="__main__")
