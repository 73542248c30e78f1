"""What a run ran: the changes of this checkout and the user's files that its flags name, copied to RUN/code.

    code/changes.diff         `git diff HEAD`: with the commit in environment.json that is the code, but for new files
    code/FLAG/NAME.py         the files of --reward_file, --env_file and --tools

environment.json has their sha256. A resumed run with another file of the user's is another run: see run_dir.py. With
other changes of the checkout it goes on with a warning. A file that is replaced here keeps its place under a longer
name, which ends with 8 characters of its sha256. Modules that the user's files import are not copied.
"""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import utils

CHANGES = "changes.diff"
MOST_BYTES = 10**6  # of the changes: more are data, not code
OF_THE_CHECKOUT = (CHANGES, "git_commit")  # what may change with a warning

Hashes = dict[str, str]  # name below RUN/code -> sha256; of what is not kept, the reason


def files_of(args: dict[str, Any]) -> dict[str, Path]:
    """The user's files that the flags name, by their names below RUN/code."""
    found = {}
    for flag in ("reward_file", "env_file", "tools"):
        given = args.get(flag) or []
        for name in [given] if isinstance(given, str) else given:
            path = Path(name)
            if path.is_file():  # not a tool of scripts/tools
                found[f"{flag}/{path.name}"] = path
    return found


def changes() -> bytes:
    """What `git diff HEAD` prints; nothing outside of a git checkout."""
    command = ["git", "-C", str(utils.REPO), "diff", "--no-ext-diff", "--no-color", "HEAD"]
    return subprocess.run(command, capture_output=True, check=False).stdout


def hashes(args: dict[str, Any], diff: bytes) -> Hashes:
    """The sha256 of all that a run keeps."""
    found = {name: sha256(path.read_bytes()) for name, path in files_of(args).items()}
    return found | {CHANGES: sha256(diff)}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def differences(then: Hashes, now: Hashes) -> list[str]:
    """The user's files that are others than those of the run's last start, each in words for a person. An older run
    kept none, which tells nothing."""
    changed = []
    for name, digest in now.items():
        before = then.get(name, digest)
        if name not in OF_THE_CHECKOUT and before != digest:
            changed.append(f"{name}: sha256 {before[:8]} then, {digest[:8]} now, see code/{name} in the run")
    return changed


def warn(then: Hashes, now: Hashes) -> None:
    """Print whether a resumed run goes on with another checkout."""
    changed = [name for name in OF_THE_CHECKOUT if then.get(name, now[name]) != now[name]]
    if changed:
        what = " and ".join("commit" if name == "git_commit" else "uncommitted changes" for name in changed)
        print(f"WARNING: --resume: the {what} of this checkout are not those of the last start", flush=True)


def keep(run_dir: Path, args: dict[str, Any], diff: bytes, then: Hashes) -> None:
    """Copy all into RUN/code. Of `then`, the hashes before, what changes is kept under another name. Raises OSError."""
    for name, path in files_of(args).items():
        place(run_dir / "code" / name, path.read_bytes(), then.get(name, ""))
        shutil.copymode(path, run_dir / "code" / name)
    if len(diff) > MOST_BYTES:
        print(
            f"WARNING: git diff HEAD has {len(diff):,} bytes, of which {run_dir}/code keeps the sha256 only", flush=True
        )
    elif diff:
        place(run_dir / "code" / CHANGES, diff, then.get(CHANGES, ""))
    elif CHANGES in then:
        put_aside(run_dir / "code" / CHANGES, then[CHANGES])


def place(path: Path, content: bytes, before: str) -> None:
    """Write a file, aside first; another one that is there keeps its content under another name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.read_bytes() != content:
        put_aside(path, before)
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.touch()
    temporary.chmod(0o600)  # before it has anybody's key in it
    temporary.write_bytes(content)
    os.replace(temporary, path)


def put_aside(path: Path, before: str) -> None:
    """Rename a file so that its name has the beginning of its sha256."""
    if path.exists():
        os.replace(path, path.with_name(f"{path.name}.{before[:8] or sha256(path.read_bytes())[:8]}"))
