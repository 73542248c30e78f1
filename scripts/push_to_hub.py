"""Upload the final model of a run to the Hugging Face hub: see scripts/parts/push_to_hub.py, or --help."""

import sys
from pathlib import Path

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from scripts.parts import push_to_hub

if __name__ == "__main__":
    raise SystemExit(push_to_hub.main())
