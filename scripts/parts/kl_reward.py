"""--kl_in_reward: the advantages of groups whose packs are on several ranks. grpo.put_kl_in_reward uses it."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

Name = tuple[int, int]  # position and sample


class KLReward(NamedTuple):
    """What the ranks exchange about a rollout. It sorts by position and sample."""

    position: int
    sample: int
    score: float
    penalized: float  # score less beta times its KL
    tokenless: list[float]  # scores of responses in no batch: they count in the group and train nothing


class Change(NamedTuple):
    """The advantage of a rollout before its group had the KL in its scores, and after."""

    before: float
    after: float


def changes(rewarded: Iterable[KLReward], advantages_of: Callable[[list[float]], list[float]]) -> dict[Name, Change]:
    """The Change of each rollout of all ranks, with `advantages_of` the scores of a group."""
    groups: dict[int, list[KLReward]] = {}  # by position
    for reward in sorted(
        rewarded
    ):  # the order, and so the rounding of the mean, is the same for every split into packs
        groups.setdefault(reward.position, []).append(reward)

    made = {}
    for group in groups.values():
        tokenless = group[0].tokenless
        before = advantages_of([reward.score for reward in group] + tokenless)
        after = advantages_of([reward.penalized for reward in group] + tokenless)
        for i, reward in enumerate(group):
            made[reward.position, reward.sample] = Change(before[i], after[i])
    return made
