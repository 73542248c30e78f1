"""The reward of the full experiments for TRL's side: our verifier gsm8k_verl, veRL's rule for GSM8K."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
import rewards


def gsm8k_verl(response: str, ground_truth) -> float:
    if response is None:
        return 0.0
    record = rewards.RewardRecord(response, ground_truth, "")
    return float(rewards.verify_gsm8k_verl(record).score)
