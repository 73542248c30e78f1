"""List the resumable checkpoints of a run, newest first, and what is wrong with each.

python scripts/checkpoints.py RUN
"""

import argparse
import sys
from pathlib import Path

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from scripts.parts import checkpoints


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="directory of the run")
    options = parser.parse_args()
    checkpoints.list_checkpoints(options.run)


if __name__ == "__main__":
    main()
