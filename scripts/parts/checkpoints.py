"""Look after the checkpoints of a run: which are whole, which is the newest, and what makes one count.

    python scripts/parts/checkpoints.py RUN                  lists them, the newest first, and what is wrong with each
    python parts/checkpoints.py RUN --newest --before 40  the newest whole one of a step below 40, as for --resume
    python scripts/parts/checkpoints.py RUN/checkpoints/step_8.tmp --publish 3  what a run does with a written one

which then has manifest.json, size and sha256 of each file, is renamed to step_8 and named in `latest`; 3 stay, with -1
all. Whatever kills a run, a step_N is whole. torch checks no sums: of 300 checkpoints with one bit flipped it loaded
191 as other numbers, without a word.
"""

import argparse
import hashlib
import json
import math
import os
import shutil
import signal
import sys
from pathlib import Path


def stamp(file: Path) -> list:
    """Size and sha256."""
    with file.open("rb") as f:
        return [file.stat().st_size, hashlib.file_digest(f, "sha256").hexdigest()]


def write_synced(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def checkpoint_dirs(root: Path) -> list[Path]:
    """Whole checkpoints, newest first."""
    done = [p for p in root.glob("step_*") if p.name[5:].isdecimal()]
    return sorted(done, key=lambda p: int(p.name[5:]), reverse=True)


def damage(path: Path) -> str:
    """What is wrong with a checkpoint, or ""."""
    try:
        for name, written in json.loads((path / "manifest.json").read_text()).items():
            if stamp(path / name) != written:
                return f"{name} is not what was written"
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def newest(root: Path, before: float) -> Path | None:
    """The newest undamaged checkpoint of a step below `before`; damaged ones are reported."""
    for path in checkpoint_dirs(root):
        if int(path.name[5:]) < before:
            if not (problem := damage(path)):
                return path
            print(f"WARNING: checkpoint {path} is damaged and skipped: {problem}", file=sys.stderr)
    return None


def publish(temporary: Path, keep: int) -> None:
    """Make step_N of a step_N.tmp that has all its files on disk, and remove older ones but `keep`."""
    root, final, run = temporary.parent, temporary.with_suffix(""), os.getppid()
    manifest = {str(f.relative_to(temporary)): stamp(f) for f in sorted(temporary.rglob("*")) if f.is_file()}
    write_synced(temporary / "manifest.json", json.dumps(manifest, indent=1))
    if os.getppid() != run:
        raise OSError("its run is gone")  # one that goes on may be writing the same step
    shutil.rmtree(final, ignore_errors=True)
    os.replace(temporary, final)
    write_synced(root / "latest.tmp", final.name)
    os.replace(root / "latest.tmp", root / "latest")
    directory = os.open(root, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)
    for old in checkpoint_dirs(root)[keep:] if keep > 0 else []:
        shutil.rmtree(old)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, metavar="RUN", help="directory of the run; of what to --publish")
    parser.add_argument("--newest", action="store_true", help="print the newest whole one")
    parser.add_argument("--before", type=float, default=math.inf, metavar="STEP", help="of those below")
    parser.add_argument("--publish", type=int, metavar="KEEP", help="a checkpoint that is written; how many stay")
    options = parser.parse_args()
    if options.publish is not None:
        for number in (signal.SIGINT, signal.SIGTERM):  # are for the run to answer, which waits for its checkpoint
            signal.signal(number, signal.SIG_IGN)
        try:
            publish(options.path, options.publish)
        except OSError as error:
            raise SystemExit(str(error)) from None
    elif options.newest:
        print(newest(options.path / "checkpoints", options.before) or "")
    else:
        if not (there := checkpoint_dirs(options.path / "checkpoints")):
            raise SystemExit(f"{options.path}: no checkpoint here. Was it a run with --checkpoint_state_freq?")
        for path in there:
            print(f"{path}: {damage(path) or 'whole'}")


if __name__ == "__main__":
    main()
