"""Send a run's metrics and sample rollouts to Weights & Biases and TensorBoard, while it runs or afterwards.

python scripts/track.py RUN --wandb        an old run; WANDB_MODE=offline works
python scripts/track.py RUN --tensorboard  event files in RUN/tensorboard; pip install tensorboard
python scripts/track.py RUN --wandb --follow  until Ctrl-C, or until stdin closes where that is a pipe
"""

import sys
from pathlib import Path

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from scripts.parts import track

if __name__ == "__main__":
    raise SystemExit(track.main(__doc__))
